"""Float64 formulas of canonical operations, each with the spread of its rounding error.

Every formula takes one operation as the recorder wrote it, of any stack, and gives one output. What
only moves elements is exact. See `reference_rounding` for how the spreads come about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.compare.figures import is_complex, unit_roundoff, widened
from tracediff.operations import ALIAS
from tracediff.replayers.reference_rounding import ROUNDING, random_walk, together
from tracediff.replaying import Floats, Operation, Replayed

Formula = Callable[[Operation], Replayed | None]

FORMULAS: Final[dict[str, Formula]] = {}
"""Canonical name -> formula. Filled by `formula` here and in `reference_backward`."""

COMPLEX: Final[set[str]] = set()
"""Names whose formulas hold for complex numbers too. Filled in `reference_complex`."""

_UNFIT: Final = (
    *(LookupError, TypeError, ValueError, ArithmeticError, AttributeError, StopIteration),
    MemoryError,
)
"""What comes of recorded arguments of another form than a formula knows."""

_ROOM: Final = 1 << 20
"""Elements that any formula may need besides its inputs and its result."""

LARGEST: Final = 6.0
"""Spreads that the largest error is allowed."""

FUNCTION: Final = 4.0
"""Spread of one evaluation of exp, log, tanh or a root in units of the unit roundoff: vectorised
libraries promise up to four units in the last place."""


def formula(*names: str) -> Callable[[Formula], Formula]:
    """Enters a formula under canonical names."""

    def enter(function: Formula) -> Formula:
        FORMULAS.update(dict.fromkeys(names, function))
        return function

    return enter


def recompute(operation: Operation) -> Replayed | None:
    """One output of one operation in float64; None where there is no formula, or it takes other
    arguments than these."""
    function = FORMULAS.get(operation.canonical)
    if function is None or (_is_complex(operation) and operation.canonical not in COMPLEX):
        return None
    try:
        with np.errstate(all="ignore"):
            found = function(operation)
    except _UNFIT:
        return None
    if found is None or found.value.shape != operation.shape:
        return None
    return found


# ---- pieces -------------------------------------------------------------------------------------


def check_room(operation: Operation, shape: Sequence[int], times: int = 8) -> None:
    """
    Raises:
        ValueError: An array of this shape is so much larger than what is on record of the operation
            that the record must be wrong.
    """
    known = sum(array.size for array in operation.inputs) + math.prod(operation.shape)
    if math.prod(shape) > times * known + _ROOM:
        raise ValueError(f"no operation of {known} elements needs {tuple(shape)}")


def operands(operation: Operation) -> list[Any]:
    """Data arguments in order: arrays, widened to float64, and numbers.

    Raises:
        ValueError: They do not go together, or make a larger result than is on record.
    """
    check_room(operation, np.broadcast_shapes(*(array.shape for array in operation.inputs)))
    arrays = iter([widen(array) for array in operation.inputs])
    if not operation.operands:
        return list(arrays)
    return [next(arrays) if each is None else each for each in operation.operands]


def widen(array: NDArray[Any]) -> NDArray[Any]:
    """Floating point in float64, complex numbers in complex128; others as they are."""
    return array if array.dtype.kind in "iub" else widened(array)


def _is_complex(operation: Operation) -> bool:
    return operation.dtype.startswith("complex") or any(map(is_complex, operation.inputs))


def argument(operation: Operation, *names: str, default: Any = None) -> Any:
    """The first of an operation's attributes that is there, under the names of either stack."""
    for name in names:
        if name in operation.args and operation.args[name] is not None:
            return operation.args[name]
    return default


def axes_of(operation: Operation, rank: int) -> tuple[int, ...]:
    """Dimensions that are reduced: all by default."""
    given = argument(operation, "dim", "axis", "axes", "dims")
    if given is None or given == []:
        return tuple(range(rank))
    return tuple(int(i) % rank for i in (given if isinstance(given, list | tuple) else [given]))


def roundoff(operation: Operation) -> float:
    """Unit roundoff of the arithmetic: of float32 for 16-bit types, which both stacks widen."""
    return min(_storage(operation), unit_roundoff("float32"))


def _storage(operation: Operation) -> float:
    return unit_roundoff(operation.dtype) if _is_float(operation.dtype) else 0.0


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def exact(operation: Operation, value: Any, why: str = "exact") -> Replayed:
    """A result that only moves elements; rounded once where the dtype is narrower."""
    array = np.asarray(value)
    spread = np.zeros(array.shape)
    if _is_float(operation.dtype) and any(
        _is_float(x.dtype.name) and unit_roundoff(x.dtype.name) < _storage(operation)
        for x in operation.inputs
    ):
        spread = storing(operation, widened(array))
    return Replayed(widened(array), spread, f"{operation.canonical} {why}")


