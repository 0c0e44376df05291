"""Operations of MLX: what is recorded of functions small enough to work out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402

from tests.mlx_jobs import (  # noqa: E402
    Recording,
    batches,
    fine_tune,
    llama,
    next_token_loss,
    recorder_into,
    recording,
)
from tests.op_traces import names, operations, sources  # noqa: E402
from tracediff.events import Run  # noqa: E402
from tracediff.recorders.mlx_recorder import Recorder  # noqa: E402
from tracediff.recording import Policy, Tape, attached  # noqa: E402
from tracediff.trace import TraceWriter  # noqa: E402


class Function(nn.Module):
    """A function of x and one parameter, as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = mx.ones(3)

    def __call__(self, x: Any) -> Any:
        return self.function(x, self.weight)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recording]:
    return recorder_into(tmp_path)


X = np.arange(6, dtype=np.float32).reshape(2, 3) - 2


def forward(record: Callable[..., Recording], function: Callable[..., Any]) -> Recording:
    model = Function(function)
    return record(lambda: model(mx.array(X)), "op")


def differentiated(record: Callable[..., Recording], function: Callable[..., Any]) -> Recording:
    model = Function(function)
    step = nn.value_and_grad(model, lambda model, x: model(x).sum())
    return record(lambda: step(model, mx.array(X)), "op")


def test_a_product_and_a_sum(record: Callable[..., Recording]) -> None:
    trace = forward(record, lambda x, w: x @ mx.diag(w) + w)
    diagonal, product, total = operations(trace)
    assert [e.op for e in (diagonal, product, total)] == ["mlx.diag", "mlx.matmul", "mlx.add"]
    assert sources(trace, product) == ["x", "diag"]
    assert sources(trace, total) == ["matmul", "weight"]
    assert str(total.site) == "0/forward/root@add#0:out"
    assert total.source.startswith("test_record_operations_mlx.py:")
    np.testing.assert_array_equal(trace.trace.array(total), X + 1)


def test_operators_methods_and_functions_are_one(record: Callable[..., Recording]) -> None:
    def function(x: Any, w: Any) -> Any:
        return mx.subtract(2.0, x), 2.0 - x, x.sum(axis=0), mx.sum(x, 0), x.T, x[0], -x

    trace = forward(record, function)
    assert names(trace) == ["sub", "sub", "sum", "sum", "transpose", "slice", "neg"]
    first, second, by_method, by_function, *_ = operations(trace)
    assert first.attributes["operands"] == second.attributes["operands"] == [2.0, None]
    assert first.digest == second.digest
    assert by_method.attributes["args"] == by_function.attributes["args"] == {"axis": 0}
    assert len({event.inputs for event in operations(trace)}) == 1


def test_a_fused_norm(record: Callable[..., Recording]) -> None:
    trace = forward(record, lambda x, w: mx.fast.rms_norm(x, w, 1e-6))
    (norm,) = operations(trace)
    assert (norm.op, norm.attributes["args"]) == ("mlx.fast.rms_norm", {"eps": 1e-6})
    assert sources(trace, norm) == ["x", "weight"]


def test_an_operation_in_place_is_what_is_read_afterwards(
    record: Callable[..., Recording],
) -> None:
    def function(x: Any, w: Any) -> Any:
        y = x * w
        y += 1
        y[0] = 0
        return y * 2

    trace = forward(record, function)
    product, added, replaced, out = operations(trace)
    assert added.attributes["inplace"] == product.order
    assert replaced.attributes["inplace"] == added.order
    assert replaced.attributes["canonical"] == "slice_update"
    assert out.inputs == (replaced.order,)
    np.testing.assert_array_equal(trace.trace.array(product), X)
    expected = X + 1
    expected[0] = 0
    np.testing.assert_array_equal(trace.trace.array(replaced), expected)


