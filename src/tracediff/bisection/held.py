"""Both sides held to what they are recomputed to be, each from its own recorded values.

One that holds while the other does not is right, and the other one is to blame; where neither
holds, more goes into the value than is known, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.trial import Counts, Side, Trial, side
from tracediff.replaying import Floats, Replayed
from tracediff.verdict import Bound

_SIDES: Final = ("baseline", "target")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of a pair.

    Attributes:
        within: Whether rounding explains how far each side is from what it should be.
        bound: What that explains, relative to the baseline.
        blame: baseline, target or undecided.
        evidence: Each side's distance from what it should be.
    """

    within: bool
    bound: Bound
    blame: str = "undecided"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def held(value: NDArray[Any], exact: Floats, spread: Floats, counts: Counts = None) -> Side:
    """One side. Values below the smallest normal number may be flushed to zero."""
    tiny = float(np.finfo(np.float32).tiny)
    return side(value, Replayed(exact, spread + tiny, ""), counts)


def finding(a: Side, b: Side, derivation: str) -> Finding | None:
    """What follows from how far both sides are from what they are recomputed to be."""
    trial = Trial((a, b))
    if not any(trial.holding):
        return None
    if all(trial.holding) or trial.ratio <= 1:
        return Finding(True, Bound(rel_l2=trial.explained(0.0), derivation=derivation))
    evidence = {
        f"distance_{name}": of.distance for name, of in zip(_SIDES, trial.sides, strict=True)
    }
    bound = Bound(rel_l2=trial.explained(trial.ratio), derivation=derivation)
    return Finding(False, bound, _SIDES[trial.holding.index(False)], evidence)
