"""One mark, one colour and one word per outcome, the same in every report.

The mark and the word carry the meaning; colour only helps the eye, and is absent in pipes and
under NO_COLOR.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Mark:
    symbol: str
    ascii: str
    style: str
    colour: str

    def drawn(self, ascii_only: bool = False) -> str:
        return self.ascii if ascii_only else self.symbol


UNKNOWN: Final = Mark("?", "?", "magenta", "#8a3ffc")

MARKS: Final[Mapping[str, Mark]] = {
    "identical": Mark("✓", "=", "green", "#198038"),
    "equivalent": Mark("≈", "~", "green", "#198038"),
    "diverged": Mark("✗", "X", "red", "#da1e28"),
    "not exercised": Mark("–", "-", "dim", "#6f6f6f"),
    "incomparable": UNKNOWN,
    "unmatched": Mark("·", ".", "dim", "#6f6f6f"),
}


def mark(outcome: str) -> Mark:
    """The mark of an outcome; an outcome of a later release gets a question mark."""
    return MARKS.get(outcome, UNKNOWN)
