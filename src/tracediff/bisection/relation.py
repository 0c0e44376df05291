"""One relation between a pair and others, tried on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from tracediff.bisection.recompute import reference
from tracediff.bisection.trial import Counts, Trial, Values, side
from tracediff.events import Pair
from tracediff.replaying import Call

Inputs = tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation that holds on at least one side.

    Attributes:
        sources: Port -> pair that the value was computed from.
        call: The baseline's.
        rank: Of relations that hold on one side only, those of the lowest are believed.
    """

    trial: Trial
    derivation: str
    sources: Mapping[str, Pair]
    call: Call
    rank: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """A pair to be explained by others, or a part of its values.

    Attributes:
        values: Both payloads, finite, in the baseline's layout.
        counts: False where an element is padding, broadcastable to the shape.
        settings: Of both sides, with `operand_roundoff`.
        spot: Nothing looks wrong: a part of a large value will do.
    """

    pair: Pair
    values: Values
    counts: Counts
    settings: tuple[Mapping[str, Any], Mapping[str, Any]]
    spot: bool = False

    def part(self, index: Any) -> Attempt:
        """The same on some elements, all of which count where the index picks single ones."""
        return replace(self, values=(self.values[0][index], self.values[1][index]), counts=None)

    def holds(
        self,
        op: str,
        settings: Mapping[str, Any],
        sources: Mapping[str, Pair],
        inputs: Inputs,
        rank: int,
    ) -> Relation | None:
        """The relation, if a side satisfies it over all elements that count.

        Args:
            inputs: Port -> array, of both sides.
        """
        sides, calls, derivation = [], [], ""
        for which, event in enumerate((self.pair.baseline, self.pair.target)):
            cut = {"operand_roundoff": self.settings[which]["operand_roundoff"]}
            given = inputs[which]
            call = Call(op=op, inputs=given, settings={**settings, **cut}, dtype=event.dtype)
            found = reference().replay(call)
            if found is None or found.value.shape != self.values[which].shape:
                return None
            sides.append(side(self.values[which], found, self.counts))
            calls.append(call)
            derivation = found.derivation
        trial = Trial((sides[0], sides[1]))
        if not any(trial.holding):
            return None
        return Relation(trial, derivation, sources, calls[0], rank)
