"""How processes that were forked from the recorded one hand over what they recorded."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

Operation = tuple[str, Any]
"""A name and its content, JSON types only."""


class Spool:
    """A folder with one file per writer, and one line in it per piece of work.

    A writer has written its line before it hands over the work's result, so whoever gets the
    result finds the line. Made by the recorded process, before it forks.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tracediff-"))
        self._open: dict[str, IO[str]] = {}

    def write(self, writer: str, operations: Sequence[Operation]) -> None:
        """Adds a line. JSON escapes keep lone surrogates, which no encoding could write."""
        with (self._folder / writer).open("a", encoding="ascii") as file:
            file.write(json.dumps(operations) + "\n")

    def read(self, writer: str) -> list[Operation] | None:
        """The writer's next line; None where there is none."""
        if writer not in self._open:
            path = self._folder / writer
            if not path.exists():
                return None
            self._open[writer] = path.open(encoding="ascii")
        line = self._open[writer].readline()
        return [(name, content) for name, content in json.loads(line)] if line else None

    def writers(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir())

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        shutil.rmtree(self._folder, ignore_errors=True)
