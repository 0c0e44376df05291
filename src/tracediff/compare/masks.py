"""Attention masks by their meaning: which keys may be seen, however a stack writes that down."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_HIDDEN: Final = -1e4
"""An additive mask hides what it lowers by this much or more: -inf, or the dtype's minimum."""


def is_mask_port(port: str) -> bool:
    """Whether a port holds an attention mask, by the name of the argument."""
    return port.startswith("in.") and "mask" in port


def visible(mask: NDArray[Any]) -> NDArray[np.bool_]:
    """True where a key may be seen: True of a boolean mask, about 0 of an additive one.

    Integer masks hide where they are 0.
    """
    if mask.dtype.kind in "biu":
        return mask.astype(bool)
    seen: NDArray[np.bool_] = mask.astype(np.float64) > _HIDDEN
    return seen