def test_a_cast_to_the_same_dtype_is_no_operation(record: Callable[..., Recording]) -> None:
    trace = forward(record, lambda x, w: x.astype(mx.float32).astype(mx.float16) * 2)
    assert names(trace) == ["cast", "mul"]
    assert operations(trace)[0].attributes["args"] == {"dtype": "float16"}


def test_drawing(record: Callable[..., Recording]) -> None:
    trace = forward(record, lambda x, w: mx.random.bernoulli(0.5, x.shape) * x)
    assert [e.attributes.get("rng") for e in operations(trace)] == [True, None]


def test_the_gradient_of_a_product(record: Callable[..., Recording]) -> None:
    trace = differentiated(record, lambda x, w: (x * w) * 3)
    product, tripled = operations(trace, "forward")
    total = operations(trace, "loss")[0]
    grads = {e.attributes["forward_order"]: e for e in operations(trace, "backward")}
    leaves = {
        e.attributes["name"]: e for e in operations(trace, leaves=True) if "name" in e.attributes
    }
    assert set(grads) == {product.order, tripled.order, total.order, leaves["weight"].order}
    assert str(grads[product.order].site) == "0/backward/root@mul#0:grad_out"
    np.testing.assert_array_equal(trace.trace.array(grads[product.order]), np.full((2, 3), 3))
    np.testing.assert_array_equal(trace.trace.array(grads[leaves["weight"].order]), 3 * X.sum(0))
    # d(xw) comes from d(3xw), and d(w) from d(xw) and from x.
    assert grads[tripled.order].order in grads[product.order].inputs
    assert {grads[product.order].order, leaves["x"].order} <= set(
        grads[leaves["weight"].order].inputs
    )


def test_a_gradient_sums_over_all_users(record: Callable[..., Recording]) -> None:
    def function(x: Any, w: Any) -> Any:
        y = x * w
        return mx.sin(y) + mx.cos(y)

    trace = differentiated(record, function)
    product = operations(trace, "forward")[0]
    grad = next(
        e for e in operations(trace, "backward") if e.attributes["forward_order"] == product.order
    )
    np.testing.assert_allclose(trace.trace.array(grad), np.cos(X) - np.sin(X), rtol=1e-5, atol=1e-6)


def test_an_update_by_adamw(record: Callable[..., Recording]) -> None:
    model = nn.Linear(3, 1)
    optimizer = optim.AdamW(0.1)
    step = nn.value_and_grad(model, lambda model, x: model(x).sum())

    def job() -> None:
        for _ in range(2):
            _, grads = step(model, mx.array(X))
            optimizer.update(model, grads)
            mx.eval(model.parameters(), optimizer.state)

    trace = record(job, "op")
    for name in ("weight", "bias"):
        events = [
            e
            for e in operations(trace, "optimizer")
            if e.site.step == 1 and e.site.path.startswith(f"{name}@")
        ]
        # Decay (1 operation), both moments (3 and 4), step (lr m, sqrt, + eps, /), difference.
        assert Counter(e.attributes["canonical"] for e in events) == {
            "mul": 6,
            "add": 3,
            "square": 1,
            "sqrt": 1,
            "div": 1,
            "sub": 1,
        }
        np.testing.assert_array_equal(
            trace.trace.array(events[-1]), trace[f"1/optimizer/{name}:param"]
        )
        used = {each for event in events for each in sources(trace, event)}
        assert f"{name}:state.exp_avg" in used
    grads = {e.order for e in operations(trace, "backward")}
    assert any(grads & set(e.inputs) for e in operations(trace, "optimizer"))


def test_recording_changes_no_bit(tmp_path: Path) -> None:
    mx.random.seed(0)
    losses, weights = fine_tune()
    mx.random.seed(0)
    with recording(tmp_path / "run", "op"):
        recorded_losses, recorded = fine_tune()
    assert losses == recorded_losses
    assert all(np.array_equal(a, b) for a, b in zip(weights, recorded, strict=True))


