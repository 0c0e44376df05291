"""Logits as a cross-entropy sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def normalised(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Logarithms of the probabilities: what is added to all logits of a row is not in them.

    Args:
        logits: (..., classes).
    """
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result
