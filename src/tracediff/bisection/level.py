"""How far a value is apart, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Level:
    """How far a value is apart: the part that rounding explains, and all of it.

    Attributes:
        diverged: A divergence is in it, be it smaller than rounding.
    """

    carry: float = 0.0
    actual: float = 0.0
    diverged: bool = False

    @property
    def tainted(self) -> bool:
        """Whether more than rounding is passed on."""
        return self.diverged or self.actual > self.carry

    def share(self, part: float) -> Level:
        return Level(part * self.carry, part * self.actual, self.diverged)

    def __or__(self, other: Level) -> Level:
        return Level(
            max(self.carry, other.carry),
            max(self.actual, other.actual),
            self.diverged or other.diverged,
        )


def worst(levels: Iterable[Level]) -> Level:
    """The worse of each part."""
    result = Level()
    for level in levels:
        result |= level
    return result