LAYER = Counter(
    {
        "rms_norm": 2,
        "rope": 2,
        "attention": 1,
        "matmul": 7,
        "add": 2,
        "swiglu": 1,
        "reshape": 4,
        "transpose": 4 + 7,
    }
)
"""Operations of one layer of mlx-lm's Llama, counted in its source: 7 linear maps, each with the
transpose of its weight; q, k, v and the output reshaped and transposed."""


def test_every_operation_of_a_llama_is_there(record: Callable[..., Recording]) -> None:
    model = llama()
    step = nn.value_and_grad(model, next_token_loss)
    (batch,) = batches(1)
    trace = record(lambda: step(model, *batch), "op")
    for layer in range(2):
        events = [e for e in operations(trace, "forward") if f"layers.{layer}" in e.site.path]
        assert Counter(e.attributes["canonical"] for e in events) == LAYER
    products = {
        e.site.path for e in operations(trace, "forward") if e.attributes["canonical"] == "matmul"
    }
    assert "model.layers.1.mlp.down_proj@matmul" in products
    # Every result is differentiated, but for the maximum that softmax subtracts.
    differentiated = {e.attributes["forward_order"] for e in operations(trace, "backward")}
    floats = [e for e in operations(trace) if e.dtype == "float32" and e.site.phase != "backward"]
    rest = [e.attributes["canonical"] for e in floats if e.order not in differentiated]
    assert set(rest) <= {"max", "detach"}
    norm = next(e for e in operations(trace) if e.op == "mlx.fast.rms_norm")
    assert norm.source.startswith("llama.py:")
    assert norm.attributes["user_line"].startswith("mlx_jobs.py:")


def test_recorded_inputs_give_the_recorded_outputs(record: Callable[..., Recording]) -> None:
    """The graph is right where the operation, run again on its inputs' payloads, gives its own."""
    model = llama()
    optimizer = optim.Adam(0.1)
    step = nn.value_and_grad(model, next_token_loss)
    (batch,) = batches(1)

    def job() -> None:
        _, grads = step(model, *batch)
        optimizer.update(model, grads)

    trace = record(job, "op")
    by_order = {event.order: event for event in trace.events}
    run = {"mul": np.multiply, "add": np.add, "matmul": np.matmul, "sub": np.subtract}
    checked: Counter[str] = Counter()
    for event in operations(trace):
        name = event.attributes["canonical"]
        if name not in run or len(event.inputs) != 2 or event.site.phase == "backward":
            continue
        a, b = (trace.trace.array(by_order[order]) for order in event.inputs)
        np.testing.assert_allclose(run[name](a, b), trace.trace.array(event), 1e-5, 1e-6)
        checked[event.site.phase] += 1
    assert checked["forward"] > 15
    assert checked["optimizer"] > 40


# ---- selection ----------------------------------------------------------------------------------


def test_only_one_module(tmp_path: Path) -> None:
    model = llama()
    step = nn.value_and_grad(model, next_token_loss)
    (batch,) = batches(1)
    inside = "model.layers.1.mlp"
    writer = TraceWriter(tmp_path / "run", Run(stack="mlx", level="op"))
    tape = Tape(writer, Policy(level="op", only=inside))
    with tape, attached(Recorder(tape)):
        step(model, *batch)
    trace = Recording(tmp_path / "run")
    paths = {event.site.path.partition("@")[0] for event in operations(trace, leaves=True)}
    assert paths == {f"{inside}{rest}" for rest in ("", ".gate_proj", ".up_proj", ".down_proj")}
    entering = next(e for e in operations(trace, leaves=True) if e.attributes.get("name") == "in")
    np.testing.assert_array_equal(trace.trace.array(entering), trace[f"0/forward/{inside}#0:in"])
    assert {e.site.phase for e in operations(trace)} == {"forward", "backward"}


# ---- transformations ----------------------------------------------------------------------------


