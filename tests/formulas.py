"""The float64 reference at work: what the tests of formulas and of verdicts by them share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tracediff import stacks
from tracediff.replaying import Call, Replayed

Array = NDArray[Any]

REFERENCE = stacks.load_replayer("reference")()
WIDTH, OUT, ROWS = 64, 48, (2, 12)


def array(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def in_bfloat16(x: Array) -> Array:
    """To bfloat16 and back."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def replay(
    op: str,
    x: Array,
    params: Mapping[str, Array] | None = None,
    dtype: str = "float32",
    **settings: Any,
) -> Replayed:
    call = Call(op=op, inputs={"in": x}, params=params or {}, settings=settings, dtype=dtype)
    found = REFERENCE.replay(call)
    assert found is not None
    return found


def linear(x: Array, weight: Array) -> Array:
    """One product after the other, each partial sum rounded to float32."""
    total = np.zeros((*x.shape[:-1], len(weight)), np.float32)
    for k in range(x.shape[-1]):
        total += x[..., k, None] * weight[:, k]
    return total
