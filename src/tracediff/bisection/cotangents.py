"""Gradients of forward values whose backward operations a framework does not show.

The event of such a gradient refers to the forward event whose value it is the gradient of. What
has been computed from that value, and with which gradients, is on the tape as well: the gradient is
the sum of what these uses pass back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.align.flow import Flow, call_of, name_of, output_of
from tracediff.events import Event
from tracediff.replaying import Operation, Replayed, Replayer, Use

_EXPLAINED: Final = 1 / 16
"""The part of an error that a multiple of one use's gradient leaves, if it explains the error."""


def is_cotangent(event: Event) -> bool:
    """Whether an event is the gradient of a forward event's value, under that event's name."""
    return event.site.port.startswith("grad_") and "forward_order" in event.attributes


@dataclass(frozen=True, slots=True)
class Read:
    """An operation that reads a value: its outputs and their gradients, by order, and where among
    its inputs the value is."""

    event: Event
    place: int
    outputs: tuple[Event, ...]
    gradients: tuple[int | None, ...]


class Cotangents:
    """The gradients of one side's forward values, by the uses that they come from."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._outputs: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
        self._readers: dict[int, dict[tuple[str, str, int], Event]] = defaultdict(dict)
        self._gradients: dict[int, list[int]] = defaultdict(list)
        for event in flow.events.values():
            if is_cotangent(event):
                self._gradients[event.attributes["forward_order"]].append(event.order)
                continue
            self._outputs[call_of(event)].append(event)
            for order in flow.inputs[event.order]:
                self._readers[order].setdefault(call_of(event), event)
        self._reads: dict[int, tuple[Read, ...]] = {}

    def reads(self, event: Event) -> tuple[Read, ...]:
        """The uses that a gradient is the sum of; none where it is given to the backward pass."""
        if event.order not in self._reads:
            self._reads[event.order] = tuple(self._found(event))
        return self._reads[event.order]

    def _found(self, event: Event) -> list[Read]:
        """Uses since the gradient before: a parameter has one in each part of a step."""
        forward = event.attributes["forward_order"]
        earlier = [order for order in self._gradients[forward] if order < event.order]
        since = max(earlier, default=-1)
        found = []
        for call, reader in self._readers[forward].items():
            outputs = tuple(self._outputs[call])
            gradients = tuple(self._gradient(o.order, event.order) for o in outputs)
            if reader.order < since or all(order is None for order in gradients):
                continue
            inputs = self._flow.inputs[reader.order]
            found += [
                Read(reader, place, outputs, gradients)
                for place, order in enumerate(inputs)
                if order == forward
            ]
        return found

    def _gradient(self, forward: int, before: int) -> int | None:
        known = [order for order in self._gradients.get(forward, ()) if order < before]
        return known[-1] if known else None

    def pull_back(
        self,
        reference: Replayer,
        event: Event,
        known: Mapping[int, NDArray[Any]],
        reads: Sequence[Read] | None = None,
    ) -> Replayed | None:
        """The gradient in float64; None where the derivative of a use is not known.

        Args:
            known: Order -> value of all that the gradient was computed from.
            reads: The uses whose part of it is meant, all of them if it is None.
        """
        reads = self.reads(event) if reads is None else reads
        if not reads:
            return _seed() if event.shape == () else None
        uses = []
        for read in reads:
            wanted = [*self._flow.inputs[read.event.order], *filter(None, read.gradients)]
            if any(order not in known for order in wanted):
                return None
            cotangents = tuple(None if o is None else known[o] for o in read.gradients)
            uses.append(
                Use(
                    operation=self.operation(read.event, known),
                    place=read.place,
                    cotangents=cotangents,
                )
            )
        return reference.pull_back(uses, event.dtype)

    def suspects(
        self,
        reference: Replayer,
        event: Event,
        known: Mapping[int, NDArray[Any]],
        found: NDArray[Any],
    ) -> tuple[tuple[Read, ...], float]:
        """The uses of which one passed back something wrong, and the factor by which it did, if one
        alone explains it: what is wrong is a multiple of what it should have passed back.

        Args:
            found: The gradient as it was recorded.
        """
        reads = self.reads(event)
        parts = [self.pull_back(reference, event, known, (read,)) for read in reads]
        values = [part.value for part in parts if part is not None]
        if len(values) < len(reads) or len({read.event.order for read in reads}) < 2:
            return reads, 1.0
        error = found.astype(np.float64) - sum(values)
        size = float((error**2).sum())
        for read, value in zip(reads, values, strict=True):
            own = float((value**2).sum())
            factor = float((error * value).sum()) / own if own else 0.0
            if float(((error - factor * value) ** 2).sum()) <= _EXPLAINED**2 * size:
                return (read,), 1.0 + factor
        return reads, 1.0

    def operation(self, event: Event, known: Mapping[int, NDArray[Any]]) -> Operation:
        """An operation with values for its inputs."""
        return operation_of(
            event, self._flow, [known[order] for order in self._flow.inputs[event.order]]
        )


def operation_of(
    event: Event,
    flow: Flow,
    inputs: Sequence[NDArray[Any]],
    shape: tuple[int, ...] | None = None,
) -> Operation:
    """An operation as its event tells of it, on given inputs.

    Args:
        shape: Of the result, where it is not that of the event.
    """
    return Operation(
        canonical=name_of(event),
        op=event.op,
        inputs=tuple(inputs),
        operands=tuple(event.attributes.get("operands", ())),
        args=event.attributes.get("args", {}),
        output=output_of(event),
        outputs=flow.outputs[call_of(event)],
        shape=event.shape if shape is None else shape,
        dtype=event.dtype,
    )


def _seed() -> Replayed:
    """The gradient of a loss with respect to itself."""
    return Replayed(np.ones(()), np.zeros(()), "a loss's own gradient is 1")
