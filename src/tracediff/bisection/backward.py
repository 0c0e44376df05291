"""One side's backward pass as a trace holds it: what each gradient is made of.

The gradient of a value is the sum of what all its users pass back. Users are found by value, not by
name: calls with a formula whose input is bit for bit that value, is it with heads moved before the
sequence (rotary embedding), or is its sum or product with another value of the same module. What
comes back through a residual, where no module is, is the gradient of another value: see `Choice`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection import slopes
from tracediff.bisection.memory import Memory
from tracediff.bisection.recompute import operand_roundoff
from tracediff.bisection.trial import side
from tracediff.compare.figures import unit_roundoff
from tracediff.compare.places import evenly
from tracediff.events import ROOT, Event
from tracediff.replaying import Call, Floats, Replayed, Replayer
from tracediff.trace import Trace

Array = NDArray[Any]
Key = tuple[str, int]
"""Path and number of a call."""

Rows = NDArray[np.intp] | None

_LATEST: Final = 4
_KEPT: Final = 1 << 20
"""Gradients that are kept, and elements of one at most."""

_SAMPLE: Final = 8
"""Rows on which a sum or product is recognised."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one user passes back, or several together: the gradient, and its spread."""

    value: Floats
    spread: Floats
    calls: tuple[Key, ...]

    @property
    def source(self) -> str:
        return ", ".join(path for path, _ in self.calls)


