"""Functions that NumPy lacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from tracediff.replaying import Floats


def sigmoid(x: Floats) -> Floats:
    """`1 / (1 + exp(-x))`, without overflow."""
    small = np.exp(-np.abs(x))
    result: Floats = np.where(x >= 0, 1.0, small) / (1 + small)
    return result


erf: Final[Callable[[Floats], Floats]] = np.vectorize(math.erf, otypes=[np.float64])
