"""What models compute between their modules: copies, residual sums, gated activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tracediff.replayers.reference_rounding import (
    ROUNDING,
    arithmetic,
    half_spacing,
    is_narrow,
    reach_of,
    stored,
    together,
    wide,
)
from tracediff.replaying import Call, Floats, Replayed


def copy(call: Call) -> Replayed:
    """The input, perhaps in another dtype: one rounding."""
    return _rounded_once(call, wide(call.inputs["in"]))


def add(call: Call) -> Replayed:
    """`a + b`."""
    return _rounded_once(call, wide(call.inputs["in"]) + wide(call.inputs["other"]))


def multiply(call: Call) -> Replayed:
    """`a b`."""
    return _rounded_once(call, wide(call.inputs["in"]) * wide(call.inputs["other"]))


def gated(call: Call, activation: Callable[[Call], Replayed | None]) -> Replayed | None:
    """`f(a) b`. Shazeer, "GLU variants improve transformer", 2020, equation 5.

    The activated value may be stored before it is multiplied, which `activation` allows for.
    """
    inner = activation(replace(call, inputs={"in": call.inputs["in"]}))
    if inner is None:
        return None
    factor = abs(wide(call.inputs["other"]))
    value = inner.value * wide(call.inputs["other"])
    spread = together(inner.spread * factor, stored(call, value))
    reach = None
    if inner.reach is not None:
        reach = inner.reach * factor
        reach = reach + half_spacing(call, value, reach)
    return Replayed(value, spread, f"gated {inner.derivation}", reach)


def _rounded_once(call: Call, value: Floats) -> Replayed:
    """One rounding of the result, and a second where a wider one may have been stored before."""
    times = 2 if is_narrow(call) else 1
    error = ROUNDING * arithmetic(call) * abs(value)
    reach = reach_of(call, value, error, half_spacing(call, value)) if is_narrow(call) else None
    return Replayed(value, stored(call, value, times), f"{call.op} {call.dtype}", reach)
