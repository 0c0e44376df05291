"""What a user may set: rules, coverage, and tolerances that override a bound."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tracediff.align import Rules
from tracediff.compare.figures import widened
from tracediff.compare.padding import Padding
from tracediff.errors import UsageError
from tracediff.events import Event
from tracediff.verdict import Bound

if TYPE_CHECKING:
    from tracediff.bisection.noise import Noise


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`|a - b| <= atol + rtol * |a|` for sites that match a shell-style pattern."""

    pattern: str
    rtol: float = 0.0
    atol: float = 0.0

    def accepts(self, a: NDArray[Any], b: NDArray[Any]) -> bool:
        wide_a, wide_b = widened(a), widened(b)
        return bool(np.allclose(wide_b, wide_a, rtol=self.rtol, atol=self.atol, equal_nan=True))


@dataclass(frozen=True, slots=True)
class Options:
    """Raises `UsageError` where `min_coverage` is no fraction.

    Attributes:
        noise: A replicate of the baseline, whose differences widen the bounds.
        every_step: Judge also the steps that marks say are no further apart than those before.
    """

    rules: Rules = field(default_factory=Rules)
    min_coverage: float = 0.9
    tolerances: tuple[Tolerance, ...] = ()
    noise: Noise | None = None
    every_step: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.min_coverage <= 1:
            raise UsageError(
                f"--min-coverage is {self.min_coverage:g}: give a fraction from 0 to 1"
            )

    def widened(self, event: Event, bound: Bound, padding: Padding) -> Bound | None:
        """The bound that a replicate asks for at a site, or None where the derived one holds."""
        return self.noise.widen(event, bound, padding) if self.noise else None

    def tolerance(self, site: str) -> Tolerance | None:
        """The tolerances of all patterns that match, the later one winning, or None."""
        matching = [t for t in self.tolerances if fnmatchcase(site, t.pattern)]
        if not matching:
            return None
        rtol = next((t.rtol for t in reversed(matching) if t.rtol), 0.0)
        atol = next((t.atol for t in reversed(matching) if t.atol), 0.0)
        return Tolerance(matching[-1].pattern, rtol, atol)


def parse_tolerances(rtol: Sequence[str], atol: Sequence[str]) -> tuple[Tolerance, ...]:
    """Reads `PATTERN=VALUE` options.

    Raises:
        UsageError: One is of another form.
    """
    parsed = []
    for name, entries in (("rtol", rtol), ("atol", atol)):
        for entry in entries:
            match = re.fullmatch(r"(.+)=([^=]+)", entry)
            try:
                value = float(match[2]) if match else -1.0
            except ValueError:
                value = -1.0
            if match is None or not value >= 0:
                raise UsageError(
                    f"--{name} {entry!r}: expected PATTERN=VALUE with a value of 0 or more, such "
                    "as '*/forward/*mlp*=1e-4'"
                )
            parsed.append(Tolerance(match[1], **{name: value}))
    return tuple(parsed)
