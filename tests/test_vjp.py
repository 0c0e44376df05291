"""Vector-Jacobian products of operations, against differences of their forward formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tracediff.replayers.reference_catalogue import vjp
from tracediff.replayers.reference_replayer import Replayer
from tracediff.replaying import Operation, Use

Array = NDArray[Any]
Case = tuple[str, tuple[Array, ...], dict[str, Any]]


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def positive(*shape: int, seed: int = 0) -> Array:
    return np.abs(floats(*shape, seed=seed)) + 0.5


IDS = np.array([[0, 2], [2, 1]])
AXIS = {"args": {"axis": -1}}
X, ROW = floats(3, 4), floats(4, seed=1)
HEADS = floats(1, 4, 5, 6), floats(1, 2, 5, 6, seed=1), floats(1, 2, 5, 6, seed=2)
CAUSAL = {"scale": 0.4, "mask": "causal"}

CASES: dict[str, Case] = {
    "add, broadcast": ("add", (X, ROW), {}),
    "sub from a number": ("sub", (X,), {"operands": (2.0, None)}),
    "sub, broadcast": ("sub", (X, floats(3, 1, seed=2)), {}),
    "mul, broadcast": ("mul", (X, ROW), {}),
    "mul by a number": ("mul", (X,), {"operands": (None, 3.0)}),
    "div, broadcast": ("div", (X, positive(4)), {}),
    "number over": ("div", (positive(3, 4),), {"operands": (2.0, None)}),
    "pow": ("pow", (positive(3, 4), ROW), {}),
    "pow, number": ("pow", (positive(3, 4),), {"operands": (None, 3.0)}),
    "maximum": ("maximum", (X, floats(3, 4, seed=5)), {}),
    "minimum": ("minimum", (X, ROW), {}),
    "where": ("where", (X > 0, X, ROW), {}),
    "clamp": ("clamp", (X,), {"args": {"a_min": -0.4, "a_max": 0.4}}),
    **{
        name: (name, (positive(3, 4),), {})
        for name in ("sqrt", "rsqrt", "reciprocal", "log", "log2", "log10", "log1p")
    },
    **{
        name: (name, (X,), {})
        for name in (
            *("neg", "abs", "square", "exp", "exp2", "expm1", "sin", "cos", "tanh", "sinh"),
            *("cosh", "erf", "sigmoid", "relu", "silu", "gelu", "copy", "cast"),
        )
    },
    "gelu, tanh": ("gelu", (X,), {"op": "mlx.gelu_approx"}),
    "swiglu": ("swiglu", (X, floats(3, 4, seed=3)), {}),
    "matmul": ("matmul", (X, floats(4, 2, seed=1)), {}),
    "matmul, rows": ("matmul", (floats(2, 3, 4), floats(4, 2, seed=1)), {}),
    "matmul, batches": ("matmul", (floats(2, 3, 4), floats(2, 4, 2, seed=1)), {}),
    "matmul, one batch for all": ("matmul", (floats(2, 1, 3, 4), floats(2, 4, 2, seed=1)), {}),
    "matmul, vector left": ("matmul", (ROW, floats(4, 2, seed=1)), {}),
    "matmul, vector right": ("matmul", (X, ROW), {}),
    "matmul, vectors": ("matmul", (ROW, floats(4, seed=2)), {}),
    "addmm": ("addmm", (floats(2), X, floats(4, 2, seed=1)), {"args": {"alpha": 0.5, "beta": 2}}),
    "gather_matmul": (
        *("gather_matmul", (floats(3, 1, 1, 4), floats(5, 4, 2, seed=1), IDS[[0, 1, 0]])),
        {"op": "mlx.gather_mm"},
    ),
    "sum": ("sum", (X,), AXIS),
    "sum of all": ("sum", (X,), {}),
    "mean": ("mean", (X,), {"args": {"axis": 0, "keepdims": True}}),
    "max": ("max", (X,), AXIS),
    "norm": ("norm", (X,), AXIS),
    "cumsum": ("cumsum", (X,), {"args": {"axis": 1}}),
    "softmax": ("softmax", (X,), AXIS),
    "log_softmax": ("log_softmax", (X,), AXIS),
    "logsumexp": ("logsumexp", (X,), AXIS),
    "rms_norm": ("rms_norm", (X, ROW), {"args": {"eps": 1e-5}}),
    "layer_norm": ("layer_norm", (X, ROW, floats(4, seed=7)), {"args": {"eps": 1e-5}}),
    "rope": ("rope", (floats(2, 3, 4),), {"args": {"dims": 4, "base": 100.0, "offset": 2}}),
    "attention, shared heads": ("attention", HEADS, {"args": {"scale": 0.4}}),
    "attention, causal": ("attention", HEADS, {"args": CAUSAL}),
    "attention, mask": ("attention", (*HEADS, np.tri(5, dtype=bool)), {"args": {"scale": 0.4}}),
    "reshape": ("reshape", (X,), {"shape": (2, 6)}),
    "expand": ("expand", (ROW,), {"shape": (3, 4)}),
    "transpose": ("transpose", (floats(2, 3, 4),), {"args": {"axes": [2, 0, 1]}}),
    "concatenate": ("concatenate", (X, floats(2, 4, seed=1)), {"args": {"axis": 0}}),
    "concatenate, twice the same": ("concatenate", (X, X), {"args": {"axis": 0}}),
    "stack": ("stack", (X, floats(3, 4, seed=1)), {}),
    "slice": (
        *("slice", (X,)),
        {"op": "mlx.getitem", "args": {"arg1": ["slice(None, -1, None)", "slice(1, None, 2)"]}},
    ),
    "slice_update": (
        *("slice_update", (X, ROW)),
        {"op": "mlx.setitem", "args": {"arg1": "slice(1, 2, None)"}},
    ),
    "slice_update, number": (
        *("slice_update", (X,)),
        {"op": "mlx.setitem", "args": {"arg1": 1, "arg2": 7.0}},
    ),
    "embedding": ("embedding", (X, IDS), {}),
    "take": ("take", (X, IDS[0]), {"args": {"axis": 1}}),
    "take_along_axis": ("take_along_axis", (X, np.array([[1], [1], [3]])), AXIS),
    "tril": ("tril", (X,), {}),
    "repeat": ("repeat", (X,), {"op": "mlx.repeat", "args": {"repeats": 2, "axis": 0}}),
    "nll_loss": ("nll_loss", (X, np.array([1, -100, 3])), {"outputs": 2}),
}


def operation(case: Case, inputs: tuple[Array, ...]) -> Operation:
    canonical, _, facts = case
    facts = {"dtype": "float64", "shape": (), **facts}
    return Operation(canonical=canonical, inputs=inputs, **facts)


def value_of(case: Case, inputs: tuple[Array, ...]) -> Array:
    """The forward formula, of whatever shape it gives."""
    from tracediff.replayers.reference_catalogue import operations

    found = operations.FORMULAS[case[0]](operation(case, inputs))
    assert found is not None
    return found.value


@pytest.mark.parametrize("name", CASES)
def test_a_pulled_back_gradient_is_the_difference_of_the_function(name: str) -> None:
    """`sum(g (f(x + h d) - f(x - h d))) / 2h = sum(d dx)` for a random direction d."""
    case = CASES[name]
    inputs = case[1]
    grad = floats(*value_of(case, inputs).shape, seed=8)
    for place, x in enumerate(inputs):
        if x.dtype.kind != "f":
            continue
        direction, step = floats(*x.shape, seed=9), 1e-6
        ends = [
            value_of(case, (*inputs[:place], x + sign * step * direction, *inputs[place + 1 :]))
            for sign in (1, -1)
        ]
        expected = float((grad * (ends[0] - ends[1])).sum() / (2 * step))
        use = Use(operation=operation(case, inputs), place=place, cotangents=(grad,))
        found = Replayer().pull_back([use], "float64")
        assert found is not None
        assert found.value.shape == found.spread.shape == x.shape
        assert float((found.value * direction).sum()) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_every_rule_is_tried() -> None:
    assert set(vjp.RULES) - {case[0] for case in CASES.values()} <= {
        *("logaddexp", "softplus", "detach", "min", "identity", "alias")  # no forward formula
    }


def test_the_parts_of_a_split_come_back_together() -> None:
    x = floats(2, 6)
    grads = (np.ones((2, 2)), None, np.full((2, 2), 3.0))
    split = Operation(
        canonical="split", inputs=(x,), args={"indices_or_sections": 3, "axis": -1}, outputs=3
    )
    found = Replayer().pull_back([Use(operation=split, place=0, cotangents=grads)], "float32")
    assert found is not None
    assert found.value.tolist() == [[1, 1, 0, 0, 3, 3]] * 2


def test_uses_add_up_and_stopped_gradients_do_not() -> None:
    x = floats(3).astype(np.float32)
    uses = [
        Use(operation=Operation(canonical=name, inputs=(x,)), place=0, cotangents=(np.ones(3),))
        for name in ("neg", "detach", "square")
    ]
    found = Replayer().pull_back(uses, "float32")
    assert found is not None
    np.testing.assert_allclose(found.value, 2 * x.astype(np.float64) - 1)
    assert (found.spread > 0).all()


def test_a_rule_that_is_not_there_says_so() -> None:
    x = floats(3)
    use = Use(operation=Operation(canonical="fft", inputs=(x,)), place=0, cotangents=(x,))
    assert Replayer().pull_back([use], "float32") is None
