"""Rotary position embedding."""

from __future__ import annotations

import math

import numpy as np

from tracediff.replayers.reference_rounding import (
    ROUNDING,
    arithmetic,
    is_narrow,
    storage,
    stored,
    together,
    wide,
)
from tracediff.replaying import Call, Replayed

_PLAIN = (None, "default")


def rope(call: Call) -> Replayed | None:
    """Rotates pairs of elements by `position * base**(-2i/d)`. Su et al., "RoFormer", 2021,
    equation 34; element i is paired with i + d/2 (half-split, GPT-NeoX), or 2i with 2i + 1 where
    `traditional` is set.

    An angle t errs by `t u (2 + 2i/d ln base)`: its frequency is a power, taken as the exponential
    of `-2i/d ln base` or directly, and the position multiplies that error. 16-bit implementations
    store the tables, and each product.

    Args:
        call: `in` of shape (..., sequence, head_dim). Settings: `base` (else `config.rope_theta`),
            `dims`, `traditional`, `scale` of the positions; positions count from 0 unless `in`
            comes with `in.position_ids`.
    """
    x, base = call.inputs.get("in"), _base(call)
    if x is None or x.ndim < 2 or base is None or call.params:
        return None
    dims = int(call.settings.get("dims") or x.shape[-1])
    if dims > x.shape[-1] or dims % 2:
        return None
    scale = float(call.settings.get("scale") or 1.0)
    exponents = np.arange(0, dims, 2, dtype=np.float64) / dims
    angles = scale * np.arange(x.shape[-2], dtype=np.float64)[:, None] * base**-exponents
    data = wide(x)
    traditional = bool(call.settings.get("traditional"))
    places = (slice(0, dims, 2), slice(1, dims, 2)) if traditional else (
        slice(0, dims // 2),
        slice(dims // 2, dims),
    )
    first, second = data[..., places[0]], data[..., places[1]]
    value = data.copy()
    value[..., places[0]] = first * np.cos(angles) - second * np.sin(angles)
    value[..., places[1]] = second * np.cos(angles) + first * np.sin(angles)
    roundoff = arithmetic(call)
    of_angle = np.abs(angles) * roundoff * (2 + exponents * math.log(base))
    size = np.hypot(first, second)
    of_tables = 2 * ROUNDING * (storage(call) if is_narrow(call) else roundoff)
    error = size * together(of_angle, np.full_like(of_angle, 2 * of_tables))
    spread = np.zeros_like(value)
    spread[..., places[0]] = error
    spread[..., places[1]] = error
    spread = together(spread, stored(call, value, 2 if is_narrow(call) else 1))
    return Replayed(value, spread, f"{call.op} base={base:g} {call.dtype}")


def _base(call: Call) -> float | None:
    """The rotary base, or None where the frequencies follow another rule (linear, llama3, yarn)."""
    settings = call.settings
    kind = settings.get("config.rope_parameters.rope_type")
    scaled = settings.get("config.rope_scaling")
    if kind not in _PLAIN or scaled is not None:
        return None
    base = settings.get("base", settings.get("config.rope_theta"))
    return float(base) if isinstance(base, int | float) and base > 0 else None
