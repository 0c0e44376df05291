"""Rules on the pairs of the backward pass: does each side's gradient follow from its own values?

Both sides are recomputed from their own recorded inputs, parameters and upstream gradients. Where
both hold within rounding, the pair has at most inherited what it is apart; where one side holds and
the other does not, that one has introduced it and is to blame. Where neither holds, the gradient is
made of more than is known (attention), and the cheap bound decides. The gradient of the logits is
held to that of a cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection import logit_gradients
from tracediff.bisection.backward import Backward, Key, Part, Rows, summed, together
from tracediff.bisection.held import Finding, finding, held
from tracediff.bisection.memory import Memory
from tracediff.bisection.recompute import reference
from tracediff.bisection.trial import Counts, Values, norm
from tracediff.compare.places import evenly
from tracediff.events import Event, Pair
from tracediff.replaying import Floats
from tracediff.trace import Trace

Choice = tuple[Key, Key] | None
"""The call on each side whose gradient the rest of another one may be."""

_FEW: Final = 8
"""Rows of a gradient that are looked at where nothing looks wrong."""


class Gradients:
    """Rules on the gradients of one step.

    Args:
        pairs: Of the step: which path of the target is which of the baseline.
        memory: Parameters and settings of both sides, as they were in the forward pass.
    """

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        events: tuple[Sequence[Event], Sequence[Event]],
        memory: tuple[Memory, Memory],
        pairs: Sequence[Pair],
    ) -> None:
        self._passes = tuple(
            Backward(*given, reference()) for given in zip(traces, events, memory, strict=True)
        )
        self._partner = {
            (p.baseline.site.path, p.baseline.site.call): (p.target.site.path, p.target.site.call)
            for p in pairs
            if (p.baseline.site.phase, p.baseline.site.port) == ("backward", "grad_out")
        }

    def rule(
        self, pair: Pair, values: Values, counts: Counts = None, *, spot: bool = False
    ) -> Finding | None:
        """Rules on a pair of gradients, or returns None where they cannot be recomputed.

        Args:
            values: Both payloads, finite, in the baseline's layout.
            counts: False where an element is padding, broadcastable to the shape.
            spot: Nothing looks wrong: look at a few rows, and return None if they are in order.
        """
        port, shape = pair.baseline.site.port, values[0].shape
        if port not in ("grad", "grad_out") or not shape or not values[0].size:
            return None
        logits = self._logits(pair) if port == "grad_out" and pair.layout == "same" else None
        if logits is not None:
            return logit_gradients.rule(_events(pair), logits, values, reference())
        if spot and (few := _few_rows(pair, shape, counts)) is not None:
            picked = tuple(v.reshape(-1, shape[-1])[few] for v in values)
            found = self._rule(pair, (picked[0], picked[1]), None, few)
            if found is None or found.within:
                return None
        return self._rule(pair, values, counts, None)

    def _logits(self, pair: Pair) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Both models' outputs, where the pair is their gradients."""
        found = [
            side.logits(event) for side, event in zip(self._passes, _events(pair), strict=True)
        ]
        return None if found[0] is None or found[1] is None else (found[0], found[1])

    def _rule(self, pair: Pair, values: Values, counts: Counts, rows: Rows) -> Finding | None:
        if pair.baseline.site.port == "grad":
            parts = [
                side.of_parameter(event, rows)
                for side, event in zip(self._passes, _events(pair), strict=True)
            ]
        else:
            parts = self._of_outputs(pair, values, rows)
        if parts[0] is None or parts[1] is None or len(parts[0].calls) != len(parts[1].calls):
            return None  # one side's users are not all known
        laid = parts[0], _turned(parts[1], pair)
        if any(part.value.shape != value.shape for part, value in zip(laid, values, strict=True)):
            return None
        sides = [
            held(value, part.value, part.spread, counts)
            for value, part in zip(values, laid, strict=True)
        ]
        judged = finding(sides[0], sides[1], f"gradient through {parts[0].source}")
        if judged is None or judged.within or rows is not None:
            return judged
        # A call that computes something else than its name says has another gradient, too.
        calls = zip(self._passes, parts, strict=True)
        known = all(side.are_described(part.calls) for side, part in calls if part is not None)
        return judged if known else None

    def _of_outputs(self, pair: Pair, values: Values, rows: Rows) -> list[Part | None]:
        """What the gradients are made of: the known parts, and of all values that the rest may be
        the gradient of, or none, the one that comes closest on one of the sides."""
        known, rests = [], []
        for side, event in zip(self._passes, _events(pair), strict=True):
            parts, keys = side.of_output(event, rows)
            known.append(parts)
            rests.append(keys)
        wide = [value.astype(np.float64, copy=False) for value in values]
        scales = [norm(value.reshape(-1)) or 1.0 for value in wide]
        sums = [summed(parts) if parts else None for parts in known]
        on_target = set(rests[1])
        choices: list[Choice] = [None]
        choices += [(k, t) for k in rests[0] if (t := self._partner.get(k)) in on_target and t]
        best: list[Part | None] = [None, None]
        closest, chosen = math.inf, choices[0]
        for choice in choices:
            totals = [self._total(which, sums[which], choice, rows) for which in (0, 1)]
            sides = zip(wide, scales, totals, strict=True)
            apart = [
                _distance(value, scale, total) for value, scale, total in sides if total is not None
            ]
            if len(apart) < 2:
                continue
            distance = min(apart)
            if distance < closest:
                closest, chosen = distance, choice
        if closest < math.inf:
            for which, event in enumerate(_events(pair)):
                parts = [*known[which], *self._rest(which, chosen, rows)]
                best[which] = together(parts, event.dtype)
        return best

    def _total(self, which: int, known: Floats | None, choice: Choice, rows: Rows) -> Floats | None:
        """The sum of the known parts and the rest; None where there is nothing or it is not known.
        Its spread nobody asks for yet."""
        rest = self._rest(which, choice, rows)
        if choice is not None and not rest:
            return None
        for part in rest:
            known = part.value if known is None else known + part.value
        return known

    def _rest(self, which: int, choice: Choice, rows: Rows) -> list[Part]:
        rest = None if choice is None else self._passes[which].gradient_at(choice[which], rows)
        if choice is None or rest is None:
            return []
        exact = np.broadcast_to(np.zeros(()), rest.shape)
        return [Part(rest.astype(np.float64), exact, (choice[which],))]


def _distance(value: NDArray[Any], scale: float, total: Floats) -> float:
    if value.shape != total.shape:
        return math.inf
    return norm((value - total).reshape(-1)) / scale


def _turned(part: Part, pair: Pair) -> Part:
    if pair.layout != "transposed":
        return part
    return Part(part.value.T, part.spread.T, part.calls)


def _events(pair: Pair) -> tuple[Event, Event]:
    return pair.baseline, pair.target


def _few_rows(pair: Pair, shape: tuple[int, ...], counts: Counts) -> Rows:
    """A few rows spread over those that count; None where all have to be looked at."""
    if len(shape) < 2 or pair.layout != "same":
        return None
    rows = np.arange(math.prod(shape[:-1]))
    if counts is not None:
        rows = rows[np.broadcast_to(counts, shape).any(axis=-1).reshape(-1)]
    if rows.size <= _FEW or (pair.baseline.site.port == "grad" and len(shape) != 2):
        return None
    return rows[evenly(rows.size, _FEW)]