def storing(operation: Operation, value: Floats) -> Floats:
    """Spread of rounding a result to the output's dtype; below the normal numbers the spacing is
    constant, or values are flushed to zero."""
    is_double = operation.dtype in ("float64", "complex128")
    low = np.finfo(np.float64 if is_double else np.float32).tiny
    least = 2.0**-25 if operation.dtype == "float16" else float(low)
    spread: Floats = ROUNDING * _storage(operation) * np.abs(value) + least
    return spread


def rounded(operation: Operation, value: Any, error: Any = 0.0) -> Replayed:
    """A result whose computation errs by `error` (a spread), and which is rounded once."""
    array = widened(np.asarray(value))
    spread = np.broadcast_to(together(storing(operation, array), np.asarray(error)), array.shape)
    return Replayed(array, spread, f"{operation.canonical} {operation.dtype}")


def accumulated(operation: Operation, value: Floats, squares: Floats, length: int) -> Floats:
    """Spread of a sum of `length` terms of squared sum `squares`: its partial sums are a random
    walk with the drift `value`."""
    spread: Floats = roundoff(operation) * np.sqrt(random_walk(length, squares, np.abs(value)))
    return spread


# ---- element by element -------------------------------------------------------------------------


@formula("add", "sub")
def _add(operation: Operation) -> Replayed | None:
    a, b = operands(operation)
    alpha = float(argument(operation, "alpha", default=1))
    if operation.op.startswith("aten.rsub"):
        a, b = b, a
    second = np.multiply(b, alpha if operation.canonical == "add" else -alpha)
    error = ROUNDING * roundoff(operation) * np.abs(second) if alpha != 1 else 0.0
    return rounded(operation, np.add(a, second), error)


@formula("mul")
def _mul(operation: Operation) -> Replayed | None:
    a, b = operands(operation)
    value = np.multiply(a, b)
    # Each part of a complex product is made of two, which are rounded as well.
    error = ROUNDING * roundoff(operation) * np.abs(value) if np.iscomplexobj(value) else 0.0
    return rounded(operation, value, error)


@formula("div")
def _div(operation: Operation) -> Replayed | None:
    if argument(operation, "rounding_mode"):
        return None
    a, b = operands(operation)
    value = np.divide(a, b)
    # A kernel may multiply by the reciprocal, which is rounded as well.
    times = FUNCTION if np.iscomplexobj(value) else ROUNDING
    return rounded(operation, value, times * roundoff(operation) * np.abs(value))


@formula("pow")
def _pow(operation: Operation) -> Replayed | None:
    base, exponent = operands(operation)
    value = np.power(np.asarray(base, np.float64), exponent)
    return rounded(operation, value, FUNCTION * roundoff(operation) * np.abs(value))


@formula("maximum")
def _maximum(operation: Operation) -> Replayed | None:
    return rounded(operation, np.maximum(*operands(operation)))  # of a number, perhaps


@formula("minimum")
def _minimum(operation: Operation) -> Replayed | None:
    return rounded(operation, np.minimum(*operands(operation)))


@formula("where")
def _where(operation: Operation) -> Replayed | None:
    found = operands(operation)
    if operation.op.startswith("aten.masked_fill"):
        data, mask, value = found if len(found) == 3 else (*found, operation.args["value"])
        return exact(operation, np.where(mask, value, data))
    return exact(operation, np.where(*found))


@formula("clamp")
def _clamp(operation: Operation) -> Replayed | None:
    data = widen(operation.inputs[0])
    if len(operation.inputs) > 1 or len(operation.operands) > 1:
        low, high = (*operands(operation)[1:], None)[:2]
        if "clamp_max" in operation.op:
            low, high = None, low
    else:
        low, high = argument(operation, "min", "a_min"), argument(operation, "max", "a_max")
    return exact(operation, np.clip(data, low, high))


@formula("lerp")
def _lerp(operation: Operation) -> Replayed | None:
    """`a + w (b - a)`, or from b where w is above one half."""
    found = operands(operation)
    a, b, weight = found if len(found) == 3 else (*found, operation.args["weight"])
    step = np.multiply(weight, b - a)
    scale = np.abs(step) + np.abs(a) * roundoff(operation)
    return rounded(operation, a + step, 2 * ROUNDING * roundoff(operation) * scale)


@formula("addcmul", "addcdiv")
def _addc(operation: Operation) -> Replayed | None:
    """`a + value b c`, `a + value b / c`."""
    a, b, c, *rest = operands(operation)
    scale = float(rest[0] if rest else argument(operation, "value", default=1))
    step = scale * (b * c if operation.canonical == "addcmul" else b / c)
    return rounded(operation, a + step, 2 * ROUNDING * roundoff(operation) * np.abs(step))


