"""Float64 formulas of operations, against values worked out by hand or by another route."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tracediff.replayers.reference_catalogue import operations
from tracediff.replayers.reference_replayer import Replayer
from tracediff.replaying import Operation, Replayed

Array = NDArray[Any]


def run(canonical: str, *inputs: Array, shape: tuple[int, ...], **facts: Any) -> Replayed:
    found = Replayer().recompute(
        Operation(canonical=canonical, inputs=inputs, shape=shape, **facts)
    )
    assert found is not None
    assert found.value.shape == found.spread.shape == shape
    return found


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_numbers_take_the_place_of_tensors() -> None:
    x = np.array([1.0, 4.0], np.float32)
    assert run("mul", x, operands=(None, 2.5), shape=(2,)).value.tolist() == [2.5, 10.0]
    assert run("sub", x, operands=(1.0, None), shape=(2,)).value.tolist() == [0.0, -3.0]
    assert run("pow", x, operands=(None, 0.5), shape=(2,)).value.tolist() == [1.0, 2.0]
    scaled = run("add", x, x, args={"alpha": 3}, shape=(2,))
    assert scaled.value.tolist() == [4.0, 16.0]
    reversed_ = run("sub", x, operands=(None, 10.0), op="aten.rsub.Scalar", shape=(2,))
    assert reversed_.value.tolist() == [9.0, 6.0]


def test_addcdiv_as_adam_uses_it() -> None:
    p, m, v = (np.array([value], np.float32) for value in (1.0, 0.5, 2.0))
    found = run("addcdiv", p, m, v, operands=(None, None, None, -0.1), shape=(1,))
    assert found.value[0] == pytest.approx(1 - 0.1 * 0.5 / 2)


@pytest.mark.parametrize("canonical", sorted({"softmax", "log_softmax", "sum", "mean", "norm"}))
def test_reductions_by_another_route(canonical: str) -> None:
    x = floats(3, 5).astype(np.float64)
    e = np.exp(x)
    expected = {
        "softmax": e / e.sum(-1, keepdims=True),
        "log_softmax": np.log(e / e.sum(-1, keepdims=True)),
        "sum": x @ np.ones(5),
        "mean": x @ np.full(5, 0.2),
        "norm": np.sqrt(np.diag(x @ x.T)),
    }[canonical]
    found = run(canonical, floats(3, 5), args={"dim": [-1]}, shape=expected.shape)
    np.testing.assert_allclose(found.value, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("canonical", "values"),
    [
        ("silu_backward", lambda x: x / (1 + np.exp(-x))),
        ("sigmoid_backward", lambda x: 1 / (1 + np.exp(-x))),
        ("tanh_backward", np.tanh),
        ("softmax_backward", lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
        ("log_softmax_backward", lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))),
    ],
)
def test_gradients_are_differences_of_the_function(canonical: str, values: Any) -> None:
    x, grad = floats(2, 4).astype(np.float64), floats(2, 4, seed=1).astype(np.float64)
    step = 1e-6
    numeric = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        numeric[place] = ((values(up) - values(down)) / (2 * step) * grad).sum()
    saved = x if canonical == "silu_backward" else values(x)
    found = run(canonical, grad, saved, args={"dim": -1}, shape=x.shape, dtype="float64")
    np.testing.assert_allclose(found.value, numeric, rtol=1e-6, atol=1e-8)


def test_layer_norm_backward_is_the_difference_of_layer_norm() -> None:
    x, grad = floats(3, 6).astype(np.float64), floats(3, 6, seed=1).astype(np.float64)
    weight = floats(6, seed=2).astype(np.float64)

    def forward(x: Array) -> Array:
        mean = x.mean(-1, keepdims=True)
        return np.asarray((x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5))

    step, numeric = 1e-6, np.zeros_like(x)
    for place in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        numeric[place] = (weight * (forward(up) - forward(down)) / (2 * step) * grad).sum()
    mean = x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    inputs = grad, x, mean, scale, weight
    args = {"normalized_shape": [6]}
    found = run("layer_norm_backward", *inputs, args=args, shape=x.shape, dtype="float64")
    np.testing.assert_allclose(found.value, numeric, rtol=1e-5, atol=1e-7)
    of_weight = run("layer_norm_backward", *inputs, args=args, output=1, shape=(6,))
    np.testing.assert_allclose(of_weight.value, (grad * forward(x)).sum(0), rtol=1e-9)


def test_attention_of_two_keys_by_hand() -> None:
    q = np.array([[[[1.0], [2.0]]]], np.float32)
    k = np.array([[[[0.0], [math.log(3.0)]]]], np.float32)
    v = np.array([[[[1.0], [5.0]]]], np.float32)
    found = run("attention", q, k, v, args={"scale": 1.0, "is_causal": True}, shape=(1, 1, 2, 1))
    # Query 0 sees key 0 alone; query 1 weighs the keys by 1 and exp(2 log 3) = 9.
    np.testing.assert_allclose(found.value.ravel(), [1.0, (1 + 9 * 5) / 10], rtol=1e-6)


def test_causal_masks_are_aligned_as_each_stack_does() -> None:
    q, k = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 2, 1), np.float32)
    v = np.array([[[[1.0], [3.0]]]], np.float32)
    top_left = run("attention", q, k, v, args={"is_causal": True}, shape=(1, 1, 1, 1))
    lower_right = run("attention", q, k, v, args={"mask": "causal"}, shape=(1, 1, 1, 1))
    assert (top_left.value.item(), lower_right.value.item()) == (1.0, 2.0)


def test_attention_shares_key_heads() -> None:
    q, k, v = floats(1, 4, 3, 8), floats(1, 2, 3, 8, seed=1), floats(1, 2, 3, 8, seed=2)
    whole = run("attention", q, k, v, shape=(1, 4, 3, 8)).value
    for head in range(4):
        key = slice(head // 2, head // 2 + 1)
        own = q[:, head : head + 1], k[:, key], v[:, key]
        alone = run("attention", *own, shape=(1, 1, 3, 8)).value
        np.testing.assert_allclose(whole[:, head : head + 1], alone, rtol=1e-12)


def test_rows_go_to_their_expert() -> None:
    rows, matrices = floats(5, 3), floats(2, 3, 4, seed=1)
    ends = np.array([2, 5], np.int32)
    found = run("gather_matmul", rows, matrices, ends, op="aten._grouped_mm.default", shape=(5, 4))
    expected = np.vstack(
        [rows[:2].astype(float) @ matrices[0], rows[2:].astype(float) @ matrices[1]]
    )
    np.testing.assert_allclose(found.value, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("canonical", "facts", "expected"),
    [
        ("transpose", {"args": {"dim0": 0, "dim1": 1}}, lambda x: x.swapaxes(0, 1)),
        ("transpose", {"args": {"axis1": -1, "axis2": -2}}, lambda x: x.swapaxes(1, 2)),
        ("transpose", {"args": {"dims": [2, 0, 1]}}, lambda x: x.transpose(2, 0, 1)),
        ("slice", {"op": "aten.slice.Tensor", "args": {"dim": 1, "start": 1}}, lambda x: x[:, 1:]),
        (
            "slice",
            {"op": "mlx.getitem", "args": {"arg1": ["Ellipsis", "slice(None, -1, None)"]}},
            lambda x: x[..., :-1],
        ),
        ("select", {"args": {"dim": 2, "index": 1}}, lambda x: x[:, :, 1]),
        ("expand", {}, lambda x: np.broadcast_to(x, (5, *x.shape))),
    ],
)
def test_layouts_are_exact(canonical: str, facts: dict[str, Any], expected: Any) -> None:
    x = floats(2, 3, 4)
    wanted = expected(x)
    found = run(canonical, x, shape=wanted.shape, **facts)
    assert np.array_equal(found.value, wanted)
    assert not found.spread.any()


def test_a_histogram_and_a_scatter_by_hand() -> None:
    counted = run(
        "histc",
        np.array([0, 1, 1, 3, 7], np.float32),
        args={"bins": 4, "min": 0, "max": 3},
        shape=(4,),
    )
    assert counted.value.tolist() == [1, 2, 0, 1]
    placed = run(
        "scatter",
        np.zeros((2, 3), np.float32),
        np.array([[2, 0], [1, 2]]),
        np.array([[5, 6], [7, 8]], np.float32),
        op="aten.scatter.src",
        args={"dim": 1},
        shape=(2, 3),
    )
    assert placed.value.tolist() == [[6, 0, 5], [0, 7, 8]]


def test_every_formula_refuses_arguments_that_it_does_not_know() -> None:
    for canonical in operations.FORMULAS:
        assert Replayer().recompute(
            Operation(canonical=canonical, inputs=(), shape=(7,))
        ) is None or (canonical in ("zeros", "ones"))


@pytest.mark.parametrize("length", [16, 256, 4096])
def test_a_product_in_float32_stays_within_its_spread_and_a_fault_does_not(length: int) -> None:
    a, b = floats(8, length), floats(length, 8, seed=1)
    found = run("matmul", a, b, shape=(8, 8))
    error = np.abs((a @ b).astype(np.float64) - found.value)
    assert (error <= 6 * found.spread).all()
    fault = np.abs((a @ b) * (1 + 1e-4) - found.value)
    assert (fault > 6 * found.spread).any()
