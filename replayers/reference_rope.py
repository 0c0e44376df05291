"""Rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

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

_HALF_SPLIT: Final = frozenset(
    (
        *("gemma", "gemma2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2"),
        *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "stablelm", "starcoder2"),
    )
)
"""Types of models whose published checkpoints have their pairs half split, as transformers' code
for each of them takes them (`rotate_half`)."""


def rope(call: Call) -> Replayed | None:
    """Rotates pairs of elements by `position * base**(-2i/d)`. Su et al., "RoFormer", 2021,
    equation 34; element i is paired with i + d/2 (half-split, GPT-NeoX), or 2i with 2i + 1 where
    `traditional` is set.

    An angle t errs by `t u (2 + 2i/d ln base)`: its frequency is a power, taken as the exponential
    of `-2i/d ln base` or directly, and the position multiplies that error. 16-bit implementations
    store the tables, and each product.

    Args:
        call: `in` of shape (..., sequence, head_dim). Settings: `base`, `dims`, `traditional`,
            and `scale` of the positions, which count from `offset`, or 0.
    """
    x, base = call.inputs["in"], call.settings.get("base")
    if x.ndim < 2 or not isinstance(base, int | float) or base <= 0:
        return None
    dims = int(call.settings.get("dims") or x.shape[-1])
    if dims > x.shape[-1] or dims % 2:
        return None
    scale = float(call.settings.get("scale") or 1.0)
    exponents = np.arange(0, dims, 2, dtype=np.float64) / dims
    offset = call.settings.get("offset") or 0
    if not isinstance(offset, int):
        return None
    positions = offset + np.arange(x.shape[-2], dtype=np.float64)
    angles = scale * positions[:, None] * base**-exponents
    data = wide(x)
    traditional = bool(call.settings.get("traditional"))
    places = (
        (slice(0, dims, 2), slice(1, dims, 2))
        if traditional
        else (
            slice(0, dims // 2),
            slice(dims // 2, dims),
        )
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


def resolve(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """`base` from the module or the configuration; none where the frequencies follow another rule
    (linear, llama3, yarn)."""
    kind = settings.get("config.rope_parameters.rope_type")
    scaled = settings.get("config.rope_scaling")
    if kind not in (None, "default") or scaled is not None:
        return {"base": None}
    return {"base": settings.get("base", settings.get("config.rope_theta"))}


def conventions(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the type of a model pairs elements; unknown where the configuration asks for something
    else, as converted checkpoints whose rows were permuted do."""
    known = settings.get("config.model_type") in _HALF_SPLIT
    if known and not settings.get("config.rope_traditional"):
        return {"traditional": False}
    return {}
