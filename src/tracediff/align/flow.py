"""Operation events as a graph of values.

Stacks differ most in how often they lay the same numbers out anew: a product in one may be a
reshape, a product, two reshapes and a transpose in the other. A **value** is an event together with
the events that only hold its elements in another layout (view, transpose, contiguous copy, a
dropout that is off), found by their fingerprints, whatever the operations are called. A value that
comes from nowhere (the recorder lost sight of it, or a mask is made anew for each layer) belongs to
the last one of the same bits. An operation on several values of one size computes, also where its
result is one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tracediff.align.fingerprints import norm, same_elements
from tracediff.events import Event

LEVEL: Final = "op"

FEW: Final = 16
"""Elements below which equal statistics, or even equal bits, are no evidence."""


def is_operation(event: Event) -> bool:
    """Whether an event is of operation level, and so no part of module-level alignment."""
    return event.attributes.get("level") == LEVEL


def module_of(event: Event) -> str:
    """`model.layers.0.mlp@mul` -> `model.layers.0.mlp`."""
    path = event.site.path
    return path.rpartition("@")[0] or path


def name_of(event: Event) -> str:
    """The canonical name of the operation."""
    return str(event.attributes.get("canonical") or event.site.path.rpartition("@")[2])


def call_of(event: Event) -> tuple[str, str, int]:
    """What the outputs of one operation have in common."""
    return event.site.phase, event.site.path, event.site.call


def output_of(event: Event) -> int:
    """Which output of its operation an event is, from 0."""
    number = event.site.port.partition(".")[2]
    return int(number) if number.isdecimal() else 0


@dataclass(eq=False, slots=True)
class Value:
    """One value of a run and its layouts.

    Attributes:
        index: Place among the values of its side, in the order of execution.
        module: Module path of the operation that produced it, in the baseline's names.
        event: The event that produced it.
        name: Canonical name of the operation that did.
        count: Number of its elements.
        members: That event, then those that lay the value out anew.
        inputs: Values that it was computed from.
        zeros: Values that its layouts were made with besides, which change nothing.
        users: Values that were computed from it.
    """

    index: int
    module: str
    event: Event
    name: str
    phase: str
    count: float
    is_leaf: bool
    members: list[Event] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    zeros: list[Value] = field(default_factory=list)
    users: list[Value] = field(default_factory=list)


def _value(index: int, module: str, event: Event) -> Value:
    leaf = bool(event.attributes.get("leaf"))
    count = event.fingerprint[0]
    name, phase = name_of(event), event.site.phase
    return Value(index, module, event, name, phase, count, leaf, [event])


class Flow:
    """The values of one side, and which of them each event holds.

    Args:
        events: Operation events of a step, in order.
        rename: Gives a module path in the baseline's names.

    Attributes:
        inputs: Order of an event -> orders of what it was computed from, as far as they are here.
        outputs: Operation (see `call_of`) -> how many outputs it has.
    """

    def __init__(
        self, events: Sequence[Event], rename: Callable[[str], str] = lambda path: path
    ) -> None:
        self.events = {event.order: event for event in events}
        self.outputs = Counter(call_of(event) for event in events)
        self.inputs = {
            event.order: [o for o in event.inputs if o in self.events and o < event.order]
            for event in events
        }
        self.values: list[Value] = []
        self.of_order: dict[int, Value] = {}
        self._by_digest: dict[tuple[bytes, str], Value] = {}
        for event in events:
            if event.fingerprint:
                self._add(event, rename)

    def _add(self, event: Event, rename: Callable[[str], str]) -> None:
        orders = self.inputs[event.order]
        inputs = [self.of_order[order] for order in orders if order in self.of_order]
        large = [value for value in inputs if _could_be(event, value)]
        source = large[0] if len(large) == 1 and _lays_out(event, large[0]) else None
        same = (event.digest, event.dtype)
        if source is None and event.attributes.get("leaf"):
            source = self._by_digest.get(same)
        if source is not None:
            source.members.append(event)
            source.zeros += [each for each in inputs if not norm(each.event.fingerprint)]
            self.of_order[event.order] = source
            return
        value = _value(len(self.values), rename(module_of(event)), event)
        for each in inputs:
            if each not in value.inputs:
                value.inputs.append(each)
                each.users.append(value)
        self.values.append(value)
        self.of_order[event.order] = value
        if value.count >= FEW:
            self._by_digest[same] = value


def _could_be(event: Event, value: Value) -> bool:
    """Whether an event may hold a value's elements. Zeros of the same size are no second operand:
    the first moment before the first update."""
    return (
        value.count == event.fingerprint[0]
        and value.phase == event.site.phase
        and value.event.dtype == event.dtype
        and (norm(value.event.fingerprint) > 0 or norm(event.fingerprint) == 0)
    )


def _lays_out(event: Event, value: Value) -> bool:
    first = value.event
    return (
        event.dtype == first.dtype
        and event.site.phase == first.site.phase
        and event.fingerprint[0] > 1
        and same_elements(first.fingerprint, event.fingerprint)
    )
