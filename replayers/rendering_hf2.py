"""Route `hf2`: transformers in two calls, as many scripts do: render, then encode the text."""

from __future__ import annotations

from pathlib import Path

from tracediff.rendering.records import Record
from tracediff.rendering.routes import Rendered
from tracediff.replayers.rendering_hf import Route as OneCall


class Route(OneCall):
    """The text of the template, encoded by the tokenizer with whatever it adds by itself."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.parts = {**self.parts, "front end": "transformers, two calls"}

    def render(self, record: Record) -> Rendered:
        text = self.apply(record, tokenize=False)
        return Rendered(text, tuple(self.tokenizer(text)["input_ids"]))