def test_what_a_checkpoint_repeats_is_recorded_once(record: Callable[..., Recording]) -> None:
    def inner(x: Any, w: Any) -> Any:
        return mx.tanh(x * w) * 2

    plain = differentiated(record, inner)
    again = differentiated(record, lambda x, w: mx.checkpoint(inner)(x, w))
    assert names(plain, "forward") == names(again, "forward") == ["mul", "tanh", "mul"]
    for trace in (plain, again):
        by_order = {event.order: event for event in operations(trace, leaves=True)}
        of = [by_order[e.attributes["forward_order"]] for e in operations(trace, "backward")]
        found = [e.attributes.get("name") or e.attributes["canonical"] for e in of]
        assert found == ["sum", "mul", "tanh", "mul", "weight"]


def test_a_vectorised_function_is_one_operation(record: Callable[..., Recording]) -> None:
    trace = forward(record, lambda x, w: mx.vmap(lambda row: mx.exp(row) + 1)(x) * w)
    assert names(trace) == ["vmap", "mul"]
    np.testing.assert_allclose(trace.trace.array(operations(trace)[0]), np.exp(X) + 1, rtol=1e-6)


def test_a_compiled_function_without_modules_is_one_operation(
    record: Callable[..., Recording],
) -> None:
    def job() -> None:
        @mx.compile
        def fused(x: Any) -> Any:
            return mx.exp(x) * 3

        model = Function(lambda x, w: fused(x) + w)
        model(mx.array(X))
        model(mx.array(X))

    trace = record(job, "op")
    assert names(trace) == ["fused", "add"] * 2
    assert trace.notes == ()


def test_a_function_compiled_in_one_recording_is_seen_in_the_next(tmp_path: Path) -> None:
    """As those of a library are that was imported while something was recorded."""
    kept: list[Any] = []

    def job() -> None:
        if not kept:
            kept.append(mx.compile(lambda x: mx.exp(x) * 3))
        Function(lambda x, w: kept[0](x) + w)(mx.array(X))

    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
    first, second = (recorder_into(tmp_path / f)(job, "op") for f in ("first", "second"))
    assert names(first) == names(second)
    assert len(names(first)) == 2
    np.testing.assert_allclose(kept[0](mx.array(X)), 3 * np.exp(X), rtol=1e-6)


def test_a_compiled_step_is_seen_inside_from_its_first_call(
    record: Callable[..., Recording],
) -> None:
    model = Function(lambda x, w: x * w)
    step = nn.value_and_grad(model, lambda model, x: model(x).sum())
    calls = []

    def train(x: Any) -> Any:
        calls.append(x)
        return step(model, x)

    def job() -> None:
        mx.compile(train)(mx.array(X))

    trace = record(job, "op")
    assert names(trace, "forward") == ["mul"]
    assert any("ran uncompiled" in note for note in trace.notes)


def test_a_gradient_of_the_users_own(record: Callable[..., Recording]) -> None:
    @mx.custom_function
    def double(x: Any) -> Any:
        return x * 2

    @double.vjp
    def double_vjp(primals: Any, cotangent: Any, output: Any) -> Any:
        return mx.multiply(cotangent, 2)

    trace = differentiated(record, lambda x, w: double(x * w))
    assert names(trace, "forward") == ["mul", "mul"]
    own = [e for e in operations(trace, "backward") if "forward_order" not in e.attributes]
    assert [e.op for e in own] == ["mlx.multiply"]


def test_arguments_of_compiled_functions_have_their_names(
    record: Callable[..., Recording],
) -> None:
    found = forward(record, lambda x, weight: nn.leaky_relu(nn.log_softmax(x, -1), 0.2) * weight)
    args = {e.op: e.attributes.get("args") for e in operations(found)}
    assert args["mlx.log_softmax"] == {"axis": -1}
    assert args["mlx.leaky_relu"] == {"negative_slope": 0.2}
