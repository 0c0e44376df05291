"""Matrix products: Linear, LoRA, Conv1D; and embedding, which is a product with unit vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracediff.replayers.reference_rounding import (
    ROUNDING,
    arithmetic,
    is_narrow,
    random_walk,
    storage,
    stored,
    together,
    wide,
)
from tracediff.replaying import Call, Floats, Replayed


def linear(call: Call) -> Replayed | None:
    """`y = x W^T + b`, W of shape (out, in), as in torch.nn.Linear and mlx.nn.Linear.

    With adapters below it, the wrapper of peft (`lora.Linear`) or of mlx-lm (`LoRALinear`).
    """
    x = call.inputs["in"]
    if any("lora_" in name for name in call.params):
        return _lora(call, x)
    weight = call.params.get("weight")
    if weight is None or set(call.params) - {"weight", "bias"} or weight.ndim != 2:
        return None
    return _affine(call, x, weight.T)


def conv1d(call: Call) -> Replayed | None:
    """`y = x W + b`, W of shape (in, out): transformers' `Conv1D`, as in GPT-2."""
    x, weight = call.inputs["in"], call.params.get("weight")
    if weight is None or set(call.params) - {"weight", "bias"}:
        return None
    return _affine(call, x, weight)


def embedding(call: Call) -> Replayed | None:
    """`y = W[ids]`: a copy, which errs by one rounding where the dtype is another and not at all
    otherwise."""
    ids, weight = call.inputs["in"], call.params.get("weight")
    if weight is None or set(call.params) != {"weight"} or ids.dtype.kind not in "iu":
        return None
    if ids.size and not (ids.min() >= 0 and ids.max() < len(weight)):
        return None
    value = wide(weight[ids])
    same = weight.dtype.name == call.dtype
    spread = np.zeros_like(value) if same else stored(call, value)
    return Replayed(value, spread, f"{call.op} copy {call.dtype}")


def product(call: Call, x: NDArray[Any], weight: NDArray[Any]) -> tuple[Floats, Floats]:
    """`x W` in float64, and the spread of its accumulation in the call's arithmetic.

    The partial sums are a random walk (`random_walk`), Q being `X**2 W**2`.

    For terms of like size `sqrt(K Q)` is about `|X| |W|`, without the further `sqrt(K)` of the
    bound for data of one sign (Higham and Mary 2019, theorem 3.1; 2020 for data of mean zero);
    where a few channels dominate, it stays right and `u |X| |W|` would be too small.

    Operands that the hardware cuts short (TF32, bfloat16) add their own rounding of each term. A
    product of 16-bit operands may be split along K, and the partial sums stored in 16 bits before
    they are added: any number of parts has the sum of squares Q.
    """
    length = x.shape[-1]
    value = wide(x) @ wide(weight)
    if call.value_only:
        return value, np.broadcast_to(np.zeros(()), value.shape)
    squares = _squares(x) @ _squares(weight)
    roundoff = arithmetic(call)
    variance = roundoff**2 * random_walk(length, squares, value)
    cut = float(call.settings.get("operand_roundoff", 0.0))
    variance += 2 * (ROUNDING * cut) ** 2 * squares
    if is_narrow(call):
        variance += (ROUNDING * storage(call)) ** 2 * squares
    return value, np.sqrt(variance, out=variance)


def _squares(array: NDArray[Any]) -> NDArray[np.float32]:
    """Squares in float32: a spread needs no more, and the product is four times as quick."""
    narrow = array.astype(np.float32)
    return narrow * narrow


def _affine(call: Call, x: NDArray[Any], weight: NDArray[Any]) -> Replayed | None:
    if x.shape[-1] != weight.shape[0]:
        return None
    value, spread = product(call, x, weight)
    bias = call.params.get("bias")
    if bias is not None:
        before = stored(call, value)
        value = value + wide(bias)
        spread = together(spread, before)  # a product that is stored before the bias is added
    if not call.value_only:
        spread = together(spread, stored(call, value))
    return Replayed(value, spread, f"{call.op} K={x.shape[-1]} {call.dtype}")


def _lora(call: Call, x: NDArray[Any]) -> Replayed | None:
    """`y = x W^T + b + s (x A) B` with dropout off. Hu et al., "LoRA", 2021, equation 3.

    peft keeps A as (r, in) and B as (out, r), mlx-lm as (in, r) and (r, out). The error of `x A`
    is passed on by B as `sqrt(spread**2 B**2)`; `s (x A)` is stored before and after.
    """
    found = lora_parts(call.params)
    scale = call.settings.get("scale")
    drops = any(name.endswith(".p") and value for name, value in call.settings.items())
    if found is None or scale is None or drops:
        return None
    base, bias, down, up = found
    if x.shape[-1] != base.shape[0] or down.shape[0] != x.shape[-1] or up.shape[0] != down.shape[1]:
        return None
    value, spread = product(call, x, base)
    inner, inner_spread = product(call, x, down)
    inner_spread = together(inner_spread, stored(call, inner))
    added, added_spread = product(call, inner, up)
    passed_on = np.sqrt((inner_spread**2) @ (wide(up) ** 2))
    added = float(scale) * added
    added_spread = together(
        float(scale) * together(added_spread, passed_on), stored(call, added, 2)
    )
    if bias is not None:
        value = value + wide(bias)
    if is_narrow(call) or bias is not None:
        spread = together(spread, stored(call, value))
    value = value + added
    spread = together(spread, added_spread, stored(call, value))
    return Replayed(value, spread, f"{call.op} LoRA K={x.shape[-1]} r={up.shape[0]} {call.dtype}")


def lora_parts(
    params: Mapping[str, NDArray[Any]],
) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any], NDArray[Any]] | None:
    """Base weight (in, out), bias, A (in, r) and B (r, out), or None for any other adapter."""
    down = [name for name in params if name == "lora_a" or name.startswith("lora_A.")]
    up = [name for name in params if name == "lora_b" or name.startswith("lora_B.")]
    owner = next((o for o in ("base_layer", "linear") if f"{o}.weight" in params), None)
    if len(down) != 1 or len(up) != 1 or owner is None:
        return None
    known = {*down, *up, f"{owner}.weight", f"{owner}.bias"}
    if set(params) - known:  # a magnitude vector (DoRA), quantisation scales
        return None
    a, b = params[down[0]], params[up[0]]
    if down[0] != "lora_a":
        a, b = a.T, b.T
    weight: NDArray[Any] = params[f"{owner}.weight"].T
    return weight, params.get(f"{owner}.bias"), a, b
