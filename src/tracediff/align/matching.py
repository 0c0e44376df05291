"""Which value of one side is which of the other, while the passes of alignment run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tracediff.align.flow import Flow, Value

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class ValuePair:
    """Two values taken for the same, and the pass that paired them.

    Attributes:
        layout: `whole`, `half` where one of them is half of the other, or `part` where one of them
            is on the way to the partner of the other.
    """

    baseline: Value
    target: Value
    matched_by: str
    layout: str = "whole"


class Matching:
    """Which value of one side is which of the other, while the passes run."""

    def __init__(self, baseline: Flow, target: Flow) -> None:
        self.sides = (baseline.values, target.values)
        self.partner: tuple[dict[Value, Value], dict[Value, Value]] = ({}, {})
        self.pairs: list[ValuePair] = []

    def pair(self, a: Value, b: Value, label: str, layout: str = "whole") -> None:
        self.partner[0][a], self.partner[1][b] = b, a
        self.pairs.append(ValuePair(a, b, label, layout))

    def is_part(self, a: Value, b: Value, label: str) -> None:
        self.pairs.append(ValuePair(a, b, label, "part"))

    def unpaired(self, side: int) -> Iterator[Value]:
        return (value for value in self.sides[side] if value not in self.partner[side])

    def is_causal(self, a: Value, b: Value) -> bool:
        """Whether what either is computed from has its partner before the other one.

        In a pair that is not, one side would compute a value from what the other makes of it.
        """
        return all(
            self.partner[side][x].index < other.index
            for side, (value, other) in enumerate(((a, b), (b, a)))
            for x in value.inputs
            if x in self.partner[side]
        )

    def agree_on_inputs(self, a: Value, b: Value) -> bool:
        """Whether each has a partner among the other's inputs, for all that are paired."""
        ours = {self.partner[0][x] for x in a.inputs if x in self.partner[0]}
        theirs = {x for x in b.inputs if x in self.partner[1]}
        return bool(ours) and ours == theirs


def grouped(values: Iterable[Value], key: Callable[[Value], Key]) -> dict[Key, list[Value]]:
    groups: dict[Key, list[Value]] = defaultdict(list)
    for value in values:
        groups[key(value)].append(value)
    return groups
