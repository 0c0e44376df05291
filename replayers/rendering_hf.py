"""Route `hf`: transformers' own way, template and token IDs in one call."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tracediff.rendering.files import read_files
from tracediff.rendering.records import Record
from tracediff.rendering.routes import Rendered, RouteError
from tracediff.rendering.routes import Route as BaseRoute


def parts(path: Path) -> dict[str, str]:
    """What does the work where transformers renders and encodes."""
    files = read_files(path)
    return {
        "template engine": f"jinja2 {version('jinja2')}",
        "template set-up": f"transformers {version('transformers')}",
        "tokenizer": f"tokenizers {version('tokenizers')} (Rust)",
        "Unicode tables": "those of tokenizers",
        "template": files.template_digest,
        "vocabulary": files.tokenizer_digest if files.tokenizer else "",
    }


class Route(BaseRoute):
    """`AutoTokenizer.from_pretrained(folder).apply_chat_template(...)`."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if not getattr(self.tokenizer, "chat_template", None):
            raise RouteError(f"route hf: the tokenizer in {path} has no chat template: add one")
        self.parts = {"front end": "transformers, one call", **parts(path)}
        self.vocabulary = read_files(path).vocabulary()

    def render(self, record: Record) -> Rendered:
        text = self.apply(record, tokenize=False)
        return Rendered(text, tuple(self.apply(record, tokenize=True, return_dict=False)))

    def apply(self, record: Record, **how: Any) -> Any:
        """`apply_chat_template` with all that the record holds."""
        messages: Sequence[Any] = [dict(message) for message in record.messages]
        return self.tokenizer.apply_chat_template(
            messages,
            tools=record.tools,
            add_generation_prompt=record.add_generation_prompt,
            **how,
            **record.variables,
        )
