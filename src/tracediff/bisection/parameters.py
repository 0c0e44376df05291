"""How far parameters are apart, and what that does to what is computed with them."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Final

from tracediff.bisection.level import Level, worst
from tracediff.bisection.values import norm
from tracediff.events import ROOT, Event, Pair

PARAM_SHARE: Final = 1 / 8
"""A value is linear in the parameters: their error is passed on, not amplified as an input's is."""


class Parameters:
    """What is known of both sides' parameters and buffers, from step to step."""

    def __init__(self) -> None:
        self._levels: tuple[dict[str, Level], dict[str, Level]] = ({}, {})
        self._effects: tuple[dict[str, Level], dict[str, Level]] = ({}, {})
        self._norms: tuple[dict[str, float], dict[str, float]] = ({}, {})
        self._own: tuple[defaultdict[str, dict[str, Level]], ...] = (
            defaultdict(dict),
            defaultdict(dict),
        )
        self._updates: dict[str, tuple[float, float]] = {}

    def learn(self, pair: Pair, level: Level) -> None:
        """Keeps how far a parameter or buffer is apart."""
        for side, event in enumerate((pair.baseline, pair.target)):
            path = event.site.path
            self._levels[side][path] = level
            self._norms[side][path] = norm(event)
            effect = level.share(self._part(side, path))
            self._effects[side][path] = self._own[side][path.rpartition(".")[0]][path] = effect

    def keep_update(self, path: str, apart: float, grad: Level) -> None:
        """Keeps how far an update has been apart at most, and the gradient that it was made of."""
        if apart:
            known = self.update(path)
            self._updates[path] = max(known[0], apart), max(known[1], grad.carry)

    def update(self, path: str) -> tuple[float, float]:
        """The most that an update has been apart so far, and its gradient; 0 where it never was."""
        return self._updates.get(path, (0.0, 0.0))

    def level(self, path: str) -> Level:
        """How far a parameter of the baseline is apart."""
        return self._levels[0].get(path, Level())

    def size(self, path: str) -> float:
        """Euclidean norm of a parameter of the baseline, of which its level is a share; 0 where
        that is not known."""
        return self._norms[0].get(path, 0.0)

    def _part(self, side: int, path: str) -> float:
        """The part that a parameter has in the size of what is computed from it.

        A bias is added to rows of about the weight's size (to inputs of size 1), so that one which
        is all rounding hardly shows in what its module returns.
        """
        norms, module = self._norms[side], path.removesuffix(".bias")
        weight = norms.get(f"{module}.weight", 0.0) if module != path else 0.0
        return min(1.0, norms[path] / weight) if weight else 1.0

    def selected(self, side: int, event: Event) -> float:
        """How much further apart than all rows of an embedding those may be that it returns: they
        may be all that differ, each as often as there are rows in the result."""
        size, weight = norm(event), self._norms[side].get(f"{event.site.path}.weight", 0.0)
        if "Embedding" not in event.op or not size or not event.shape:
            return 1.0
        return max(1.0, weight / size * math.sqrt(math.prod(event.shape[:-1])))

    def own(self, side: int, path: str) -> Level:
        """The worst parameter of a module itself, by its effect."""
        return worst(self._own[side].get(path, {}).values())

    def below(self, side: int, path: str) -> Level:
        """The worst parameter of a module and its submodules, by its effect."""
        if path.startswith(ROOT):
            return worst(self._effects[side].values())
        return worst(
            level
            for name, level in self._effects[side].items()
            if name.startswith(path) and name[len(path) : len(path) + 1] in ("", ".")
        )
