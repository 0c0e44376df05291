"""What the referee says of a pair, without what it takes to find out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tracediff.events import Pair
from tracediff.verdict import Bound

if TYPE_CHECKING:
    from tracediff.replaying import Call


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the referee found.

    Attributes:
        within: Whether inputs, parameters and rounding explain the difference.
        bound: What they explain, relative to the baseline.
        blame: baseline, target, both or undecided.
        evidence: Figures for the report: each side's distance to the reference.
        note: One sentence for the report, or "".
        call: The baseline's call.
        sources: Port -> the pair that is all there is behind it; None where edges have to say.
        rounding: What rounding at the place adds, in one spread, relative to the baseline.
        limit: Spreads that the error of the whole stays below.
    """

    within: bool
    bound: Bound
    call: Call
    rounding: float
    limit: float
    blame: str = "undecided"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    sources: Mapping[str, Pair] | None = None

    def passed_on(self, sizes: Sequence[Mapping[str, float]]) -> list[float | None]:
        """How far inputs that are apart by so much take the output, see `perturbed`."""
        from tracediff.bisection.recompute import perturbed

        return perturbed(self.call, sizes)
