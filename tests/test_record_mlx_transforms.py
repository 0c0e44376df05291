"""The MLX recorder under compilation, checkpointing, `vmap`, generation, and each optimizer."""

from __future__ import annotations

import functools
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
    llama,
    next_token_loss,
    recorder_into,
    two_layers,
    weights,
)
from mlx_lm.generate import generate_step
from mlx_lm.tuner.trainer import TrainingArgs, grad_checkpoint, train

X = mx.array(np.random.default_rng(1).normal(size=(2, 3)), mx.float32)
Y = mx.array(np.random.default_rng(2).normal(size=(2, 1)), mx.float32)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recording]:
    return recorder_into(tmp_path)


def regression(model: Any, x: mx.array, y: mx.array) -> mx.array:
    return nn.losses.mse_loss(model(x), y)


# ---- compiled functions -------------------------------------------------------------------------


def compiled_training(dropout: float = 0.5, compiled: bool = True) -> list[float]:
    """The training step of mlx-lm and of MLX's own examples, compiled with its state."""
    model, optimizer = two_layers(dropout), optim.AdamW(0.1)
    state = [model.state, optimizer.state, mx.random.state]
    gradient = nn.value_and_grad(model, regression)

    def step(x: mx.array, y: mx.array) -> mx.array:
        loss, grads = gradient(model, x, y)
        optimizer.update(model, grads)
        return loss

    if compiled:
        step = functools.partial(mx.compile, inputs=state, outputs=state)(step)
    losses = []
    for _ in range(3):
        losses.append(step(X, Y).item())
        mx.eval(state)
    return [*losses, *model.layers[0].weight[0].tolist()]


def test_compiled_training_step_is_seen_inside_and_noted(record: Callable[..., Recording]) -> None:
    values: list[float] = []
    trace = record(lambda: values.extend(compiled_training()))
    assert values == compiled_training(compiled=False)
    for step in range(3):
        assert trace[f"{step}/loss/loss#0:out"] == values[step]
        assert f"{step}/backward/layers.0#0:grad_out" in trace.sites("backward")
        assert f"{step}/backward/dropout#0:grad_out" in trace.sites("backward")
        assert f"{step}/optimizer/layers.1.bias:param" in trace.sites("optimizer")
    (note,) = trace.notes
    assert note.startswith("step is compiled by mx.compile and ran uncompiled")


def test_what_was_made_before_attaching_is_seen_inside(record: Callable[..., Recording]) -> None:
    """A notebook makes its training step in one cell and records in another."""
    model, optimizer = two_layers(), optim.SGD(0.1)
    gradient = nn.value_and_grad(model, regression)

    @mx.compile
    def step(x: mx.array, y: mx.array) -> Any:
        return gradient(model, x, y)

    expected = [np.array(a) for _, a in tree_flatten(step(X, Y))]

    def job() -> None:
        _, grads = step(X, Y)
        optimizer.update(model, grads)

    trace = record(job)
    assert "0/optimizer/layers.0.weight:grad" in trace.sites("optimizer")
    np.testing.assert_allclose(trace["0/loss/loss#0:out"], expected[0], rtol=1e-6)
    assert "0/backward/layers.0#0:grad_out" in trace.sites("backward")
    assert any("compiled" in note and "step" in note for note in trace.notes)
    after = len(trace.events)
    step(X, Y)
    gradient(model, X, Y)
    assert len(Recording(trace.trace.path).events) == after
    calls = []
    counted = mx.compile(lambda x: (calls.append(0), x)[1])
    counted(X), counted(X)
    assert len(calls) == 1  # compilation is on again


