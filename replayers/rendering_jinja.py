"""Route `jinja`: minijinja, an engine in Rust, and `tokenizer.json` through tokenizers."""

from __future__ import annotations

import json
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import minijinja

from tracediff.rendering.files import read_files
from tracediff.rendering.records import Record
from tracediff.rendering.routes import RefusedError, Rendered, RouteError
from tracediff.rendering.routes import Route as BaseRoute


class Route(BaseRoute):
    """A template from a folder or a file; from a file there are texts only."""

    def __init__(self, path: Path) -> None:
        files = read_files(path)
        if files.template is None:
            raise RouteError(f"route jinja: {path} has no chat template: add chat_template.jinja")
        self._template, self._special = files.template, files.special
        self._environment = _environment()
        self._encode = _tokenizer(path) if files.tokenizer else None
        self.vocabulary = files.vocabulary()
        self.parts = {
            "template engine": f"minijinja {version('minijinja')} (Rust)",
            "template set-up": "tracediff, for minijinja",
            "template": files.template_digest,
        }
        if self._encode:
            self.parts |= {
                "tokenizer": f"tokenizers {version('tokenizers')} (Rust)",
                "Unicode tables": "those of tokenizers",
                "vocabulary": files.tokenizer_digest,
            }

    def render(self, record: Record) -> Rendered:
        text = self._environment.render_str(
            self._template,
            None,
            messages=record.messages,
            tools=record.tools,
            documents=None,
            add_generation_prompt=record.add_generation_prompt,
            **self._special,
            **record.variables,
        )
        if self._encode is None:
            return Rendered(text)
        return Rendered(text, tuple(self._encode.encode(text, add_special_tokens=False).ids))


def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer  # only folders with a tokenizer.json need it

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_truncation()  # a file may ask for both; chats are encoded whole
    tokenizer.no_padding()
    return tokenizer


def _environment() -> minijinja.Environment:
    """An environment with the functions and options that chat templates are written for."""
    return minijinja.Environment(
        debug=False,  # errors in one line, without the source around them
        auto_escape_callback=lambda name: False,
        trim_blocks=True,
        lstrip_blocks=True,
        filters={"tojson": _to_json},
        globals={"raise_exception": _refuse, "strftime_now": _now},
    )


def _to_json(value: Any, indent: int | None = None, **how: Any) -> str:
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **how})


def _refuse(message: str) -> None:
    raise RefusedError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
