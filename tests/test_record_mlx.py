"""The MLX recorder on tiny models: what it records, and that it changes nothing.

MLX runs on the CPU here; nothing in the recorder depends on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_jobs import (
    Recording,
    TwoLayers,
    batches,
    fine_tune,
    llama,
    next_token_loss,
    recorder_into,
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


# ---- the run is left alone ----------------------------------------------------------------------


@pytest.mark.parametrize("level", ["digest", "module"])
def test_losses_weights_and_generator_are_bit_identical_with_and_without(
    record: Callable[..., Recording], level: str
) -> None:
    losses, final = fine_tune()
    state = np.array(mx.random.state[0])
    seen: list[Any] = []
    record(lambda: seen.extend(fine_tune()), level)
    assert seen[0] == losses
    assert all(np.array_equal(a, b) for a, b in zip(seen[1], final, strict=True))
    assert np.array_equal(np.array(mx.random.state[0]), state)


def test_two_recordings_of_one_job_have_the_same_digests(record: Callable[..., Recording]) -> None:
    first, second = record(fine_tune), record(fine_tune)
    assert len(first.events) > 400
    assert first.digests == second.digests
    assert record(lambda: fine_tune(lora=False)).digests != first.digests
    assert not first.notes


@pytest.mark.usefixtures("imports_in_sight")
def test_the_compiled_activations_of_mlx_lm_stay_compiled(
    record: Callable[..., Recording],
) -> None:
    assert not record(fine_tune).notes


def test_detach_leaves_nothing_behind(record: Callable[..., Recording]) -> None:
    owners: list[Any] = [mx, nn, nn.losses, nn.Module, nn.Linear, TwoLayers, optim]
    owners += [optim.Optimizer, optim.MultiOptimizer, optim.Adam]
    before = [dict(vars(owner)) for owner in owners]
    kept: list[Any] = []

    def job() -> None:
        model = two_layers()
        kept.extend([model, nn.value_and_grad(model, regression), mx.compile(nn.silu)])
        kept[1](model, X[0], Y[0])

    trace = record(job)
    for owner, names in zip(owners, before, strict=True):
        changed = {key for key in names if vars(owner).get(key) is not names[key]}
        added = set(vars(owner)) - set(names)
        assert not changed | added, f"{owner} keeps {changed | added}"
    count = len(trace.events)
    loss, grads = kept[1](kept[0], X[0], Y[0])  # functions made meanwhile go on working
    assert loss.item() == trace["0/loss/loss#0:out"]
    assert tree_flatten(grads)
    assert kept[2](X).shape == X.shape
    assert len(Recording(trace.trace.path).events) == count


def test_a_method_replaced_by_the_script_stays_replaced(record: Callable[..., Recording]) -> None:
    class Block(nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            return x

    class Model(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(self.block(x))

    def doubled(self: Block, x: mx.array) -> mx.array:
        return 2 * x

    def job() -> None:
        Block.__call__ = doubled
        Model()(X[0])

    trace = record(job)
    np.testing.assert_array_equal(trace["0/forward/block#0:out"], 2 * np.array(X[0]))
    assert Block.__call__ is doubled
    assert trace.sites("forward").count("0/forward/root#0:in") == 1  # super() is the same call


# ---- values -------------------------------------------------------------------------------------


def test_values_and_gradients_are_those_of_the_mathematics(
    record: Callable[..., Recording],
) -> None:
    model = two_layers()
    w1, b1, w2, b2 = (a.astype(np.float64) for a in weights(model))
    x, y = np.array(X[0], np.float64), np.array(Y[0], np.float64)

    def job() -> None:
        nn.value_and_grad(model, regression)(model, X[0], Y[0])

    trace = record(job)
    hidden = np.tanh(x @ w1.T + b1)
    out = hidden @ w2.T + b2
    d_out = 2 * (out - y) / y.size
    d_hidden = d_out @ w2
    expected = {
        "0/loading/layers.0.weight:param": w1,
        "0/forward/root#0:in": x,
        "0/forward/layers.0#0:out": x @ w1.T + b1,
        "0/forward/layers.1#0:in": hidden,
        "0/forward/root#0:out": out,
        "0/loss/loss.mse_loss#0:labels": y,
        "0/loss/loss#0:out": np.mean((out - y) ** 2),
        "0/trajectory/loss#0:out": np.mean((out - y) ** 2),
        "0/backward/root#0:grad_out": d_out,
        "0/backward/layers.0#0:grad_out": d_hidden * (1 - hidden**2),
        "0/backward/layers.1.weight#0:grad": d_out.T @ hidden,
        "0/backward/layers.0.bias#0:grad": (d_hidden * (1 - hidden**2)).sum(0),
    }
    for site, value in expected.items():
        np.testing.assert_allclose(trace[site], value, rtol=2e-5, atol=1e-6, err_msg=site)
    order = [e.site.path for e in trace.of("backward")]
    # Dropout that is off hands its input through: no value of its own, so no gradient either.
    assert order[:3] == ["root", "layers.1", "layers.0"]
    stages = [e.site.phase for e in trace.events if e.site.path != "dropout.p"]
    assert list(dict.fromkeys(stages)) == [
        *("loading", "rng", "forward", "loss", "trajectory", "backward")
    ]


def test_edges_lead_from_outputs_back_to_what_they_came_from(
    record: Callable[..., Recording],
) -> None:
    model = two_layers()
    optimizer = optim.SGD(0.1)

    def job() -> None:
        _, grads = nn.value_and_grad(model, regression)(model, X[0], Y[0])
        optimizer.update(model, grads)

    trace = record(job)
    order = {str(e.site): e.order for e in trace.events}
    inputs = {str(e.site): set(e.inputs) for e in trace.events}
    for site, source in [
        ("0/forward/layers.1#0:in", "0/forward/dropout#0:out"),
        ("0/loss/loss.mse_loss#0:in", "0/forward/root#0:out"),
        ("0/loss/loss#0:out", "0/loss/loss.mse_loss#0:out"),
        ("0/backward/layers.0#0:grad_out", "0/backward/layers.1#0:grad_out"),
        ("0/backward/layers.0.weight#0:grad", "0/backward/layers.0#0:grad_out"),
        ("0/backward/layers.0.weight#0:grad", "0/forward/layers.0#0:in"),
        ("0/optimizer/layers.0.weight:grad", "0/backward/layers.0.weight#0:grad"),
        ("0/optimizer/layers.0.weight:update", "0/optimizer/layers.0.weight:grad"),
        ("0/optimizer/layers.0.weight:param", "0/optimizer/layers.0.weight:update"),
    ]:
        assert order[source] in inputs[site], f"{site} does not name {source}"
    assert all(max(found, default=-1) < order[site] for site, found in inputs.items())


def test_rope_is_called_for_queries_then_keys_with_named_dimensions(
    record: Callable[..., Recording],
) -> None:
    model = llama(rope_theta=5000.0)
    (inputs, targets), *_ = batches(1)
    trace = record(lambda: nn.value_and_grad(model, next_token_loss)(model, inputs, targets))
    queries = trace.trace.find("0/forward/model.layers.1.self_attn.rope#0:out")
    keys = trace.trace.find("0/forward/model.layers.1.self_attn.rope#1:out")
    assert queries.shape == (2, 4, 5, 4)
    assert keys.shape == (2, 2, 5, 4)
    assert queries.dims == keys.dims == ("batch", "heads", "sequence", "head_dim")
    norm = trace.trace.find("0/forward/model.norm#0:out")
    assert norm.dims == ("batch", "sequence", "hidden")
    settings = trace.settings()
    assert settings["model.layers.0.self_attn.rope.base"] == 5000.0
    assert settings["config.rope_theta"] == 5000.0
    assert settings["config.num_hidden_layers"] == 2
    assert settings["model.norm.eps"] == 1e-5


@pytest.mark.parametrize(
    ("given", "approximate"), [("none", "none"), ("precise", "tanh"), ("fast", "sigmoid")]
)
def test_how_a_gelu_is_approximated_is_recorded_under_the_name_of_all_stacks(
    record: Callable[..., Recording], given: str, approximate: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(given))
    trace = record(lambda: mx.eval(model(mx.ones((2, 3)))))
    assert trace.settings()["layers.1.approximate"] == approximate


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.rope = nn.RoPE(4)

    def __call__(self, x: mx.array) -> mx.array:
        return self.rope(self.rope(self.proj(x)), offset=5)


def test_the_position_that_a_rotary_embedding_counts_from_is_recorded(
    record: Callable[..., Recording],
) -> None:
    model = Rotated()
    trace = record(lambda: mx.eval(model(mx.ones((1, 2, 3, 4)))))
    found = [trace.trace.find(f"0/forward/rope#{call}:out").attributes for call in (0, 1)]
    assert found == [{}, {"offset": 5}]


def test_lora_settings_trainable_flags_and_batch(record: Callable[..., Recording]) -> None:
    model = llama(lora=True)
    (inputs, targets), *_ = batches(1)
    trace = record(lambda: nn.value_and_grad(model, next_token_loss)(model, inputs, targets))
    path = "model.layers.0.self_attn.q_proj"
    assert trace.settings()[f"{path}.scale"] == 2.0
    assert trace.settings()[f"{path}.dropout.p"] == 0.1
    loaded = {e.site.path: e.attributes["trainable"] for e in trace.of("loading")}
    assert loaded[f"{path}.lora_a"] is True
    assert loaded[f"{path}.linear.weight"] is False
    assert sum(loaded.values()) == 8
    labels = trace.trace.find("0/rendering/batch.targets")
    assert labels.kind == "labels"
    np.testing.assert_array_equal(trace["0/rendering/batch.inputs"], np.array(inputs))
    np.testing.assert_array_equal(trace["0/rendering/batch.targets"], np.array(targets))
    grads = [e.site.path for e in trace.of("backward") if e.site.port == "grad"]
    assert len(grads) == 8
    assert not any("linear" in grad for grad in grads)


def test_tied_weights_are_one_parameter_with_an_alias(record: Callable[..., Recording]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 3)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.embed.weight
            self._freqs = mx.arange(3)

        def __call__(self, inputs: mx.array) -> mx.array:
            return self.head(self.embed(inputs)) + self.embed.as_linear(self.embed(inputs))

    model, ids = Tied(), mx.array([[1, 2, 3]])
    trace = record(lambda: nn.value_and_grad(model, next_token_loss)(model, ids, ids))
    (tied,) = [e for e in trace.of("loading") if e.site.port == "param"]
    assert tied.site.path == "embed.weight"
    assert tied.attributes["aliases"] == ["head.weight"]
    assert [e.site.path for e in trace.of("loading") if e.site.port == "buffer"] == ["_freqs"]
    calls = [s for s in trace.sites("forward") if s.startswith("0/forward/embed#")]
    assert len(calls) == 4  # two calls, and `as_linear` is none


def test_bfloat16_keeps_its_bits_and_its_dtype(record: Callable[..., Recording]) -> None:
    model = two_layers()
    model.set_dtype(mx.bfloat16)
    x = X[0].astype(mx.bfloat16)
    trace = record(lambda: nn.value_and_grad(model, regression)(model, x, Y[0].astype(mx.bfloat16)))
    for phase in ("loading", "forward", "loss", "backward"):
        assert {e.dtype for e in trace.of(phase)} == {"bfloat16"}, phase
    bits = trace["0/loading/layers.0.weight:param"].view(np.uint16)
    np.testing.assert_array_equal(bits, np.array(model.layers[0].weight.view(mx.uint16)))


def test_tuples_dictionaries_caches_and_views(record: Callable[..., Recording]) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = mx.array(3.0)

        def __call__(self, x: mx.array, extra: Any = None, cache: Any = None) -> Any:
            return x.T * self.scale, [x + 1, None], cache

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def __call__(self, x: mx.array) -> Any:
            first, rest, cache = self.inner(x, extra={"a": x[:, ::2]}, cache=object())
            assert type(rest) is list
            return {"hidden": rest[0].sum(), "logits": first.sum(), "cache": cache}

    model = Outer()
    values = []

    def loss(x: mx.array) -> mx.array:
        out = model(x)
        return out["logits"] + out["hidden"]

    trace = record(lambda: values.extend(nn.value_and_grad(model, loss)(X[0])))
    x = np.array(X[0])
    np.testing.assert_array_equal(trace["0/forward/inner#0:out"], x.T * 3)
    np.testing.assert_array_equal(trace["0/forward/inner#0:out.1.0"], x + 1)
    np.testing.assert_array_equal(trace["0/forward/inner#0:in.extra.a"], x[:, ::2])
    np.testing.assert_allclose(trace["0/forward/root#0:out"], 3 * x.sum(), rtol=1e-5)
    assert "0/forward/root#0:out.hidden" in trace.sites("forward")
    np.testing.assert_array_equal(trace["0/backward/inner#0:grad_out"], np.ones((3, 2)))
    assert values[0].item() == trace["0/loss/loss#0:out"]


def test_in_place_operations_afterwards_do_not_alter_what_was_recorded(
    record: Callable[..., Recording],
) -> None:
    class Model(TwoLayers):
        def __call__(self, x: mx.array) -> mx.array:
            hidden = self.layers[0](x)
            hidden[:] = 7
            hidden += 1
            return hidden

    trace = record(lambda: Model()(X[0]))
    assert not (trace["0/forward/layers.0#0:out"] == 8).any()
    np.testing.assert_array_equal(trace["0/forward/root#0:out"], np.full((2, 4), 8))
