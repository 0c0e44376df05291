"""Steps, calls and roots of MLX runs, and what each optimizer leaves in the trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_jobs import (
    Recording,
    TwoLayers,
    batches,
    llama,
    next_token_loss,
    recorder_into,
    recording,
    two_layers,
    weights,
)

X = mx.array(np.random.default_rng(1).normal(size=(4, 2, 3)), mx.float32)
Y = mx.array(np.random.default_rng(2).normal(size=(4, 2, 1)), mx.float32)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recording]:
    return recorder_into(tmp_path)


def regression(model: Any, x: mx.array, y: mx.array) -> mx.array:
    return nn.losses.mse_loss(model(x), y)


# ---- steps, calls and roots ---------------------------------------------------------------------


def test_gradient_accumulation_is_one_step_with_a_call_per_micro_batch(
    record: Callable[..., Recording],
) -> None:
    model, optimizer = llama(), optim.SGD(0.5)
    total: list[Any] = []

    def job() -> None:
        step, grads = nn.value_and_grad(model, next_token_loss), None
        for inputs, targets in batches(3):
            _, new = step(model, inputs, targets)
            grads = new if grads is None else tree_map(mx.add, grads, new)
        total.append(np.array(grads["model"]["norm"]["weight"]))
        optimizer.update(model, grads)

    trace = record(job)
    path = "model.norm.weight"
    parts = [trace[f"0/backward/{path}#{call}:grad"] for call in range(3)]
    np.testing.assert_allclose(sum(parts), total[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(trace[f"0/optimizer/{path}:grad"], total[0])
    assert {e.site.step for e in trace.events} == {0}
    for phase, name in [("forward", "root"), ("loss", "loss"), ("trajectory", "loss")]:
        calls = [e.site.call for e in trace.of(phase) if e.site.path == name]
        assert sorted(set(calls)) == [0, 1, 2]
    ids = [e for e in trace.of("rendering") if e.site.path == "batch.inputs"]
    assert [e.site.call for e in ids] == [0, 1, 2]
    assert trace["0/backward/model.layers.0#2:grad_out"].shape == (2, 5, 16)


def test_two_optimizers_and_two_roots_each_keep_their_names(
    record: Callable[..., Recording],
) -> None:
    first, second = two_layers(), TwoLayers()
    optimizers = optim.Adam(1e-2), optim.SGD(0.1, momentum=0.9)

    def job() -> None:
        for model, optimizer in zip((first, second), optimizers, strict=True):
            _, grads = nn.value_and_grad(model, regression)(model, X[0], Y[0])
            optimizer.update(model, grads)

    trace = record(job)
    assert {e.op for e in trace.of("optimizer", 0)} == {"Adam"}
    assert {e.op for e in trace.of("optimizer", 1)} == {"SGD"}
    assert "0/optimizer/layers.0.weight:state.exp_avg_sq" in trace.sites("optimizer")
    assert "1/optimizer/root[1].layers.0.weight:state.momentum_buffer" in trace.sites("optimizer")
    assert "1/forward/root[1].layers.1#0:out" in trace.sites("forward")
    assert "1/backward/root[1].layers.1.bias#0:grad" in trace.sites("backward")
    weight = trace["1/optimizer/root[1].layers.0.weight:param"]
    np.testing.assert_array_equal(weight, np.array(second.layers[0].weight))


def test_without_an_optimizer_each_call_of_a_model_is_a_step(
    record: Callable[..., Recording],
) -> None:
    model = two_layers()
    trace = record(lambda: [model(x) for x in X])
    assert sorted({e.site.step for e in trace.of("forward")}) == [0, 1, 2, 3]
    np.testing.assert_array_equal(trace["2/forward/root#0:in"], np.array(X[2]))
    assert {e.site.step for e in trace.of("loading")} == {0}


def test_evaluation_is_recorded_apart_and_as_in_and_out_only(
    record: Callable[..., Recording],
) -> None:
    model, optimizer = llama(), optim.SGD(0.1)
    (inputs, targets), *_ = batches(1)
    losses = []

    def job() -> None:
        _, grads = nn.value_and_grad(model, next_token_loss)(model, inputs, targets)
        optimizer.update(model, grads)
        losses.append(next_token_loss(model, inputs, targets).item())

    trace = record(job)
    assert {e.site.path for e in trace.of("trajectory", 1)} == {"root", "eval.cross_entropy"}
    assert trace["1/trajectory/eval.cross_entropy#0:out"] == losses[0]
    assert trace.sites("rendering", 1) == ["1/rendering/eval_batch.inputs"]
    assert not trace.of("forward", 1) + trace.of("loss", 1) + trace.of("rng", 1)


def test_a_known_root_inside_a_new_one_and_a_submodule_called_directly(
    record: Callable[..., Recording],
) -> None:
    model = llama()
    ids = mx.array([[1, 2]])

    def job() -> None:
        model.model(ids)
        model(ids)
        model.model.norm(mx.ones((1, 2, 16)))
        nn.Dropout()(X)

    trace = record(job)
    assert "0/forward/layers.0#0:out" in trace.sites("forward")
    assert "1/forward/model.layers.0#0:out" in trace.sites("forward")
    assert "1/forward/model.norm#1:out" in trace.sites("forward")
    assert not any("root[" in str(e.site) for e in trace.events)


def test_exception_inside_a_forward_leaves_the_tape_usable(
    record: Callable[..., Recording],
) -> None:
    model = two_layers()

    def job() -> None:
        step = nn.value_and_grad(model, regression)
        with pytest.raises(ValueError, match="shape"):
            step(model, mx.zeros((2, 5)), Y[0])
        step(model, X[0], Y[0])

    trace = record(job)
    good = "1/forward/layers.0#0:in"
    assert {str(e.site) for e in trace.of("forward", 0)} == {
        *("0/forward/root#0:in", "0/forward/layers.0#0:in")
    }
    (event,) = [e for e in trace.events if str(e.site) == good]
    assert len(event.inputs) == 1  # the root's input of this call, nothing of the failed one
    assert "1/backward/layers.0.weight#0:grad" in trace.sites("backward")


def test_what_was_recorded_before_an_exception_can_be_read(tmp_path: Path) -> None:
    model = two_layers()

    def interrupted() -> None:
        with recording(tmp_path / "t.zarr"):
            model(X[0])
            model(X[1])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    trace = Recording(tmp_path / "t.zarr")
    assert trace.trace.run.status == "failed"
    np.testing.assert_array_equal(trace["0/forward/root#0:in"], np.array(X[0]))


def test_what_a_gradient_computed_before_an_exception_can_be_read(tmp_path: Path) -> None:
    class Broken(TwoLayers):
        def __call__(self, x: mx.array) -> mx.array:
            self.layers[0](x)
            raise ZeroDivisionError

    model = Broken()
    with pytest.raises(ZeroDivisionError), recording(tmp_path / "t.zarr"):
        nn.value_and_grad(model, lambda x: model(x).sum())(X[0])
    trace = Recording(tmp_path / "t.zarr")
    expected = np.array(model.layers[0](X[0]))
    np.testing.assert_array_equal(trace["0/forward/layers.0#0:out"], expected)


# ---- optimizers ---------------------------------------------------------------------------------


OPTIMIZERS: dict[str, tuple[Callable[[], Any], dict[str, Any], list[str]]] = {
    "sgd": (lambda: optim.SGD(0.125), {"lr": 0.125, "momentum": 0.0}, []),
    "momentum": (
        lambda: optim.SGD(0.1, momentum=0.9, nesterov=True),
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        ["state.momentum_buffer"],
    ),
    "adam": (
        lambda: optim.Adam(1e-3, betas=[0.8, 0.95], bias_correction=True),
        {"lr": 1e-3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-8, "bias_correction": True, "step": 1},
        ["state.exp_avg", "state.exp_avg_sq"],
    ),
    "adamw": (
        lambda: optim.AdamW(1e-3, weight_decay=0.25),
        {"weight_decay": 0.25, "bias_correction": False},
        ["state.exp_avg", "state.exp_avg_sq"],
    ),
    "lion": (lambda: optim.Lion(1e-3), {"lr": 1e-3, "beta2": 0.99}, ["state.exp_avg"]),
    "adafactor": (lambda: optim.Adafactor(), {"eps": [1e-30, 1e-3]}, None),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_records_hyper_state_update_and_parameter(
    record: Callable[..., Recording], name: str
) -> None:
    make, hyper, states = OPTIMIZERS[name]
    model, optimizer = two_layers(), make()
    before = weights(model)

    def job() -> None:
        _, grads = nn.value_and_grad(model, regression)(model, X[0], Y[0])
        optimizer.update(model, grads)

    trace = record(job)
    path = "0/optimizer/layers.0.weight"
    assert hyper.items() <= trace[f"{path}:hyper"].items()
    np.testing.assert_array_equal(trace[f"{path}:grad"], trace["0/backward/layers.0.weight#0:grad"])
    np.testing.assert_array_equal(trace[f"{path}:param"], weights(model)[0])
    np.testing.assert_array_equal(trace[f"{path}:update"], weights(model)[0] - before[0])
    ports = [e.site.port for e in trace.of("optimizer") if e.site.path == "layers.0.weight"]
    if states is not None:
        assert ports == ["grad", "hyper", *states, "update", "param"]
    grads = [trace[f"0/optimizer/{p}:grad"] for p in dict(tree_flatten(model.parameters()))]
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads))
    np.testing.assert_allclose(trace["0/trajectory/grad_norm#0:out"], norm, rtol=1e-12)


def test_schedule_clipping_and_combined_optimizers(record: Callable[..., Recording]) -> None:
    model = two_layers()
    adam = optim.Adam(optim.linear_schedule(1.0, 0.5, 2))
    optimizer = optim.MultiOptimizer([adam, optim.SGD(0.25)], [lambda name, _: "bias" in name])
    norms: list[float] = []

    def job() -> None:
        for _ in range(3):
            _, grads = nn.value_and_grad(model, regression)(model, X[0], Y[0])
            grads, norm = optim.clip_grad_norm(grads, 0.01)
            norms.append(norm.item())
            model.update(optimizer.apply_gradients(grads, model))

    trace = record(job)
    rates = [trace[f"{step}/optimizer/layers.0.bias:hyper"]["lr"] for step in range(3)]
    assert rates == [1.0, 0.75, 0.5]
    assert [float(trace[f"{step}/trajectory/lr#0:out"]) for step in range(3)] == rates
    assert trace["0/optimizer/layers.0.weight:hyper"]["lr"] == 0.25
    ops = {e.site.path: e.op for e in trace.of("optimizer", 2) if e.site.port == "param"}
    assert ops["layers.0.bias"] == "Adam"
    assert ops["layers.0.weight"] == "SGD"
    clip = trace.trace.find("1/optimizer/clip_grad_norm:out")
    assert trace["1/optimizer/clip_grad_norm:out"] == np.float32(norms[1])
    assert clip.attributes == {"max_norm": 0.01}
    assert float(trace["1/trajectory/grad_norm#0:out"]) == pytest.approx(0.01, rel=1e-3)
    np.testing.assert_array_equal(trace["2/optimizer/layers.1.bias:param"], weights(model)[3])
    assert sorted({e.site.step for e in trace.of("optimizer")}) == [0, 1, 2]


def test_restored_optimizer_state_is_recorded_as_loaded(record: Callable[..., Recording]) -> None:
    model, optimizer = two_layers(), optim.Adam(0.1)
    gradient = nn.value_and_grad(model, regression)
    optimizer.update(model, gradient(model, X[0], Y[0])[1])
    restored = np.array(optimizer.state["layers"][0]["weight"]["m"])

    def job() -> None:
        optimizer.update(model, gradient(model, X[0], Y[0])[1])

    trace = record(job)
    np.testing.assert_array_equal(trace["0/loading/layers.0.weight:state.exp_avg"], restored)
    assert trace["0/optimizer/layers.0.weight:hyper"]["step"] == 2