_EXACT: Final[Mapping[str, Callable[[Any], Any]]] = {
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "relu": lambda x: np.maximum(x, 0),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    **dict.fromkeys(("copy", "detach", ALIAS, "identity"), lambda x: x),
}
_FUNCTIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **{name: getattr(np, name) for name in ("exp", "exp2", "expm1", "log", "log2", "log10")},
    **{name: getattr(np, name) for name in ("log1p", "sqrt", "square", "tanh", "sinh", "cosh")},
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
}
_erf: Final = np.vectorize(math.erf, otypes=[np.float64])


@formula(*_EXACT)
def _unary_exact(operation: Operation) -> Replayed | None:
    if operation.canonical == ALIAS and len(operation.inputs) > 1:
        return None  # a part of it was written to, which is not known
    data = widen(operation.inputs[0])
    value = _EXACT[operation.canonical](data)
    if np.iscomplexobj(data) and operation.canonical == "abs":  # a root
        return rounded(operation, value, FUNCTION * roundoff(operation) * value)
    return exact(operation, value)


@formula(*_FUNCTIONS)
def _unary(operation: Operation) -> Replayed | None:
    value = _FUNCTIONS[operation.canonical](widen(operation.inputs[0]))
    return rounded(operation, value, FUNCTION * roundoff(operation) * np.abs(value))


@formula("sin", "cos")
def _trigonometric(operation: Operation) -> Replayed | None:
    """Reducing a large angle in float32 costs an absolute error."""
    data = widen(operation.inputs[0])
    value = np.sin(data) if operation.canonical == "sin" else np.cos(data)
    return rounded(operation, value, FUNCTION * roundoff(operation))


@formula("erf")
def _error_function(operation: Operation) -> Replayed | None:
    """Polynomials in place of it (MLX) err by as much where it is small."""
    return rounded(operation, _erf(widen(operation.inputs[0])), FUNCTION * roundoff(operation))


def sigmoid_of(x: Floats) -> Floats:
    small = np.exp(-np.abs(x))
    result: Floats = np.where(x >= 0, 1.0, small) / (1 + small)
    return result


@formula("sigmoid", "silu")
def _sigmoid(operation: Operation) -> Replayed | None:
    data = widen(operation.inputs[0])
    value = sigmoid_of(data) * (data if operation.canonical == "silu" else 1.0)
    error = FUNCTION * roundoff(operation) * (1 + np.abs(data) / 2) * np.abs(value)
    return rounded(operation, value, error)


def is_tanh_gelu(operation: Operation) -> bool:
    named = operation.op == "mlx.gelu_approx"
    return named or argument(operation, "approximate", default="none") == "tanh"


@formula("swiglu")
def _swiglu(operation: Operation) -> Replayed | None:
    """`silu(gate) x`. Shazeer, "GLU variants improve transformer", 2020."""
    gate, x = (widen(array) for array in operation.inputs)
    value = sigmoid_of(gate) * gate * x
    error = (FUNCTION + 2) * roundoff(operation) * (1 + np.abs(gate) / 2) * np.abs(value)
    return rounded(operation, value, error)


@formula("gelu")
def _gelu(operation: Operation) -> Replayed | None:
    """`x Phi(x)`; for negative x, 1 + erf cancels, so the error is relative to `|x|`."""
    data = widen(operation.inputs[0])
    if is_tanh_gelu(operation):
        inner = np.tanh(math.sqrt(2 / math.pi) * (data + 0.044715 * data**3))
    else:
        inner = _erf(data / math.sqrt(2))
    error = FUNCTION * roundoff(operation) * np.abs(data)
    return rounded(operation, 0.5 * data * (1 + inner), error)


# ---- products -----------------------------------------------------------------------------------


def product(operation: Operation, a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """`a @ b` and the spread of its accumulation."""
    value = np.matmul(a, b)
    length = a.shape[-1] * (2 if np.iscomplexobj(value) else 1)
    return value, accumulated(operation, value, np.matmul(squared(a), squared(b)), length)


def squared(x: Any) -> Floats:
    """Squared sizes of numbers."""
    result: Floats = np.square(np.abs(x) if np.iscomplexobj(x) else x)
    return result


@formula("matmul")
def _matmul(operation: Operation) -> Replayed | None:
    found = [widen(array) for array in operation.inputs]
    if operation.op.startswith("aten.linear"):
        value, spread = product(operation, found[0], found[1].T)
        return rounded(operation, value + (found[2] if len(found) > 2 else 0.0), spread)
    return rounded(operation, *product(operation, *found))


@formula("addmm")
def _addmm(operation: Operation) -> Replayed | None:
    """`beta c + alpha a b`."""
    added, a, b = (widen(array) for array in operation.inputs)
    alpha, beta = (float(argument(operation, name, default=1)) for name in ("alpha", "beta"))
    value, spread = product(operation, a, b)
    between = ROUNDING * roundoff(operation) * np.abs(value)
    return rounded(operation, beta * added + alpha * value, abs(alpha) * together(spread, between))
