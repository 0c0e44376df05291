"""What is found of a pair of operation spans whose inputs agree and whose outputs do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tracediff.align.flow import Value
from tracediff.align.matching import ValuePair
from tracediff.bisection.narrowing import Narrowed
from tracediff.bisection.spans import Check, Span
from tracediff.events import Event


@dataclass(frozen=True, slots=True)
class Finding:
    """The first pair of spans whose inputs agree and whose outputs do not.

    Attributes:
        inputs: The paired values that the spans start from.
        culprits: The operation that errs, on each side; None where none does by itself.
        checks: Every operation of both spans that has a formula.
        error: Unexplained difference over the norm of the baseline's value.
        bound: What rounding explains of it, in the same unit.
        blame: baseline, target, both or undecided.
        note: One sentence on what was found.
        lacking: The side, 0 or 1, that has no such operation and takes the value as it is.
        user: Its operation that does.
    """

    pair: ValuePair
    spans: tuple[Span, Span]
    inputs: tuple[tuple[Value, Value], ...]
    culprits: tuple[Event | None, Event | None]
    checks: Mapping[tuple[int, int], Check]
    error: float
    bound: float
    derivation: str
    blame: str
    note: str
    lacking: int | None = None
    user: Event | None = None

    def narrowed(self, part: Narrowed) -> Finding:
        """The same finding for the part of the spans at which they part."""
        note = self.note
        if part.lacking is not None:
            lacks = ("baseline", "target")[part.lacking]
            note = f"the {lacks} takes the value as it is"
        return replace(
            self,
            pair=ValuePair(*part.exits, self.pair.matched_by),
            spans=part.spans,
            inputs=part.inputs,
            error=self.error if part.error is None else part.error,
            note=note,
            lacking=part.lacking,
            user=part.user,
        )