class Backward:
    """The backward pass of one side in one step.

    Args:
        reference: What recomputes gradients of calls.
    """

    def __init__(
        self, trace: Trace, events: Sequence[Event], memory: Memory, reference: Replayer
    ) -> None:
        self._trace = trace
        self._memory = memory
        self._reference = reference
        self._outs: dict[Key, Event] = {}
        self._ins: dict[Key, Event] = {}
        self.grads: dict[Key, Event] = {}
        self._param_grads: Counter[str] = Counter()
        self._tried: dict[int, slopes.Part] = {}
        self._passed: dict[tuple[Any, ...], Replayed] = {}
        # A tensor whose parts have partners of their own is listed more than once.
        for event in {event.site: event for event in events}.values():
            self._take(event)
        self._calls = Counter(path for path, _ in self._outs)
        self._readers: dict[bytes, list[Key]] = defaultdict(list)
        self._writers: dict[bytes, list[Key]] = defaultdict(list)
        self._children: dict[Key, list[Key]] = defaultdict(list)
        for key, event in self._ins.items():
            self._readers[event.digest].append(key)
        for key, event in self._outs.items():
            self._writers[event.digest].append(key)
            self._children[self._parent(key)].append(key)

    def _take(self, event: Event) -> None:
        if event.shard:
            return  # formulas are of wholes, and a part may be one term of a sum
        phase, key, port = event.site.phase, (event.site.path, event.site.call), event.site.port
        if phase == "forward" and port == "in":
            self._ins[key] = event
        elif phase == "forward" and port == "out":
            self._outs[key] = event
        elif phase == "backward" and port == "grad_out":
            self.grads[key] = event
        elif phase == "backward" and port == "grad":
            self._param_grads[event.site.path] += 1

    # ---- gradients of parameters -----------------------------------------------------------

    def of_parameter(self, event: Event, rows: Rows) -> Part | None:
        """The gradient of a parameter: what all calls of the modules that own it add to it.

        Args:
            rows: Rows of the first axis, or None for all.
        """
        parts = []
        for module, name in self._owners(event.site.path):
            calls, passes = self._calls[module], self._param_grads[event.site.path]
            if not calls or calls % passes:
                return None
            each = calls // passes
            for call in range(event.site.call * each, (event.site.call + 1) * each):
                found = self._gradient((module, call), event.dtype, name, rows)
                if found is None:
                    return None
                parts.append(Part(found.value, found.spread, ((module, call),)))
        return together(parts, event.dtype) if parts else None

    def _owners(self, path: str) -> list[tuple[str, str]]:
        """Modules with a formula that hold a parameter, the innermost, and its name in each."""
        found = self._holders.get(path, [])
        return [
            (module, name)
            for module, name in found
            if not any(other.startswith(f"{module}.") for other, _ in found)
        ]

    @cached_property
    def _holders(self) -> dict[str, list[tuple[str, str]]]:
        """Parameter -> modules with a formula that hold it, and its name in each."""
        found: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for module in dict.fromkeys(path for path, _ in self._ins):
            if self._differentiates((module, 0)):
                for name, event in self._memory.params(module).items():
                    found[event.site.path].append((module, name))
        return found

    # ---- gradients of values ---------------------------------------------------------------

    def of_output(self, event: Event, rows: Rows) -> tuple[list[Part], list[Key]]:
        """What the users of a call's output pass back, as far as it is known, and the calls whose
        output's gradient may be the rest."""
        key = event.site.path, event.site.call
        output = self._outs.get(key)
        if output is None or output.payload is None:
            return [], []
        same = self._writers[output.digest]
        parts, around = [], {self._parent(k) for k in same}
        for reader in _outermost(filter(self._differentiates, self._readers[output.digest])):
            around.add(self._parent(reader))
            if part := self._passed_back(reader, event, output, rows):
                parts.append(part)
        alone = not parts  # what an activation module reads is not activated elsewhere
        for parent in list(around):
            parts += self._combined(parent, event, output, rows, alone)
        return parts, list(self._remainders(around, event, output, same))

    def logits(self, event: Event) -> Array | None:
        """The output of the whole model, where a gradient is that of it or of its bits."""
        whole = self._outs.get((ROOT, event.site.call))
        output = self._outs.get((event.site.path, event.site.call))
        if whole is None or output is None or output.digest != whole.digest:
            return None
        known = whole.payload is not None and len(whole.shape) == 3 and whole.shape == event.shape
        return self._trace.array(whole) if known else None

    def of_input(self, key: Key, dtype: str) -> Replayed | None:
        """What a call passes back to its input."""
        return self._gradient(key, dtype, "in", None)

    def gradient_at(self, key: Key, rows: Rows) -> Array | None:
        """The recorded gradient of a call's output."""
        event = self.grads.get(key)
        if event is None or event.payload is None:
            return None
        return _pick(self._trace.array(event), event.shape, rows)

    def are_described(self, calls: Iterable[Key]) -> bool:
        """Whether the outputs of calls are what the formulas of their operations give."""
        return all(self._is_described(key) for key in calls if self._differentiates(key))

    def _is_described(self, key: Key) -> bool:
        output = self._outs.get(key)
        call = self._call(key, output.dtype) if output is not None else None
        if output is None or output.payload is None or call is None:
            return False
        found = self._reference.replay(call)
        value = self._trace.array(output)
        return found is not None and found.value.shape == value.shape and side(value, found).holds

    def _remainders(
        self, around: set[Key], event: Event, output: Event, same: Sequence[Key]
    ) -> Iterator[Key]:
        for parent in around:
            for key in (parent, *self._children[parent]):
                grad, out = self.grads.get(key), self._outs.get(key)
                if grad is None or out is None or key in same or grad.order >= event.order:
                    continue
                if grad.shape == output.shape:
                    yield key

    def _passed_back(self, reader: Key, event: Event, output: Event, rows: Rows) -> Part | None:
        """What one call passes back to its input, which is the output."""
        width = math.prod(output.shape[:-1])
        found = self._gradient(reader, event.dtype, "in", rows, width)
        if found is None:
            return None
        shape = _shape(output.shape, rows)
        return Part(found.value.reshape(shape), found.spread.reshape(shape), (reader,))

    def _combined(
        self, parent: Key, event: Event, output: Event, rows: Rows, alone: bool
    ) -> Iterator[Part]:
        """What comes back through the calls in a module whose input the output is a part of."""
        for key in self._children[parent]:
            given = self._ins.get(key)
            if given is None or given.order < output.order or given.digest == output.digest:
                continue
            if math.prod(given.shape) != math.prod(output.shape) or given.payload is None:
                continue
            if not self._differentiates(key):
                continue
            if given.op == "RoPE":
                part = self._turned(key, event, output, rows)
            elif given.shape == output.shape:
                part = self._mixed(parent, key, event, output, rows, alone)
            else:
                part = None
            if part is not None:
                yield part

    def _turned(self, key: Key, event: Event, output: Event, rows: Rows) -> Part | None:
        """Heads of the output, moved before the sequence and rotated."""
        given = self._ins[key]
        if len(given.shape) != 4:
            return None
        before = self._trace.array(given).swapaxes(1, 2)
        if not np.array_equal(before.reshape(output.shape), self._trace.array(output)):
            return None
        found = self._gradient(key, event.dtype, "in", None)
        if found is None:
            return None

        def back(array: Floats) -> Floats:
            moved: Floats = array.swapaxes(1, 2).reshape(output.shape)
            return _pick(moved, output.shape, rows)

        return Part(back(found.value), back(found.spread), (key,))

    def _mixed(
        self, parent: Key, key: Key, event: Event, output: Event, rows: Rows, alone: bool
    ) -> Part | None:
        """A call's input that is made of the output and another value between modules."""
        given = self._ins[key]
        whole, own = self._few_rows(given), self._few_rows(output)
        for other in self._partners(parent, given, output):
            partner = self._few_rows(other)
            found = next(slopes.of_two(whole, own, partner, self._reference), None)
            if found is None and alone:
                found = next(slopes.of_activated(whole, own, partner, self._reference), None)
            part = self._passed_back(key, event, output, rows) if found else None
            if part is None or found is None:
                continue
            x, y = (_pick(self._trace.array(e), e.shape, rows) for e in (output, other))
            factor, error = found(x, y)
            value = part.value * factor
            stored = unit_roundoff(event.dtype) * np.abs(value)
            spread = np.sqrt((part.spread * factor) ** 2 + (part.value * error) ** 2 + stored**2)
            return Part(value, spread, (key,))
        return None

    def _few_rows(self, event: Event) -> slopes.Part:
        """A few rows of a value, which is tried as a part of many others."""
        if event.order not in self._tried:
            few = _pick(self._trace.array(event), event.shape, _few(event.shape))
            self._tried[event.order] = slopes.Part(few, self._reference)
        return self._tried[event.order]

    def _partners(self, parent: Key, given: Event, output: Event) -> Iterator[Event]:
        """Values of the same module that can have been combined with the output, itself last."""
        found = [self._ins.get(parent), *(self._outs[k] for k in self._children[parent])]
        for event in (*found, output):
            if event is None or event.order > given.order:
                continue
            if event is not output and event.digest == output.digest:
                continue
            if event.shape == output.shape and event.payload is not None:
                yield event

    # ---- calls -----------------------------------------------------------------------------

    def _parent(self, key: Key) -> Key:
        """The call that a call was made in, which may have made several of the same module."""
        path = key[0].rpartition(".")[0] or ROOT
        each = max(1, self._calls[key[0]] // max(1, self._calls[path]))
        return path, key[1] // each

    def _differentiates(self, key: Key) -> bool:
        event = self._ins.get(key)
        return event is not None and self._reference.differentiates(event.op)

    def _gradient(
        self, key: Key, dtype: str, wrt: str, rows: Rows, width: int = 0
    ) -> Replayed | None:
        """What a call contributes to the gradient of its input or of a parameter.

        Args:
            rows: Of the input's `width` rows, or of a parameter's first axis.
        """
        if wrt != "in":
            return self._contributed(key, dtype, wrt, rows, width)
        # A module and the last one inside it have the same output, so each is asked for again.
        asked = key, dtype, width, None if rows is None else rows.tobytes()
        if (known := self._passed.get(asked)) is not None:
            return known
        found = self._contributed(key, dtype, wrt, rows, width)
        if found is not None and found.value.size <= _KEPT:
            if len(self._passed) == _LATEST:
                del self._passed[next(iter(self._passed))]
            self._passed[asked] = found
        return found

    def _contributed(
        self, key: Key, dtype: str, wrt: str, rows: Rows, width: int
    ) -> Replayed | None:
        call, grad = self._call(key, dtype), self.grads.get(key)
        if call is None or grad is None or grad.payload is None:
            return None
        upstream = self._trace.array(grad)
        if wrt != "in" or rows is None:
            return self._reference.gradient(call, upstream, wrt, rows)
        x = call.inputs["in"]
        if x.size // width % x.shape[-1]:  # a row of it has several of the value's
            found = self._reference.gradient(call, upstream, wrt)
            return None if found is None else _picked(found, width, rows)
        x, upstream = (_regrouped(a, width, rows) for a in (x, upstream))
        return self._reference.gradient(replace(call, inputs={"in": x}), upstream, wrt)

    def _call(self, key: Key, dtype: str) -> Call | None:
        """A call with everything recorded of it, or None where a payload is missing."""
        given, params = self._ins.get(key), self._memory.params(key[0])
        if given is None or any(e.payload is None for e in (given, *params.values())):
            return None
        if self._memory.holds_parts(key[0]):
            return None
        settings: dict[str, Any] = self._memory.settings(key[0]) | dict(given.attributes)
        settings["operand_roundoff"] = operand_roundoff(settings, dtype)
        return Call(
            op=given.op,
            inputs={"in": self._trace.array(given)},
            params={name: self._trace.array(event) for name, event in params.items()},
            settings=self._reference.resolve(given.op, settings),
            dtype=dtype,
        )


def summed(parts: Sequence[Part]) -> Floats:
    """The sum of what several users pass back, without its spread."""
    value = parts[0].value
    for part in parts[1:]:
        value = value + part.value
    return value


def together(parts: Sequence[Part], dtype: str) -> Part:
    """The sum of what several users pass back: each sum of two is stored."""
    value, variance = parts[0].value, np.square(parts[0].spread)
    for part in parts[1:]:
        value = value + part.value
        if part.spread.any():
            variance += np.square(part.spread)
        stored = unit_roundoff(dtype) * value
        stored *= stored
        stored /= 3
        variance += stored
    spread = np.sqrt(variance, out=variance)
    return Part(value, spread, tuple(call for part in parts for call in part.calls))


def _outermost(keys: Iterator[Key]) -> Iterator[Key]:
    """Calls that are not made by one of the others."""
    found = sorted(keys, key=lambda key: len(key[0]))
    taken: list[Key] = []
    for path, call in found:
        if not any(path.startswith(f"{other}.") and call == number for other, number in taken):
            taken.append((path, call))
            yield path, call


def _pick(array: Array, shape: tuple[int, ...], rows: Rows) -> Array:
    if rows is None:
        return array
    picked: Array = array.reshape(-1, shape[-1])[rows]
    return picked


def _regrouped(array: Array, width: int, rows: NDArray[np.intp]) -> Array:
    """Some of `width` rows, split as the array is: a row of a value may be several of a view."""
    picked: Array = array.reshape(width, -1)[rows].reshape(-1, array.shape[-1])
    return picked


def _picked(found: Replayed, width: int, rows: NDArray[np.intp]) -> Replayed:
    value, spread = (a.reshape(width, -1)[rows] for a in (found.value, found.spread))
    return Replayed(value, spread, found.derivation)


def _shape(shape: tuple[int, ...], rows: Rows) -> tuple[int, ...]:
    return shape if rows is None else (len(rows), shape[-1])


def _few(shape: tuple[int, ...]) -> NDArray[np.intp]:
    return evenly(math.prod(shape[:-1]), _SAMPLE)
