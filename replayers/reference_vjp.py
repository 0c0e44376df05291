"""Vector-Jacobian products of canonical operations in float64, with the spread of their rounding.

With the gradient g of an operation's output y, the gradient of its input x is `g dy/dx` (Griewank
and Walther, "Evaluating derivatives", 2008, chapter 3). Here are those of arithmetic and whatever
moves elements; `reference_vjp_products` has products and reductions, `reference_vjp_fused` norms,
softmax and attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tracediff.compare.figures import is_complex
from tracediff.replayers.reference_functions import erf
from tracediff.replayers.reference_operations import (
    FORMULAS,
    FUNCTION,
    accumulated,
    argument,
    is_tanh_gelu,
    operands,
    rounded,
    roundoff,
    sigmoid_of,
    widen,
)
from tracediff.replayers.reference_rounding import ROUNDING, random_walk, together
from tracediff.replaying import Floats, Replayed, Use


@dataclass(frozen=True, slots=True)
class Part:
    """What one use passes back, of the input's shape, and the spread of its error before it is
    stored."""

    value: Floats
    error: Floats


Rule = Callable[[Use, Floats], Part | None]
"""Takes a use and the gradient of the operation's first output that has one."""

RULES: Final[dict[str, Rule]] = {}
"""Canonical name -> rule. Filled by `rule` here and in the modules beside it."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enters a rule under canonical names."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


def pull_back(uses: Sequence[Use], dtype: str) -> Replayed | None:
    """The sum of what all uses of a value pass back; see `Replayer.pull_back`."""
    parts: list[Part] = []
    for use in uses:
        try:
            with np.errstate(all="ignore"):
                found = _passed_back(use)
        except (IndexError, KeyError, TypeError, ValueError):
            return None  # recorded arguments of another form than the rule knows
        if found is None or found.value.shape != use.operation.inputs[use.place].shape:
            return None
        parts.append(found)
    names = dict.fromkeys(use.operation.canonical for use in uses)
    last = replace(uses[-1].operation, dtype=dtype)
    total, variance = parts[0].value, parts[0].error ** 2
    for part in parts[1:]:
        total = total + part.value
        variance = variance + part.error**2 + (ROUNDING * roundoff(last) * total) ** 2
    found_in_all = rounded(last, total, np.sqrt(variance))
    return replace(found_in_all, derivation=f"gradient through {', '.join(names)} {dtype}")


def _passed_back(use: Use) -> Part | None:
    canonical = use.operation.canonical
    arrays = (*use.operation.inputs, *(g for g in use.cotangents if g is not None))
    if any(map(is_complex, arrays)):
        return None  # stacks differ in which of two conjugates they call the gradient
    if canonical in _MOVERS:
        return _moved(use)
    found, grads = RULES.get(canonical), [g for g in use.cotangents if g is not None]
    if found is None or len(grads) != 1 or use.cotangents[0] is None:
        return None
    return found(use, widen(grads[0]).astype(np.float64))


# ---- pieces -------------------------------------------------------------------------------------


def given(use: Use) -> Any:
    """The value that the use reads."""
    return widen(use.operation.inputs[use.place])


def part(value: Floats, error: Any = 0.0) -> Part:
    return Part(value, np.broadcast_to(np.asarray(error, np.float64), value.shape))


def times(use: Use, grad: Floats, slope: Any, steps: float = 1.0, size: Any = None) -> Part:
    """`g * slope` for an input that may have been broadcast.

    Args:
        steps: Roundings of the product and of the slope's terms, in spreads of one rounding.
        size: Sum of the magnitudes of the slope's terms, where they cancel.
    """
    value = grad * slope
    magnitude = np.abs(value) if size is None else np.abs(grad) * size
    return reduced(use, part(value, steps * ROUNDING * roundoff(use.operation) * magnitude))


def reduced(use: Use, whole: Part, shape: tuple[int, ...] | None = None) -> Part:
    """Sums over the dimensions along which an input was broadcast."""
    shape = use.operation.inputs[use.place].shape if shape is None else shape
    value, error = whole.value, whole.error
    extra = value.ndim - len(shape)
    axes = (
        *range(extra),
        *(i + extra for i, n in enumerate(shape) if n == 1 and value.shape[i + extra] != 1),
    )
    if not axes:
        return whole
    length = math.prod(value.shape[axis] for axis in axes)
    total = value.sum(axis=axes, keepdims=True)
    squares = (value**2).sum(axis=axes, keepdims=True)
    walk = accumulated(use.operation, total, squares, length)
    spread = together(walk, np.sqrt((error**2).sum(axis=axes, keepdims=True)))
    return Part(total.reshape(shape), spread.reshape(shape))


def place_of_operand(use: Use) -> int:
    """Which of the data arguments the value is, numbers counted as well."""
    listed = use.operation.operands
    if not listed:
        return use.place
    return [i for i, each in enumerate(listed) if each is None][use.place]


# ---- element by element -------------------------------------------------------------------------


@rule("add", "sub")
def _add(use: Use, grad: Floats) -> Part | None:
    if use.operation.op.startswith("aten.rsub"):
        return None
    first = place_of_operand(use) == 0
    factor = 1.0 if first else float(argument(use.operation, "alpha", default=1))
    sign = -1.0 if use.operation.canonical == "sub" and not first else 1.0
    return reduced(use, part(sign * factor * grad))


@rule("mul")
def _mul(use: Use, grad: Floats) -> Part | None:
    return times(use, grad, operands(use.operation)[1 - place_of_operand(use)])


@rule("div")
def _div(use: Use, grad: Floats) -> Part | None:
    a, b = operands(use.operation)
    slope = np.divide(1, b) if place_of_operand(use) == 0 else -np.divide(a, np.square(b))
    return times(use, grad, slope, 3)


@rule("pow")
def _pow(use: Use, grad: Floats) -> Part | None:
    base, exponent = (np.asarray(x, np.float64) for x in operands(use.operation))
    if place_of_operand(use) == 0:
        slope = exponent * np.power(base, exponent - 1)
    else:
        slope = np.power(base, exponent) * np.log(base)
    return times(use, grad, slope, 2 * FUNCTION)


@rule("maximum", "minimum")
def _maximum(use: Use, grad: Floats) -> Part | None:
    """To the larger one; stacks differ in who gets how much of a tie."""
    place = place_of_operand(use)
    own, other = (np.asarray(operands(use.operation)[i], np.float64) for i in (place, 1 - place))
    won = own > other if use.operation.canonical == "maximum" else own < other
    value = np.where(won, grad, 0.0)
    return reduced(use, part(value, np.where(own == other, np.abs(grad), 0.0)))


@rule("where")
def _where(use: Use, grad: Floats) -> Part | None:
    place = place_of_operand(use)
    if use.operation.op.startswith("aten.masked_fill") or place == 0:
        return None
    chosen = use.operation.inputs[0].astype(bool)
    return reduced(use, part(np.where(chosen if place == 1 else ~chosen, grad, 0.0)))


@rule("clamp")
def _clamp(use: Use, grad: Floats) -> Part | None:
    clamp, x = FORMULAS["clamp"](use.operation), given(use)
    if clamp is None or use.place != 0:
        return None
    return times(use, grad, (clamp.value == x).astype(np.float64))


@rule("logaddexp")
def _logaddexp(use: Use, grad: Floats) -> Part | None:
    place = place_of_operand(use)
    own, other = (np.asarray(operands(use.operation)[i], np.float64) for i in (place, 1 - place))
    slope = sigmoid_of(own - other)
    return times(use, grad, slope, 2 * FUNCTION, slope * (1 + np.abs(own - other)))


def _tanh_gelu_slope(x: Floats) -> Floats:
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    inner = np.tanh(scale * (x + cubic * x**3))
    slope: Floats = 0.5 * (1 + inner) + 0.5 * x * (1 - inner**2) * scale * (1 + 3 * cubic * x**2)
    return slope


def _gelu_slope(x: Floats) -> Floats:
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    slope: Floats = 0.5 * (1 + erf(x / math.sqrt(2))) + x * density
    return slope


def _silu_slope(x: Floats) -> Floats:
    s = sigmoid_of(x)
    return s * (1 + x * (1 - s))


_SLOPES: Final[Mapping[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("copy", "alias", "cast", "identity"), np.ones_like),
    "neg": lambda x: -np.ones_like(x),
    "abs": np.sign,
    "relu": lambda x: (x > 0).astype(np.float64),
    "square": lambda x: 2 * x,
    "sqrt": lambda x: 0.5 / np.sqrt(x),
    "rsqrt": lambda x: -0.5 * x**-1.5,
    "reciprocal": lambda x: -(x**-2.0),
    "exp": np.exp,
    "exp2": lambda x: math.log(2) * np.exp2(x),
    "expm1": np.exp,
    "log": lambda x: 1 / x,
    "log2": lambda x: 1 / (x * math.log(2)),
    "log10": lambda x: 1 / (x * math.log(10)),
    "log1p": lambda x: 1 / (1 + x),
    "sinh": np.cosh,
    "cosh": np.sinh,
    "erf": lambda x: 2 / math.sqrt(math.pi) * np.exp(-(x**2)),
}
"""Derivatives that are accurate relative to themselves, but for the condition of an exponential."""

_CANCELLING: Final[Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "sin": (np.cos, np.ones_like),
    "cos": (lambda x: -np.sin(x), np.ones_like),
    "tanh": (lambda x: 1 - np.tanh(x) ** 2, np.ones_like),
    "sigmoid": (lambda x: sigmoid_of(x) * sigmoid_of(-x), lambda x: sigmoid_of(x) * (1 + abs(x))),
    "softplus": (sigmoid_of, lambda x: 1 + np.abs(x)),
    "silu": (_silu_slope, lambda x: sigmoid_of(x) * (1 + np.abs(x)) * (1 + np.abs(x) / 2)),
    "gelu": (_gelu_slope, lambda x: 1 + x**2 * np.exp(-(x**2) / 2)),
}
"""Derivatives whose terms cancel, and the sum of the magnitudes of these terms."""


@rule(*_SLOPES)
def _relative(use: Use, grad: Floats) -> Part | None:
    x = given(use)
    exponential = use.operation.canonical in ("exp", "exp2", "expm1", "erf")
    condition = 1 + (np.abs(x) if exponential else 0.0)
    slope = _SLOPES[use.operation.canonical](x)
    return times(use, grad, slope, 2 * FUNCTION, np.abs(slope) * condition)


@rule(*_CANCELLING)
def _absolute(use: Use, grad: Floats) -> Part | None:
    x = given(use)
    slope, size = _CANCELLING[use.operation.canonical]
    if use.operation.canonical == "gelu" and is_tanh_gelu(use.operation):
        slope = _tanh_gelu_slope
    return times(use, grad, slope(x), 2 * FUNCTION, size(x))


@rule("swiglu")
def _swiglu(use: Use, grad: Floats) -> Part | None:
    """Of `silu(gate) x`."""
    gate, x = (widen(array) for array in use.operation.inputs)
    s = sigmoid_of(gate)
    if use.place == 1:
        return times(use, grad, s * gate, 2 * FUNCTION, s * np.abs(gate) * (1 + np.abs(gate) / 2))
    size = s * (1 + np.abs(gate)) * (1 + np.abs(gate) / 2) * np.abs(x)
    return times(use, grad, _silu_slope(gate) * x, 2 * FUNCTION, size)


# ---- what moves elements ------------------------------------------------------------------------

_MOVERS: Final = frozenset(
    {
        *("reshape", "squeeze", "unsqueeze", "expand", "transpose", "concatenate", "stack"),
        *("slice", "select", "split", "embedding", "take", "take_along_axis", "index"),
        *("tril", "triu", "repeat", "tile", "slice_update", "flip", "roll", "pad", "diagonal"),
    }
)


def _moved(use: Use) -> Part | None:
    """Each element's gradient goes back to where the element came from, and those that came from
    one place are added up. Where they came from is told by moving the numbers of the places."""
    operation, source = use.operation, use.operation.inputs[use.place]
    if source.dtype.kind in "iub":
        return None
    numbers = np.arange(1.0, source.size + 1).reshape(source.shape)
    inputs = tuple(
        numbers if i == use.place else array if array.dtype.kind in "iub" else np.zeros(array.shape)
        for i, array in enumerate(operation.inputs)
    )
    value, squares, counts = (np.zeros(source.size + 1) for _ in range(3))
    for output, grad in enumerate(use.cotangents):
        if grad is None:
            continue
        asked = replace(operation, inputs=inputs, output=output, shape=grad.shape, dtype="float64")
        constants = {"arg2": 0, "value": 0, "constant_values": 0}  # numbers that are put there
        asked = replace(asked, args={**asked.args, **constants})
        moved = FORMULAS[operation.canonical](asked)
        if moved is None or moved.value.shape != grad.shape:
            return None
        places, flat = moved.value.reshape(-1).astype(np.int64), widen(grad).reshape(-1)
        value += np.bincount(places, weights=flat, minlength=value.size)
        squares += np.bincount(places, weights=flat**2, minlength=value.size)
        counts += np.bincount(places, minlength=value.size)
    walk = roundoff(operation) * np.sqrt(random_walk(counts, squares, value))
    error = np.where(counts > 1, walk, 0.0)
    return part(value[1:].reshape(source.shape), error[1:].reshape(source.shape))


@rule("detach")
def _detach(use: Use, grad: Floats) -> Part | None:
    return part(np.zeros(use.operation.inputs[use.place].shape))
