"""What a pair inherits and passes on: how much of its error rounding explains, and whether a
divergence that came in was undone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from tracediff.bisection.inheritance import Ledger
from tracediff.bisection.level import Level
from tracediff.bisection.ruling import Ruling
from tracediff.bisection.views import around
from tracediff.compare import bounds
from tracediff.compare.figures import unit_roundoff
from tracediff.events import Pair

_SHARED: Final = 1 / 8
"""Fraction of the effect of a divergence above which it is still there."""


@dataclass(frozen=True, slots=True)
class Passing:
    """What a pair inherits and passes on.

    Attributes:
        healed: Whether no divergence came in, or what came in was undone.
    """

    inherited: Level
    level: Level
    healed: bool


def unruled(pair: Pair, inherited: Level, error: float) -> Passing:
    """Of a pair whose operation is not known: it may be as sensitive as any."""
    local, _ = bounds.floor(pair.baseline, pair.target)
    healed = not inherited.tainted or error <= _SHARED * inherited.actual
    return Passing(inherited, Level(min(error, local + inherited.carry), error), healed)


def unseen(pair: Pair, inherited: Level, error: float, cancelled: float) -> Passing:
    """Of a pair of which only fingerprints are known, so that it is `error` apart at least.

    What it may be apart is what rounding adds to what came in. A divergence that came in is taken
    to be undone only where the statistics agree to the last bit; where it is not, rounding explains
    no more of the error than it would without.

    Args:
        cancelled: How much larger the terms are that the value is a sum of.
    """
    local, _ = bounds.floor(pair.baseline, pair.target)
    explained = cancelled * (local + inherited.carry)
    likely = max(error, explained)
    healed = not inherited.tainted or error <= unit_roundoff(pair.baseline.dtype)
    if healed:
        return Passing(inherited, Level(likely, likely), True)
    return Passing(inherited, Level(explained, max(likely, inherited.actual), True), False)


def _in_place(source: Pair, level: Level) -> Level:
    """The level of a source where it is: code around a module whose weights are laid out otherwise
    works on the target's own layout, in which the two sides have nothing in common."""
    if around(source.target) is source.target:
        return level
    return replace(level, actual=max(level.actual, 1.0), diverged=True)


def ruled(pair: Pair, ruling: Ruling, ledger: Ledger, error: float) -> Passing:
    """Of a pair that the referee recomputed, from the errors of its very sources.

    Errors of rounding are passed on as a perturbation of the reference shows. A divergence has
    been undone if the output is apart by no more than they explain, and by far less than the
    divergence would have taken it: a small part of a sum is still a part of it.
    """
    if ruling.sources is None:
        levels = {port: ledger.of_edges(pair) for port in ruling.call.inputs}
        levels[""] = ledger.of_params(pair)
    else:
        levels = {port: _in_place(s, ledger.level(s)) for port, s in ruling.sources.items()}
    inherited = Level()
    for level in levels.values():
        inherited |= level
    if ruling.within and not inherited.tainted:
        return Passing(inherited, Level(error, error), True)
    came_in, divergent = ruling.passed_on(
        (
            {port: level.carry for port, level in levels.items()},
            {port: level.actual for port, level in levels.items()},
        )
    )
    if "mask" in levels and levels["mask"].tainted and divergent is not None:
        divergent = max(divergent, 1.0)  # another mask is another result
    carry = math.hypot(ruling.rounding, came_in or 0.0)
    healed = not inherited.tainted or (
        error <= ruling.limit * carry and error <= _SHARED * (divergent or 0.0)
    )
    level = (
        Level(error, error) if ruling.within and healed else Level(min(error, carry), error, True)
    )
    return Passing(inherited, level, healed)
