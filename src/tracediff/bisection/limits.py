"""How far a pair may be apart by rounding, where nothing recomputes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from tracediff.bisection.inheritance import Ledger, State
from tracediff.bisection.level import Level
from tracediff.bisection.values import is_float, norm, read_pair
from tracediff.compare import bounds, optimizers
from tracediff.compare.figures import unit_roundoff
from tracediff.compare.padding import Padding
from tracediff.events import Event, Pair
from tracediff.trace import Trace
from tracediff.trace.summary import FINGERPRINT_FIELDS
from tracediff.verdict import Bound

_MEAN: Final = FINGERPRINT_FIELDS.index("mean")

_STEADY: Final = 8.0
"""How many times further apart than in any step before updates may be by such elements, where
gradients are not either."""

_LOADING_ULPS: Final = 2.0
"""Parameters may differ by the rounding of one conversion, and by no more."""


class Limits:
    """The bounds of a step's pairs, from what they inherit and from what is known of them."""

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        events: tuple[Sequence[Event], Sequence[Event]],
        ledger: Ledger,
        state: State,
        padding: Padding,
    ) -> None:
        self._traces = traces
        self._ledger = ledger
        self._state = state
        self._padding = padding
        self._events = tuple({event.order: event for event in side} for side in events)
        self._cross_entropies = all(
            any(e.site.path == "loss.cross_entropy" for e in side) for side in events
        )

    def of(self, pair: Pair, inherited: Level, apart: float) -> Bound:
        """The bound of a pair of tensors.

        Args:
            inherited: How far what they were computed from is apart.
            apart: How far they are, relative (L2).
        """
        a, b = pair.baseline, pair.target
        stage, port = a.site.phase, a.site.port
        if stage == "loading":
            ulp = 2 * unit_roundoff(max((a.dtype, b.dtype), key=unit_roundoff))
            return Bound(rel_l2=_LOADING_ULPS * ulp, derivation="one conversion")
        if stage == "loss" and a.shape == () and (found := self._of_loss(pair)):
            return found
        if stage == "backward":
            return bounds.bound(a, b, inherited.carry, self.cancelled(pair))
        if stage == "optimizer" and port == "update":
            return self._of_update(pair, inherited, apart)
        if stage == "optimizer" and port == "param":
            return self._of_param(pair)
        return bounds.bound(a, b, inherited.carry)

    def _of_loss(self, pair: Pair) -> Bound | None:
        """The bound of a loss that is a cross-entropy of the model's output, if it is one."""
        output = self._ledger.outputs.get(pair.baseline.site.call)
        loss = pair.baseline.fingerprint
        if not self._cross_entropies or not output or not loss:
            return None
        logits = read_pair(self._traces, output.pair)
        if logits is None or logits[0].shape != logits[1].shape or logits[0].ndim < 2:
            return None
        counts = self._padding.counts(output.event, logits[0].shape)
        return bounds.cross_entropy(logits, counts, loss[_MEAN])

    def cancelled(self, pair: Pair) -> float:
        """How much larger the terms of a parameter's gradient are than their sum; 1 for others."""
        site = pair.baseline.site
        if site.phase != "backward" or site.port.partition("@")[0] != "grad":
            return 1.0
        sides = enumerate((pair.baseline, pair.target))
        return max(1.0, *(_terms(event, [*self._sources(side, event)]) for side, event in sides))

    def _sources(self, side: int, event: Event) -> Iterator[Event]:
        for order in event.inputs:
            source = self._events[side].get(order)
            if source is not None and is_float(source):
                yield source

    def _of_update(self, pair: Pair, inherited: Level, apart: float) -> Bound:
        """The bound of an update whose formula is not known, or whose state was not kept.

        Elements of a gradient that is all rounding are updated by as much as any other, either way:
        those of the bias of attention's keys, which has no effect. How many there may be follows
        from the gradient's statistics. Updates that are `apart` by such elements alone are equally
        large but for chance: their norms by no more than three times `apart` over the root of their
        number.
        """
        event = pair.baseline
        limit = optimizers.sign_like_bound(inherited.carry, unit_roundoff(event.dtype))
        derivation = f"{event.op} update of its state"
        grad = self._ledger.at("optimizer", event.site.path, "grad")
        if event.op != "SGD" and grad is not None and grad.event.fingerprint:
            noisy = optimizers.of_noise(grad.event.fingerprint, inherited.carry)
            before, of_grad = self._state.parameters.update(event.site.path)
            if grad.level.carry <= _STEADY * of_grad:  # what is all rounding was so before
                noisy = min(noisy, _STEADY * before)
            by_chance = 3 * apart / math.sqrt(math.prod(event.shape) or 1)
            if abs(norm(event) - norm(pair.target)) <= (limit + by_chance) * norm(event):
                limit = max(limit, noisy)
        return Bound(rel_l2=limit, derivation=derivation)

    def _of_param(self, pair: Pair) -> Bound:
        """A parameter after its update: apart by what it was before plus what the update adds."""
        path, size = pair.baseline.site.path, norm(pair.baseline) or 1.0
        parameters = self._state.parameters
        apart = parameters.level(path).carry * (parameters.size(path) or size)
        update = self._ledger.at("optimizer", path, "update")
        if update is not None:
            apart += update.level.carry * norm(update.event)
        roundoff = unit_roundoff(pair.baseline.dtype)
        return Bound(
            rel_l2=1.01 * apart / size + 8 * roundoff,
            derivation="parameter before and update",
        )


def _terms(gradient: Event, sources: Sequence[Event]) -> float:
    """Norm of what a parameter's gradient would be if its terms did not cancel, over its own.

    The gradient of a bias is the sum of the upstream gradient G over its rows, that of a weight
    G^T X, that of a scale the sum of G X with X of size 1. Independent errors of G's elements, each
    a fraction of G, make an error of the same fraction of |G|, times the size of a row of X where
    it is a product.
    """
    size = norm(gradient)
    upstream = math.hypot(*(norm(e) for e in sources if e.site.phase == "backward"))
    if not size or not upstream:
        return 1.0
    given = [e for e in sources if e.site.phase == "forward" and e.shape]
    if len(gradient.shape) == 2 and given:
        rows = math.prod(given[0].shape[:-1])
        upstream *= math.hypot(*map(norm, given)) / math.sqrt(rows or 1)
    return upstream / size
