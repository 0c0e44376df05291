"""Generators: draws counted from states alone, each consumer named, and where two runs part."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch

import tracediff
from tests import long_jobs
from tracediff.bisection import bisect
from tracediff.bisection.generators import parting
from tracediff.draws import counts, position
from tracediff.snapshots import python_generators
from tracediff.trace import Trace


@pytest.mark.parametrize("numbers", [0, 1, 623, 624, 625, 5000])
@pytest.mark.parametrize("path", ["python", "numpy", "torch.cpu", "mlx"])
def test_draws_are_counted_from_two_states(path: str, numbers: int) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    mx.random.seed(4)

    def state() -> np.ndarray:
        if path == "torch.cpu":
            return torch.get_rng_state().numpy().copy()
        return np.array(mx.random.state[0]) if path == "mlx" else python_generators()[path]

    for _ in range(2):  # freshly seeded, and in the middle of a block
        before = state()
        if path == "python":
            [random.getrandbits(32) for _ in range(numbers)]
        elif path == "numpy":
            np.random.randint(0, 2**32, size=numbers, dtype=np.uint32)
        elif path == "torch.cpu":
            torch.rand(numbers)
        else:
            [mx.random.uniform() for _ in range(numbers)]
        after = position(path, state())
        assert after is not None
        assert counts(path, before, [after]) == [numbers]


def test_a_generator_that_was_seeded_anew_is_not_counted() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state().numpy().copy()
    torch.manual_seed(4)
    after = position("torch.cpu", torch.get_rng_state().numpy())
    assert after is not None
    assert counts("mlx", np.array([1, 2], np.uint32), [after]) == [None]
    assert position("torch.philox", before[:16]) is None


@pytest.mark.parametrize("name", ["pytorch", "mlx"])
def test_one_extra_draw_is_found_and_told(tmp_path: Path, name: str) -> None:
    script = long_jobs.write(tmp_path, name)
    a, b = tmp_path / "a.zarr", tmp_path / "b.zarr"
    long_jobs.record(script, a, "12")
    long_jobs.record(script, b, "12", "draw=7")
    verdict = bisect(a, b)
    assert verdict.outcome == "diverged"
    assert verdict.first is not None
    path = {"pytorch": "torch.cpu", "mlx": "mlx"}[name]
    assert verdict.first.site == f"7/rng/{path}:state"
    assert verdict.first.meaning == (
        "the generators part between the update of step 6 and the first call of step 7, in the "
        f"script: 1 extra draw from {path} in the target (0 against 1)"
    )


def test_each_consumer_is_on_record(tmp_path: Path) -> None:
    script = long_jobs.write(tmp_path, "pytorch")
    path = tmp_path / "a.zarr"
    long_jobs.record(script, path, "10")
    with Trace(path) as trace:
        drawn = {
            step: [e.value["by"] for e in trace.events(step) if e.site.port == "drawn"]
            for step in trace.steps
        }
    dropouts = [
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_dropout.default#0"
        for layer in (0, 1)
        for name in ("q_proj", "v_proj")
    ]
    assert drawn[1] == dropouts
    # An epoch of 8 steps begins: a seed for the workers, and one for the shuffle.
    assert drawn[8] == ["the data loader", "the data loader", *dropouts]


def test_draws_of_another_module_are_told(tmp_path: Path) -> None:
    script = long_jobs.write(tmp_path, "pytorch")
    a, b = tmp_path / "a.zarr", tmp_path / "b.zarr"
    long_jobs.record(script, a, "6")
    text = Path(script).read_text(encoding="utf-8")
    more = "step, losses = 0, []\nlayer = model.base_model.model.model.layers[1].mlp\n"
    more += "layer.register_forward_hook(lambda *_: [torch.rand(3 if step == 3 else 0)] and None)\n"
    Path(script).write_text(text.replace("step, losses = 0, []\n", more), encoding="utf-8")
    long_jobs.record(script, b, "6")
    with Trace(a) as one, Trace(b) as two:
        assert parting((one, two), "torch.cpu", 5).told == (
            "the generators part in step 3, in base_model.model.model.layers.1.mlp#0: 3 extra draws"
            " from torch.cpu in the target (0 against 3)"
        )


def test_an_operation_that_draws_on_one_side_only_is_named(tmp_path: Path) -> None:
    """Where it changes what is drawn after it in the step, and not where it changes nothing."""

    class Net(torch.nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.fc, self.drop = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)
            self.before, self.after = before, after

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.fc(x)
            if self.before:
                torch.rand(self.before)
            dropped: torch.Tensor = self.drop(hidden)
            if self.after:
                torch.rand(self.after)
            return dropped

    def run(name: str, before: int, after: int) -> Path:
        gc.collect()
        torch.manual_seed(0)
        with tracediff.record(tmp_path / name, stack="pytorch", level="op"):
            net = Net(before, after)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        return tmp_path / name

    clean = run("clean", 0, 0)
    first = bisect(clean, run("before", 3, 0)).first
    assert first is not None
    assert (first.kind, first.op) == ("extra", {"target": "aten.rand.default"})
    assert first.meaning.startswith("aten.rand.default (test_generators.py:")
    assert first.meaning.endswith(
        "draws from torch.cpu in root#0, and what is drawn after it comes out otherwise"
    )
    first = bisect(clean, run("after", 0, 3)).first
    assert first is None
