"""Route `bpe`: jinja2 set up by ourselves, and our own byte-level BPE in plain Python."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tracediff.rendering.files import read_files
from tracediff.rendering.records import Record
from tracediff.rendering.routes import RefusedError, Rendered, RouteError
from tracediff.rendering.routes import Route as BaseRoute
from tracediff.replayers.byte_level_bpe import ByteLevelBPE, UnsupportedError


class Route(BaseRoute):
    """A folder with a chat template and the `tokenizer.json` of a byte-level BPE."""

    def __init__(self, path: Path) -> None:
        files = read_files(path)
        if files.template is None or files.tokenizer is None:
            lacking = "chat template" if files.template is None else "tokenizer.json"
            raise RouteError(f"route bpe: {path} has no {lacking}: give a folder with both")
        try:
            self._bpe = ByteLevelBPE(files.tokenizer)
        except UnsupportedError as error:
            raise RouteError(
                f"route bpe does not implement {error}: use route jinja or js for {path}"
            ) from None
        self._template = _environment().from_string(files.template)
        self._special = files.special
        self.vocabulary = files.vocabulary()
        self.parts = {
            "template engine": f"jinja2 {version('jinja2')}",
            "template set-up": "tracediff, for jinja2",
            "tokenizer": f"tracediff's BPE, regex {version('regex')}",
            "Unicode tables": f"those of Python {sys.version_info.major}.{sys.version_info.minor}",
            "template": files.template_digest,
            "vocabulary": files.tokenizer_digest,
        }

    def render(self, record: Record) -> Rendered:
        text = self._template.render(
            messages=record.messages,
            tools=record.tools,
            documents=None,
            add_generation_prompt=record.add_generation_prompt,
            **self._special,
            **record.variables,
        )
        return Rendered(text, tuple(self._bpe.encode(text)))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _refuse(message: str) -> NoReturn:
    raise RefusedError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
