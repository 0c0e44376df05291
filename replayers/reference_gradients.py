"""Gradients of the operations with formulas: of the input, and of each parameter.

With the upstream gradient g = dL/dy recorded, the chain rule gives dL/dx and dL/dw from the forward
pass's own input (Griewank and Walther, "Evaluating derivatives", 2008, chapter 3). Spreads are made
of the same pieces as those of the forward formulas, see `reference_rounding`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.replayers.reference_functions import erf
from tracediff.replayers.reference_functions import sigmoid as logistic
from tracediff.replayers.reference_products import lora_parts, product
from tracediff.replayers.reference_rope import rope
from tracediff.replayers.reference_rounding import (
    LARGEST,
    ROUNDING,
    arithmetic,
    is_narrow,
    positive_sum,
    random_walk,
    storage,
    stored,
    together,
    wide,
)
from tracediff.replaying import Call, Floats, Replayed

Upstream = NDArray[Any]
Gradient = Callable[[Call, Upstream, str], Replayed | None]

_FUNCTION: Final = 2.0
"""Spread of one evaluation of exp, tanh or erf, in units of the unit roundoff."""


def _rows(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(-1, array.shape[-1])


def _done(call: Call, value: Floats, spread: Floats, wrt: str) -> Replayed:
    spread = together(spread, stored(call, value))
    return Replayed(value, spread, f"gradient of {call.op} {wrt} {call.dtype}")


def _summed(terms: Floats, roundoff: float, each: float = 0.0) -> tuple[Floats, Floats]:
    """Sum over rows (N, K) -> (K,), and its spread: a random walk of partial sums, as in `product`.

    Args:
        each: Relative error of a term.
    """
    value = terms.sum(axis=0)
    squares, length = np.square(terms).sum(axis=0), len(terms)
    walk = roundoff**2 * random_walk(length, squares, value)
    return value, np.sqrt(walk + each**2 * squares)


# ---- products -----------------------------------------------------------------------------------


def linear(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """`dx = g W`, `dW = g^T x`, `db = sum g` for W of shape (out, in); with adapters, `_lora`."""
    if any("lora_" in name for name in call.params):
        return _lora(call, upstream, wrt)
    weight = call.params.get("weight")
    if weight is None or weight.ndim != 2 or set(call.params) - {"weight", "bias"}:
        return None
    if wrt == "in":
        value, spread = product(call, upstream, weight)
    elif wrt == "weight":
        value, spread = product(call, _rows(upstream).T, _rows(call.inputs["in"]))
    elif wrt == "bias":
        value, spread = _summed(wide(_rows(upstream)), arithmetic(call))
    else:
        return None
    return _done(call, value, spread, wrt)


def conv1d(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """`dx = g W^T`, `dW = x^T g`, `db = sum g` for W of shape (in, out)."""
    weight = call.params.get("weight")
    if weight is None or set(call.params) - {"weight", "bias"}:
        return None
    if wrt == "in":
        value, spread = product(call, upstream, weight.T)
    elif wrt == "weight":
        value, spread = product(call, _rows(call.inputs["in"]).T, _rows(upstream))
    elif wrt == "bias":
        value, spread = _summed(wide(_rows(upstream)), arithmetic(call))
    else:
        return None
    return _done(call, value, spread, wrt)


def _lora(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """`dx = g W + s (g B^T) A^T`, `dA = s x^T (g B^T)`, `dB = s (x A)^T g`, with A (in, r) and B
    (r, out); `g B^T` and `x A` are stored, as is what they are scaled to."""
    found, scale = lora_parts(call.params), call.settings.get("scale")
    drops = any(name.endswith(".p") and value for name, value in call.settings.items())
    if found is None or scale is None or drops:
        return None
    base, _, down, up = found
    factor, x, g = float(scale), _rows(call.inputs["in"]), _rows(upstream)
    back, back_spread = product(call, g, up.T)
    back_spread = together(back_spread, stored(call, back, 2))
    if wrt == "in":
        value, spread = product(call, g, base.T)
        added, added_spread = product(call, back, down.T)
        passed_on = np.sqrt(back_spread**2 @ wide(down.T) ** 2)
        added, added_spread = factor * added, factor * together(added_spread, passed_on)
        spread = together(spread, stored(call, value), added_spread, stored(call, added))
        shape = call.inputs["in"].shape
        return _done(call, (value + added).reshape(shape), spread.reshape(shape), wrt)
    if wrt.startswith(("lora_a", "lora_A")):
        value, spread = product(call, x.T, back)
        spread = together(spread, np.sqrt(wide(x.T) ** 2 @ back_spread**2))
    elif wrt.startswith(("lora_b", "lora_B")):
        inner, inner_spread = product(call, x, down)
        inner_spread = together(inner_spread, stored(call, inner, 2))
        value, spread = product(call, inner.T, g)
        spread = together(spread, np.sqrt(inner_spread.T**2 @ wide(g) ** 2))
    else:
        return None
    value, spread = factor * value, factor * spread
    if wrt.startswith(("lora_A", "lora_B")):  # peft keeps both transposed
        value, spread = value.T, spread.T
    return _done(call, value, spread, wrt)


def embedding(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """`dW[id] = sum of g over the places of id`. 16-bit kernels may add in the stored dtype."""
    weight, ids = call.params.get("weight"), call.inputs["in"].reshape(-1)
    if wrt != "weight" or weight is None or ids.dtype.kind not in "iu":
        return None
    if ids.size and not (ids.min() >= 0 and ids.max() < len(weight)):
        return None
    g = wide(_rows(upstream))
    value, squares = np.zeros(weight.shape), np.zeros(weight.shape)
    np.add.at(value, ids, g)
    np.add.at(squares, ids, g**2)
    count = np.bincount(ids, minlength=len(weight))[:, None]
    spread = storage(call) * np.sqrt(random_walk(count, squares, value))
    return _done(call, value, spread, wrt)


# ---- norms --------------------------------------------------------------------------------------


def rms_norm(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """With `r = (mean x^2 + eps)^-1/2` and `h = g w`: `dx = r h - r^3 x mean(x h)` and
    `dw = sum g x r`.

    The two terms of dx err by a few roundings each, the mean by its accumulation as well. 16-bit
    implementations store h, or the normalised value, before they go on.
    """
    x, weight, eps = call.inputs["in"], call.params.get("weight"), call.settings.get("eps")
    if eps is None or set(call.params) - {"weight"}:
        return None
    data, g, length = wide(x), wide(upstream), x.shape[-1]
    roundoff = arithmetic(call)
    r = 1 / np.sqrt(np.mean(data**2, axis=-1, keepdims=True) + float(eps))
    relative = positive_sum(roundoff, length) / 2 + 4 * ROUNDING * roundoff
    once = ROUNDING * storage(call) if is_narrow(call) else 0.0
    if wrt == "weight":
        value, spread = _summed(_rows(g * data * r), roundoff, math.hypot(relative, 1.5 * once))
        return _done(call, value, spread, wrt)
    if wrt != "in":
        return None
    gain = 1.0 if weight is None else wide(weight) + float(call.settings.get("offset", 0.0))
    h = g * gain
    of_mean, mean_error = _mean(data * h, roundoff, once)
    first, second = r * h, r**3 * data * of_mean
    spread = together(
        math.hypot(relative, once) * np.abs(first),
        3 * relative * np.abs(second),
        np.abs(r**3 * data) * mean_error,
    )
    return _done(call, first - second, spread, wrt)


def layer_norm(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """With `n = (x - mu) / s` and `h = g w`: `dx = (h - mean h - n mean(h n)) / s`, `dw = sum g n`,
    `db = sum g`. The error of mu enters n undamped, as in the forward formula; 16-bit kernels may
    add dw and db up in the stored dtype, and keep mu and 1/s in it (PyTorch's do on a CPU)."""
    x, eps = call.inputs["in"], call.settings.get("eps")
    if eps is None or set(call.params) - {"weight", "bias"}:
        return None
    weight = call.params.get("weight")
    data, g, roundoff = wide(x), wide(upstream), arithmetic(call)
    if wrt == "bias":
        value, spread = _summed(_rows(g), storage(call))
        return _done(call, value, spread, wrt)
    mu = data.mean(axis=-1, keepdims=True)
    centred = data - mu
    s = np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + float(eps))
    n = centred / s
    accumulation = positive_sum(roundoff, x.shape[-1])
    once = ROUNDING * storage(call) if is_narrow(call) else 0.0
    of_mu = (
        accumulation * np.mean(np.abs(data), axis=-1, keepdims=True)
        + ROUNDING * roundoff * np.abs(data)
        + once * np.abs(mu)
    ) / s
    of_s = accumulation * np.mean(data**2, axis=-1, keepdims=True) / s**2 / 2
    relative = of_s + 4 * ROUNDING * roundoff + once
    if wrt == "weight":
        terms = g * n
        value, spread = _summed(_rows(terms), storage(call), 1.5 * once)
        errors = together(relative * np.abs(terms), np.abs(g) * of_mu)
        spread = together(spread, np.sqrt(np.square(_rows(errors)).sum(axis=0)))
        return _done(call, value, spread, wrt)
    if wrt != "in":
        return None
    h = g * (1.0 if weight is None else wide(weight))
    first, first_error = _mean(h, roundoff, once)
    second, second_error = _mean(h * n, roundoff, once)
    value = (h - first - n * second) / s
    spread = together(
        math.hypot(2 * ROUNDING * roundoff, once) * np.abs(h) / s,
        first_error / s,
        np.abs(n) * second_error / s,
        of_mu * (np.abs(second) + np.mean(np.abs(h), axis=-1, keepdims=True)) / s,
        relative * (np.abs(h) + np.abs(first) + np.abs(n * second)) / s,
    )
    return _done(call, value, spread, wrt)


