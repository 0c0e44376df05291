"""The PyTorch recorder on tiny models: what it records, and that it changes nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from pytorch_jobs import (
    Recording,
    fine_tune,
    llama,
    lora_llama,
    recorder_into,
    two_layers,
)
from torch import nn
from torch.nn import functional as F

import tracediff


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recording]:
    return recorder_into(tmp_path)


# ---- the run is left alone ----------------------------------------------------------------------


@pytest.mark.parametrize("level", ["digest", "module"])
def test_losses_weights_and_generator_are_bit_identical_with_and_without(
    record: Callable[..., Recording], level: str
) -> None:
    losses, weights = fine_tune()
    state = torch.get_rng_state()
    seen: list[Any] = []
    record(lambda: seen.extend(fine_tune()), level)
    assert seen[0] == losses
    assert all(torch.equal(a, b) for a, b in zip(seen[1], weights, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_two_recordings_of_one_job_have_the_same_digests(
    record: Callable[..., Recording],
) -> None:
    first, second = record(fine_tune), record(fine_tune)
    assert len(first.events) > 500
    assert first.digests == second.digests
    shorter = record(lambda: fine_tune(micro_batches=1))
    assert shorter.digests != first.digests


def test_detach_leaves_nothing_behind(record: Callable[..., Recording]) -> None:
    from torch.optim import optimizer as optim
    from transformers.models.llama import modeling_llama
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    owners: list[Any] = [
        nn.Module,
        F,
        torch,
        torch.autograd,
        torch.optim.Optimizer,
        torch.nn.utils,
        torch.utils.checkpoint.CheckpointFunction,
        modeling_llama,
        PreTrainedTokenizerBase,
    ]
    before = [dict(vars(owner)) for owner in owners]
    hooks = (len(optim._global_optimizer_pre_hooks), len(optim._global_optimizer_post_hooks))
    model = lora_llama()
    outputs: list[Any] = []

    def job() -> None:
        ids = torch.ones((1, 4), dtype=torch.long)
        outputs.append(model(input_ids=ids, labels=ids).loss)

    trace = record(job)
    assert any("self_attn.rope" in site for site in trace.sites("forward"))
    for owner, names in zip(owners, before, strict=True):
        changed = {key for key in names if vars(owner).get(key) is not names[key]}
        assert not changed, f"{owner} keeps {changed}"
    after = (len(optim._global_optimizer_pre_hooks), len(optim._global_optimizer_post_hooks))
    assert after == hooks
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    outputs[0].backward()  # hooks on tensors that are still alive must not write any more


# ---- steps, calls and roots ---------------------------------------------------------------------


def test_gradient_accumulation_is_one_step_with_a_call_per_micro_batch(
    record: Callable[..., Recording],
) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = torch.randn(3, 2, 3)
    contributions = []

    def job() -> None:
        for batch in batches:
            model(batch).mean().backward()
        contributions.append(model[3].bias.grad.clone())
        optimizer.step()

    trace = record(job)
    assert trace.trace.steps == [0]
    weight = [trace[f"0/backward/3.weight#{call}:grad"] for call in range(3)]
    assert np.array_equal(sum(weight), trace["0/optimizer/3.weight:grad"])
    assert np.array_equal(trace["0/forward/root#2:in"], batches[2].numpy())
    assert len([s for s in trace.sites("trajectory") if "/loss#" in s]) == 3
    update = trace["0/optimizer/3.bias:update"]
    assert np.allclose(update, -0.5 * contributions[0].numpy())
    assert np.array_equal(trace["0/optimizer/3.bias:param"], model[3].bias.detach().numpy())


def test_two_optimizers_and_two_roots_each_keep_their_names(
    record: Callable[..., Recording],
) -> None:
    """A GAN: the generator's gradient comes after the discriminator's update."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    first = torch.optim.Adam(critic.parameters(), lr=0.1)
    second = torch.optim.SGD(generator.parameters(), lr=0.1, momentum=0.9)

    def job() -> None:
        for _ in range(2):
            fake = generator(torch.randn(4, 2))
            critic(fake.detach()).mean().backward()
            first.step()
            critic(fake).mean().backward()
            second.step()

    trace = record(job)
    assert trace.trace.steps == [0, 1, 2, 3]
    assert trace.trace.find("0/forward/root#0:out").op == "Linear"
    assert "0/forward/root[1]#0:in" in trace.sites("forward")
    assert {e.site.path for e in trace.of("optimizer", 0)} == {"root[1].weight", "root[1].bias"}
    assert {e.site.path for e in trace.of("optimizer", 1)} == {"weight", "bias"}
    assert trace["0/optimizer/root[1].weight:hyper"]["beta2"] == 0.999
    assert trace["3/optimizer/weight:hyper"]["momentum"] == 0.9
    assert "3/optimizer/weight:state.momentum_buffer" in trace.sites("optimizer")
    late = trace.trace.find("1/backward/root#0:grad_out")  # the call was in step 0
    assert late.inputs == ()
    for event in trace.events:
        assert all(order < event.order for order in event.inputs), event