def test_compiled_sampler_draws_the_same_numbers(record: Callable[..., Recording]) -> None:
    calls: list[int] = []

    def job() -> list[float]:
        mx.random.seed(5)

        @functools.partial(mx.compile, inputs=mx.random.state, outputs=mx.random.state)
        def noise(x: mx.array) -> mx.array:
            calls.append(1)
            return x + mx.random.normal(x.shape)

        total = [noise(X).sum().item() for _ in range(3)]
        two_layers()(X)
        return total

    plain = job()
    assert len(calls) == 1
    seen: list[float] = []
    trace = record(lambda: seen.extend(job()))
    assert seen == plain
    assert len(calls) == 3  # once to see that there is nothing to record, once to compile
    assert not trace.notes


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_trainer_of_mlx_lm_gives_the_same_weights(
    record: Callable[..., Recording],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpointed: bool,
) -> None:
    """Compiled steps, accumulation, dropout, evaluation in between."""
    ids = np.random.default_rng(0).integers(0, 50, (8, 8)).tolist()
    data = [(sample, 0) for sample in ids]
    args = TrainingArgs(
        batch_size=2,
        iters=4,
        val_batches=1,
        steps_per_eval=2,
        max_seq_length=16,
        adapter_file=str(tmp_path / "adapters.safetensors"),
        grad_accumulation_steps=2,
        grad_checkpoint=checkpointed,
    )

    def job() -> list[Any]:
        np.random.seed(0)
        model = llama(lora=True)
        with monkeypatch.context() as patch:
            block = type(model.layers[0])
            patch.setattr(block, "__call__", block.__call__)  # `train` replaces it
            train(model, optim.Adam(1e-2), data, data, args=args)
        return weights(model)

    mx.disable_compile()
    plain = job()
    mx.enable_compile()
    seen: list[Any] = []
    trace = record(lambda: seen.extend(job()))
    assert all(np.array_equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert sorted({e.site.step for e in trace.of("optimizer")}) == [0, 1]
    assert [e.site.call for e in trace.of("loss", 1) if e.site.path == "loss"] == [0, 1]
    assert "0/rendering/batch.lengths#1" in trace.sites("rendering")
    path = "model.layers.0.self_attn.v_proj"
    assert f"1/backward/{path}#1:grad_out" in trace.sites("backward")
    assert f"1/optimizer/{path}.lora_b:state.exp_avg" in trace.sites("optimizer")


# ---- checkpoints, vmap and other transformations ------------------------------------------------


class Checkpointed(nn.Module):
    """`nn.utils.checkpoint` around a module that keeps its own name inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        return nn.utils.checkpoint(self.inner)(x)


class Plain(Checkpointed):
    """The same without the checkpoint."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.inner(x)


def test_checkpointing_records_what_runs_without_it(record: Callable[..., Recording]) -> None:
    (inputs, targets), *_ = batches(1)

    def job(checkpointed: bool) -> None:
        model = llama()
        for layer in model.layers:
            layer.mlp = Checkpointed(layer.mlp) if checkpointed else Plain(layer.mlp)
        nn.value_and_grad(model, next_token_loss)(model, inputs, targets)

    job(False)  # so that both recordings begin where the generator stands after a job
    with_it, without = record(lambda: job(True)), record(lambda: job(False))
    assert sorted(with_it.digests) == sorted(without.digests)
    assert with_it.sites("forward") == without.sites("forward")
    assert "0/backward/model.layers.0.mlp.inner.down_proj#0:grad_out" in with_it.sites("backward")


def test_checkpointing_of_mlx_lm_records_what_runs_without_it(
    record: Callable[..., Recording],
) -> None:
    """It replaces the class's own `__call__`, while the recorder has it wrapped."""
    (inputs, targets), *_ = batches(1)
    block = type(llama().layers[0])
    original = block.__call__

    def job(checkpointed: bool) -> None:
        model = llama(lora=True)
        model.eval()  # MLX draws dropout anew when a checkpoint is repeated
        if checkpointed:
            grad_checkpoint(model.layers[0])
        nn.value_and_grad(model, next_token_loss)(model, inputs, targets)

    job(False)  # so that both recordings begin where the generator stands after a job
    try:
        with_it = record(lambda: job(True))
    finally:
        block.__call__ = original
    without = record(lambda: job(False))
    assert with_it.sites("forward") == without.sites("forward")
    assert set(without.digests) <= set(with_it.digests)
    # A checkpoint differentiates its input too, even where no parameter comes before it.
    more = {site for site, _ in set(with_it.digests) - set(without.digests)}
    assert all(site.startswith("0/backward/model.") and "grad_out" in site for site in more)


def test_checkpointed_block_called_twice_keeps_its_calls_apart(
    record: Callable[..., Recording],
) -> None:
    class Twice(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(3, 3)

        def __call__(self, x: mx.array) -> mx.array:
            block = nn.utils.checkpoint(self.block)
            return super().__call__(block(2 * block(x)))

    mx.random.seed(0)
    model = Twice()
    trace = record(lambda: nn.value_and_grad(model, regression)(model, X, Y))
    first, second = (trace[f"0/backward/block#{call}:grad_out"] for call in (0, 1))
    np.testing.assert_allclose(first, 2 * second @ np.array(model.block.weight), rtol=1e-5)
    assert len([s for s in trace.sites("forward") if "/block#" in s]) == 4


def test_values_inside_vmap_are_left_out_and_noted(record: Callable[..., Recording]) -> None:
    model = two_layers()
    outputs: list[Any] = []

    def job() -> None:
        outputs.append(mx.vmap(model)(X))
        step = nn.value_and_grad(model, lambda x: mx.vmap(model)(x).sum())
        outputs.append(step(X)[0])
        model(X)

    expected = model(X)
    trace = record(job)
    np.testing.assert_allclose(np.array(outputs[0]), np.array(expected), rtol=1e-6)
    assert any("vmap" in note for note in trace.notes)
    assert trace.sites("forward")
    np.testing.assert_array_equal(trace["2/forward/root#0:out"], np.array(expected))
    assert "1/backward/layers.0.weight#0:grad" in trace.sites("backward")


def test_vmap_inside_a_model_leaves_out_what_is_in_it_and_nothing_else(
    record: Callable[..., Recording],
) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

        def __call__(self, x: mx.array) -> mx.array:
            x = self.first(x)
            return self.second(x + mx.vmap(self.first)(x))

    mx.random.seed(0)
    model = Rows()
    optimizer = optim.SGD(0.1)

    def job() -> None:
        for _ in range(2):
            optimizer.update(model, nn.value_and_grad(model, regression)(model, X, Y)[1])

    trace = record(job)
    for step in range(2):
        orders = [event.order for event in trace.events if event.site.step == step]
        assert orders == list(range(len(orders)))
        sites = [site.partition("/forward/")[2] for site in trace.sites("forward", step)]
        assert sites == ["root#0:in", "first#0:in", "first#0:out", "second#0:in", "second#0:out",
                         "root#0:out"]  # fmt: skip
        assert f"{step}/backward/second#0:grad_out" in trace.sites("backward")
    expected = np.array(X) @ trace["0/loading/first.weight:param"].T
    expected += trace["0/loading/first.bias:param"]
    np.testing.assert_allclose(trace["0/forward/first#0:out"], expected, rtol=1e-5)


def test_functional_gradients_and_hessians(record: Callable[..., Recording]) -> None:
    model = two_layers()
    found: list[Any] = []

    def loss(parameters: Any, x: mx.array) -> mx.array:
        model.update(parameters)
        return model(x).sum()

    def job() -> None:
        parameters = model.trainable_parameters()
        found.append(mx.value_and_grad(loss)(parameters, X)[1])
        found.append(mx.grad(loss, argnums=1)(parameters, X))
        model.update(parameters)
        found.append(mx.grad(lambda x: mx.grad(lambda x: model(x).sum())(x).sum())(X))
        mx.vjp(model, [X], [mx.ones((2, 1))])

    trace = record(job)
    gradient = trace["0/backward/layers.0.weight#0:grad"]
    np.testing.assert_array_equal(gradient, np.array(found[0]["layers"][0]["weight"]))
    np.testing.assert_array_equal(trace["1/backward/x#0:grad"], np.array(found[1]))
    assert found[2].shape == X.shape
    np.testing.assert_array_equal(trace["3/backward/root#0:grad_out"], np.ones((2, 1)))


def test_generation_loop_is_a_step_per_token(record: Callable[..., Recording]) -> None:
    model = llama()
    prompt = mx.array([3, 7, 11, 2])

    def generate() -> list[int]:
        return [token for token, _ in generate_step(prompt, model, max_tokens=4)]

    plain, tokens = generate(), []
    trace = record(lambda: tokens.extend(generate()))
    assert tokens == plain
    given = [e for e in trace.of("forward") if e.site.path == "root" and e.site.port == "in"]
    assert [e.shape[1] for e in given[:4]] == [3, 1, 1, 1]
    assert [e.site.step for e in given] == list(range(len(given)))
    fed = [int(trace.trace.array(e)[0, -1]) for e in given[2:6]]
    assert fed == tokens[: len(fed)]
    out = trace[f"{given[1].site.step}/forward/root#0:out"]
    assert int(out[0, -1].argmax()) == tokens[0]
    assert given[0].attributes["skipped"]  # the cache is no tensor, and named