def _mean(terms: Floats, roundoff: float, once: float) -> tuple[Floats, Floats]:
    """Mean along the last axis and its spread: partial sums are a random walk."""
    length = terms.shape[-1]
    value = terms.mean(axis=-1, keepdims=True)
    squares = np.square(terms).sum(axis=-1, keepdims=True)
    walk = roundoff**2 * random_walk(length, squares, length * value)
    each = (3 * ROUNDING * roundoff) ** 2 + once**2
    return value, np.sqrt(walk + each * squares) / length


# ---- elementwise --------------------------------------------------------------------------------


def silu(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """`dx = g s (1 + x (1 - s))` with s the sigmoid of x."""
    x = wide(call.inputs["in"])
    s = logistic(x)
    slope = s * (1 + x * (1 - s))
    error = s * (1 + np.abs(x)) * (1 + np.abs(x) / 2)
    return _elementwise(call, upstream, wrt, slope, error)


def quick_gelu(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """`dx = g (s + 1.702 x s (1 - s))` with s the sigmoid of 1.702 x."""
    x = wide(call.inputs["in"])
    s = logistic(1.702 * x)
    slope = s + 1.702 * x * s * (1 - s)
    error = s * (1 + 1.702 * np.abs(x)) * (1 + np.abs(x))
    return _elementwise(call, upstream, wrt, slope, error)


def gelu(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """`dx = g (Phi(x) + x phi(x))`, or the derivative of the tanh formula."""
    approximate = call.settings.get("approximate", "none")
    x = wide(call.inputs["in"])
    if approximate == "none":
        density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
        slope = 0.5 * (1 + erf(x / math.sqrt(2))) + x * density
    elif approximate == "tanh":
        scale, cubic = math.sqrt(2 / math.pi), 0.044715
        inner = np.tanh(scale * (x + cubic * x**3))
        density = 0.5 * (1 - inner**2) * scale * (1 + 3 * cubic * x**2)
        slope = 0.5 * (1 + inner) + x * density
    else:
        return None
    # 1 + erf cancels for negative x, so that this part of the error is absolute.
    error = 0.5 + np.abs(x) * density * (1 + x**2)
    return _elementwise(call, upstream, wrt, slope, error)


def relu(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """`dx = g` where x is positive."""
    slope: Floats = (wide(call.inputs["in"]) > 0).astype(np.float64)
    return _elementwise(call, upstream, wrt, slope, np.zeros_like(slope))


def tanh(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """`dx = g (1 - y^2)`; the difference cancels where y is near 1."""
    y = np.tanh(wide(call.inputs["in"]))
    return _elementwise(call, upstream, wrt, 1 - y**2, np.ones_like(y))


def sigmoid(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """`dx = g y (1 - y)`."""
    y = logistic(wide(call.inputs["in"]))
    return _elementwise(call, upstream, wrt, y * (1 - y), y)


def rotary(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """A rotation is undone by the rotation back: `dx` is g turned by the negative angles."""
    if wrt != "in":
        return None
    scale = -float(call.settings.get("scale") or 1.0)
    turned = replace(call, inputs={"in": upstream}, settings={**call.settings, "scale": scale})
    found = rope(turned)
    return found and replace(found, derivation=f"gradient of {found.derivation}")


# ---- losses -------------------------------------------------------------------------------------


def cross_entropy(call: Call, upstream: Upstream, wrt: str) -> Replayed | None:
    """`dz = g (softmax(z) - onehot(label))`. Bridle, 1990, as in `reference_losses`.

    An exponential errs by its function and by its argument, which 16-bit implementations store as
    the logarithm of the probability; the sum of V of them by `V u`, which is six spreads. The
    logits may be taken from their logarithm of a sum, which is rounded at its own size.

    Args:
        call: `in` (..., V) and `labels` (...), each a class.
        upstream: Of each position's loss, zero where it is ignored.
    """
    logits, labels = call.inputs["in"], call.inputs["labels"]
    if wrt != "in" or labels.shape != logits.shape[:-1] or upstream.shape != labels.shape:
        return None
    data, g = wide(logits), wide(upstream)[..., None]
    top = data.max(axis=-1, keepdims=True)
    shifted = data - top
    weights = np.exp(shifted)
    total = weights.sum(axis=-1, keepdims=True)
    p = weights / total
    size = np.abs(shifted) + np.abs(np.log(total))
    normaliser = np.abs(top + np.log(total))
    relative = arithmetic(call) * (_FUNCTION + size + normaliser + logits.shape[-1] / LARGEST)
    if is_narrow(call):
        relative = together(relative, ROUNDING * storage(call) * size)
    value = p.copy()
    chosen = np.take_along_axis(p, labels[..., None], axis=-1) - 1
    np.put_along_axis(value, labels[..., None], chosen, axis=-1)
    return _done(call, g * value, np.abs(g) * together(relative * p, arithmetic(call) * p), wrt)


def _elementwise(
    call: Call, upstream: Upstream, wrt: str, slope: Floats, error: Floats
) -> Replayed | None:
    if wrt != "in":
        return None
    g = wide(upstream)
    value = g * slope
    spread = _FUNCTION * arithmetic(call) * np.abs(g) * error
    if is_narrow(call):  # composed of operations that each store their result
        spread = together(spread, ROUNDING * storage(call) * np.abs(g) * error)
    return _done(call, value, spread, wrt)


_GRADIENTS: Final[tuple[tuple[re.Pattern[str], Gradient], ...]] = tuple(
    (re.compile(pattern), gradient)
    for pattern, gradient in (
        (r"(NonDynamicallyQuantizable|LoRA)?Linear", linear),
        (r"Conv1D", conv1d),
        (r"Embedding", embedding),
        (r"\w*RMSNorm|T5LayerNorm", rms_norm),
        (r"LayerNorm", layer_norm),
        (r"RoPE", rotary),
        (r"SiLU(Activation)?", silu),
        (r"(New|Fast)?GELU(Activation)?|GELUTanh|PytorchGELUTanh", gelu),
        (r"QuickGELU(Activation)?", quick_gelu),
        (r"ReLU", relu),
        (r"Tanh", tanh),
        (r"Sigmoid", sigmoid),
        (r"cross_entropy", cross_entropy),
    )
)


@lru_cache
def gradient_of(op: str) -> Gradient | None:
    """The gradient of an operation with one input, or of a loss with labels as well."""
    return next((found for pattern, found in _GRADIENTS if pattern.fullmatch(op)), None)
