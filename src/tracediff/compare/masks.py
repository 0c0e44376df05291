"""Attention masks by their meaning: which keys may be seen, however a stack writes that down."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.events import Event
from tracediff.trace.summary import FINGERPRINT_FIELDS

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


def see_as_many(a: Event, b: Event) -> bool:
    """Whether a boolean mask and an additive one let as many keys be seen, from fingerprints alone:
    the one where it is not 0, the other where it is."""
    kinds = {a.dtype == "bool", b.dtype == "bool"}
    if len(kinds) < 2 or not a.fingerprint or not b.fingerprint:
        return False
    boolean, additive = (a, b) if a.dtype == "bool" else (b, a)
    shown, hidden = (
        dict(zip(FINGERPRINT_FIELDS, event.fingerprint, strict=True))
        for event in (boolean, additive)
    )
    if not (hidden["mean"] < 0 or hidden["inf"]):
        return False
    return a.shape == b.shape and shown["count"] - shown["zero"] == hidden["zero"]
