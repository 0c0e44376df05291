"""Whether what attention passes back reaches its values.

The weights of every query sum to one, whatever the scores and the mask. Summed over the positions,
the gradient of the values is therefore that of the output, summed over the heads that share them:
`sum_j dV_j = sum_j sum_i P_ij dO_i = sum_i dO_i`. No score has to be recomputed, and a side whose
values are cut off from the backward pass, or get a part of it, breaks the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from tracediff.bisection.backward import Backward
from tracediff.bisection.held import held
from tracediff.bisection.memory import Memory
from tracediff.bisection.recompute import reference
from tracediff.compare.figures import unit_roundoff
from tracediff.events import Event, Site
from tracediff.replaying import Floats
from tracediff.trace import Trace

_HEADS: Final = ("config.num_attention_heads", "config.n_head")

_ROUNDINGS: Final = 4.0
"""Roundings of each term of a sum, in units of what it is stored with: weight, product, sum over
the heads that share a value, and the term itself."""


def examine(traces: tuple[Trace, Trace], sites: tuple[Site, Site]) -> list[bool | None]:
    """Whether each side's gradient of a value of attention sums to what attention passes back.

    Args:
        sites: Of the gradient of a module's output, or of one of its parameters, on both sides.

    Returns:
        For each side; None where it cannot be said, as where the sum holds on neither: the module
        computes no values then, or attention drops out.
    """
    sides = [_Side(trace, site) for trace, site in zip(traces, sites, strict=True)]
    if any(side.values is None for side in sides):
        return [None, None]
    for good, other in (sides, sides[::-1]):
        users = [name for name in good.users if good.sums_to(name)]
        if len(users) != 1 or users[0] not in other.users:
            continue
        holds = other.sums_to(users[0])
        return [True if side is good else holds for side in sides]
    return [None, None]


@dataclass(frozen=True)
class _Side:
    """One side's backward pass around a gradient."""

    trace: Trace
    site: Site

    @cached_property
    def _events(self) -> Sequence[Event]:
        return list(self.trace.events(self.site.step, samples=False))

    @cached_property
    def _memory(self) -> Memory:
        """Of what was loaded and what the latest step left: a parameter that was updated before
        and not then would be a stale one, and the sum hold on no side."""
        memory, steps = Memory(), self.trace.steps
        memory.begin(self.trace.events(steps[0], samples=False))
        before = steps.index(self.site.step) - 1
        if before >= 0:
            memory.finish(self.trace.events(steps[before], samples=False))
        return memory

    @cached_property
    def _at(self) -> Mapping[tuple[str, str, int, str], Event]:
        sites = ((event.site, event) for event in self._events)
        return {(s.phase, s.path, s.call, s.port): event for s, event in sites}

    @cached_property
    def values(self) -> Event | None:
        """The output of the module: (batch, sequence, width)."""
        path = self.site.path
        while path:
            found = self._at.get(("forward", path, self.site.call, "out"))
            if found is not None:
                return found if len(found.shape) == 3 and not found.shard else None
            path = path.rpartition(".")[0] if self.site.port == "grad" else ""
        return None

    @cached_property
    def users(self) -> Mapping[str, Event]:
        """Calls in the same module that may be given attention's output: name -> their input."""
        values = self.values
        assert values is not None
        parent = values.site.path.rpartition(".")[0]
        return {
            event.site.path.removeprefix(f"{parent}."): event
            for event in self._events
            if (event.site.phase, event.site.port) == ("forward", "in")
            and event.site.path.rpartition(".")[0] == parent
            and event.site.call == values.site.call
            and event.order > values.order
            and reference().differentiates(event.op)
            and event.shape[:-1] == values.shape[:-1]
            and event.shape[-1] % values.shape[-1] == 0
        }

    def sums_to(self, name: str) -> bool | None:
        """Whether the gradient sums to what a call passes back; None where it is not known."""
        found, values = self._passed_back(name), self.values
        if found is None or values is None:
            return None
        exact, variance = found
        gradient = self._gradient
        if gradient is None:
            return None
        total = gradient.sum(axis=1)
        variance = variance + np.square(self._rounding * gradient).sum(axis=1)
        # Nothing is passed back: nothing is asked of the gradient.
        if not np.any(exact):
            return None
        return held(total, exact, np.sqrt(variance)).holds

    @property
    def _rounding(self) -> float:
        assert self.values is not None
        return _ROUNDINGS * unit_roundoff(self.values.dtype)

    @cached_property
    def _gradient(self) -> Floats | None:
        """The gradient of the values; zeros where those of the module's parameters are all missing
        or zero although they are trained; None where it is not known."""
        values = self.values
        assert values is not None
        site = values.site
        grad = self._at.get(("backward", site.path, site.call, "grad_out"))
        if grad is not None:
            known = grad.payload is not None and grad.shape == values.shape
            return self.trace.array(grad).astype(np.float64) if known else None
        if not self._memory.trains(site.path) or any(self._parameter_gradients()):
            return None
        return np.zeros(values.shape)

    def _parameter_gradients(self) -> Iterator[bool]:
        """Of each gradient of the module's own parameters, whether it is, or may be, not zero."""
        assert self.values is not None
        for event in self._events:
            if event.site.port == "grad" and event.site.path.startswith(
                f"{self.values.site.path}."
            ):
                yield event.payload is None or bool(np.any(self.trace.array(event)))

    def _passed_back(self, name: str) -> tuple[Floats, Floats] | None:
        """The gradient of a call's input, summed over positions and over the heads that share a
        value, and the variance of that."""
        given, values = self.users.get(name), self.values
        if given is None or values is None:
            return None
        key = given.site.path, given.site.call
        backward = Backward(self.trace, self._events, self._memory, reference())
        found = backward.of_input(key, given.dtype)
        shape = self._grouped(given, values)
        if found is None or shape is None or found.value.shape != given.shape:
            return None
        variance = np.square(found.spread) + np.square(self._rounding * found.value)
        exact, variance = (
            array.reshape(shape).sum(axis=(1, 3)).reshape(shape[0], values.shape[-1])
            for array in (found.value, variance)
        )
        return exact, variance

    def _grouped(self, given: Event, values: Event) -> tuple[int, ...] | None:
        """(batch, sequence, key-value heads, heads of one, head_dim) of attention's output."""
        shared = given.shape[-1] // values.shape[-1]
        settings = self._memory.settings(given.site.path)
        heads = next((settings[name] for name in _HEADS if settings.get(name)), 0)
        if shared == 1:
            heads = heads or 1
        if not isinstance(heads, int) or not heads or heads % shared or given.shape[-1] % heads:
            return None
        return (*given.shape[:2], heads // shared, shared, given.shape[-1] // heads)
