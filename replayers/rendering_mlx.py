"""Route `mlx`: mlx-lm's tokenizer wrapper, as its chat data set calls it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load

from tracediff.rendering.files import read_files
from tracediff.rendering.records import Record
from tracediff.rendering.routes import Rendered
from tracediff.rendering.routes import Route as BaseRoute
from tracediff.replayers.rendering_hf import parts


class Route(BaseRoute):
    """`mlx_lm.tokenizer_utils.load(folder).apply_chat_template(...)`."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Any = load(path)
        self.parts = {"front end": f"mlx-lm {version('mlx-lm')}", **parts(path)}
        self.vocabulary = read_files(path).vocabulary()

    def render(self, record: Record) -> Rendered:
        return Rendered(self._apply(record, False), tuple(self._apply(record, True)))

    def _apply(self, record: Record, tokenize: bool) -> Any:
        return self.tokenizer.apply_chat_template(
            [dict(message) for message in record.messages],
            tokenize=tokenize,
            tools=record.tools,
            add_generation_prompt=record.add_generation_prompt,
            **record.variables,
        )