def test_module_called_twice_has_two_calls(record: Callable[..., Recording]) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.layer(self.layer(x))

    model = Twice()
    trace = record(lambda: model(torch.randn(3, 2)).sum().backward())
    first, second = trace["0/forward/layer#0:out"], trace["0/forward/layer#1:in"]
    assert np.array_equal(first, second)
    weight = model.layer.weight.detach().numpy()
    flowed = trace["0/backward/layer#1:grad_out"] @ weight
    assert np.allclose(trace["0/backward/layer#0:grad_out"], flowed)
    assert len([s for s in trace.sites("backward") if "layer.weight" in s]) == 1


def test_without_an_optimizer_each_call_of_a_model_is_a_step(
    record: Callable[..., Recording],
) -> None:
    model = llama().eval()
    ids = torch.tensor([[1, 2, 3]])
    generated: list[Any] = []
    trace = record(lambda: generated.append(model.generate(ids, max_new_tokens=3, do_sample=False)))
    assert trace.trace.steps == [0, 1, 2]
    for step in (1, 2):
        fed = trace[f"{step}/forward/root#0:in"]
        assert fed.shape == (1, 1)  # the cache holds the rest
        assert fed[0, 0] == generated[0][0, 2 + step]
    skipped = trace.trace.find("1/forward/root#0:out").attributes["skipped"]
    assert list(skipped.values()) == ["DynamicCache"]


def test_evaluation_is_recorded_apart_and_as_in_and_out_only(
    record: Callable[..., Recording],
) -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 50, (2, 5))
    held_out: list[float] = []

    def job() -> None:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                held_out.append(model(input_ids=ids, labels=ids).loss.item())

    trace = record(job)
    first = trace.sites("trajectory", 1)
    assert "1/trajectory/root#0:in" in first
    assert "1/trajectory/root#0:out" in first
    assert trace["1/trajectory/eval.cross_entropy#0:out"].item() == pytest.approx(held_out[0])
    assert trace["2/trajectory/eval.cross_entropy#0:out"].item() == pytest.approx(held_out[1])
    assert "1/rendering/eval_batch.input_ids" in trace.sites("rendering")
    assert not trace.of("forward", 2)
    assert len(trace.of("loss", 1)) == len(trace.of("loss", 0))
    assert np.array_equal(trace["1/rendering/batch.input_ids"], ids.numpy())


def test_wrapping_a_known_root_takes_over_its_place(record: Callable[..., Recording]) -> None:
    model = llama()
    ids = torch.ones((1, 3), dtype=torch.long)

    def job() -> None:
        model(input_ids=ids)
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))(input_ids=ids)

    trace = record(job)
    assert "0/forward/lm_head#0:out" in trace.sites("forward", 0)
    assert "1/forward/base_model.model.lm_head#0:out" in trace.sites("forward", 1)
    assert not [site for site in trace.sites("forward") if "root[1]" in site]
    assert any("lora_A.default.weight" in site for site in trace.sites("loading", 1))


def test_submodule_called_directly_and_module_without_parameters(
    record: Callable[..., Recording],
) -> None:
    model, loss = two_layers(), nn.MSELoss()

    def job() -> None:
        model(torch.randn(2, 3))
        loss(model[3](torch.randn(2, 4)), torch.zeros(2, 1)).backward()

    trace = record(job)
    assert trace.trace.steps == [0]
    assert {s for s in trace.sites("forward") if "/3#1:" in s} == {
        "0/forward/3#1:in",
        "0/forward/3#1:out",
    }
    assert not [site for site in trace.sites("forward") if "root[1]" in site]
    assert trace.trace.find("0/loss/loss.mse_loss#0:out").attributes["denominator"] == 2


def test_nothing_of_a_script_stays_alive(tmp_path: Path) -> None:
    """Its globals, that is, which any method of its classes holds."""
    script: dict[str, Any] = {}
    source = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x, scale=1.0):
        return scale * self.linear(x)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    exec(source, script)
    with tracediff.record(tmp_path / "run.zarr", stack="pytorch"):
        script["model"](torch.ones(1, 2)).sum().backward()
        script["optimizer"].step()
    optimizer = weakref.ref(script["optimizer"])
    del script
    gc.collect()
    assert optimizer() is None
