"""Normalisation: RMSNorm with or without an offset of its weight, and LayerNorm."""

from __future__ import annotations

import numpy as np

from tracediff.replayers.reference_rounding import (
    LARGEST,
    ROUNDING,
    arithmetic,
    half_spacing,
    is_narrow,
    positive_sum,
    reach_of,
    stored,
    together,
    wide,
)
from tracediff.replaying import Call, Replayed


def rms_norm(call: Call) -> Replayed | None:
    """`y = w x / sqrt(mean(x**2) + eps)`. Zhang and Sennrich, "Root mean square layer
    normalization", 2019, equation 4; `1 + w` in place of w where `offset` is 1 (Gemma).

    The mean of squares is a sum of one sign, whose relative error the root halves; root, division
    and both multiplications round once each. 16-bit implementations store the normalised value
    before they multiply by the weight.
    """
    x, weight, eps = call.inputs["in"], call.params.get("weight"), call.settings.get("eps")
    if eps is None or set(call.params) - {"weight"}:
        return None
    data = wide(x)
    normed = data / np.sqrt(np.mean(data**2, axis=-1, keepdims=True) + float(eps))
    gain = np.ones(1)
    if weight is not None:
        if weight.shape != x.shape[-1:]:
            return None
        gain = wide(weight) + float(call.settings.get("offset", 0.0))
    value = normed * gain
    relative = positive_sum(arithmetic(call), x.shape[-1]) / 2 + 4 * ROUNDING * arithmetic(call)
    error = relative * np.abs(value)
    reach = None
    if is_narrow(call):
        first = np.abs(gain) * half_spacing(call, normed, LARGEST * relative * np.abs(normed))
        reach = reach_of(call, value, error, first)
    return Replayed(
        value,
        together(error, stored(call, value, 2 if is_narrow(call) else 1)),
        f"{call.op} K={x.shape[-1]} {call.dtype}",
        reach,
    )


def layer_norm(call: Call) -> Replayed | None:
    """`y = w (x - mu) / sqrt(var + eps) + b`. Ba, Kiros and Hinton, "Layer normalization", 2016.

    Conditioned on the mean: mu errs by the accumulation of `|x|`, which the difference `x - mu`
    does not scale down, and a variance taken as `E x**2 - mu**2` errs relative to `E x**2`
    (Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983).
    """
    x, eps = call.inputs["in"], call.settings.get("eps")
    if eps is None or set(call.params) - {"weight", "bias"}:
        return None
    weight, bias = call.params.get("weight"), call.params.get("bias")
    if weight is not None and weight.shape != x.shape[-1:]:
        return None
    data, roundoff = wide(x), arithmetic(call)
    gain = 1.0 if weight is None else wide(weight)
    centred = data - data.mean(axis=-1, keepdims=True)
    variance = np.mean(centred**2, axis=-1, keepdims=True) + float(eps)
    normed = centred / np.sqrt(variance)
    scaled = gain * normed
    accumulation = positive_sum(roundoff, x.shape[-1])
    of_mean = accumulation * np.mean(np.abs(data), axis=-1, keepdims=True)
    of_variance = accumulation * np.mean(data**2, axis=-1, keepdims=True) / variance / 2
    relative = of_variance + 4 * ROUNDING * roundoff
    error = together(
        np.abs(gain) / np.sqrt(variance) * together(of_mean, ROUNDING * roundoff * np.abs(data)),
        relative * np.abs(scaled),
    )
    value = scaled if bias is None else scaled + wide(bias)
    spread = together(error, stored(call, value))
    reach = None
    if is_narrow(call):
        spread = together(spread, stored(call, scaled, 2))
        first = np.abs(gain) * half_spacing(call, normed)
        reach = reach_of(call, value, error, first, half_spacing(call, scaled, first))
    return Replayed(value, spread, f"{call.op} K={x.shape[-1]} {call.dtype}", reach)
