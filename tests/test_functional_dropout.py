"""Dropout that is called as a function: recorded as a module, and given another run's masks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout  # before anything is recorded

from tests.pytorch_jobs import Recording, recorder_into
from tracediff.bisection import bisect
from tracediff.session import record_script
from tracediff.stage_substitution import replay
from tracediff.trace import Trace

PYTORCH = """
import sys
import numpy as np, torch
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint
seed, faults = int(sys.argv[1]), sys.argv[2:]
p = 0.0 if "off" in faults else 0.3

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.attn_drop = nn.Dropout(p)

    def dropped(self, scores):
        if "module" in faults:
            return self.attn_drop(scores)
        if "inplace" in faults:
            return dropout(scores + 0, p, self.training, inplace=True)
        with torch.random.fork_rng(enabled="redrawn" in faults):
            if "redrawn" in faults:
                torch.manual_seed(5)
            return dropout(scores, p, self.training)

    def forward(self, x):
        scores = self.dropped(torch.softmax(self.q(x) @ self.k(x).mT / 8**0.5, -1))
        return self.o(scores @ self.v(x)) * (1.01 if "louder" in faults else 1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.attn = Attention()
        self.head = nn.Linear(8, 30)

    def mixed(self, x):
        return self.attn(x if "module" in faults else dropout(x, p, self.training))

    def forward(self, ids):
        x = self.embed(ids)
        if "checkpoint" in faults or "reentrant" in faults:
            return self.head(x + checkpoint(self.mixed, x, use_reentrant="reentrant" in faults))
        return self.head(x + self.attn(x))

torch.manual_seed(0)
model = Model().train("eval" not in faults)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.from_numpy(np.random.default_rng(0).integers(0, 30, (2, 2, 7)))
torch.manual_seed(seed)
for ids in data:
    logits = model(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, 30), ids[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del logits, loss  # a reentrant checkpoint in their graph would keep the script alive
"""

MLX = """
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.attn_drop = nn.Dropout(0.3)

    def __call__(self, x):
        scores = mx.softmax(self.q(x) @ self.k(x).swapaxes(-1, -2) / 8**0.5, axis=-1)
        return self.o(self.attn_drop(scores) @ self.v(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.attn = Attention()
        self.head = nn.Linear(8, 30)

    def __call__(self, ids):
        x = self.embed(ids)
        return self.head(x + self.attn(x))

def main():
    model = Model()
    optimizer = optim.AdamW(1e-2)
    step = nn.value_and_grad(model, lambda model, inputs, targets: nn.losses.cross_entropy(
        model(inputs), targets, reduction="mean"))
    for ids in mx.array(np.random.default_rng(0).integers(0, 30, (2, 2, 7))):
        loss, grads = step(model, ids[:, :-1], ids[:, 1:])
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)

main()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dropout") / "train.py"
    path.write_text(PYTORCH, encoding="utf-8")
    return path


def recorded(script: Path, *args: str, stack: str = "pytorch", level: str = "module") -> Path:
    path = script.with_name(f"{stack}-{level}-{'-'.join(args)}.zarr")
    if not path.exists():
        gc.collect()  # an optimizer of an earlier run would count as existing
        record_script(str(script), args, output=path, stack=stack, level=level)
    return path


def replayed(
    script: Path, baseline: Path, *args: str, stages: tuple[str, ...] = ("masks",)
) -> Path:
    target = recorded(script, *args)
    path = script.with_name(f"{target.stem}-{'-'.join(stages)}-of-{baseline.stem}.zarr")
    gc.collect()
    replay(str(script), args, target=target, baseline=baseline, output=path, stages=stages)
    return path


def first_site(baseline: Path, target: Path) -> str | None:
    first = bisect(baseline, target).first
    return first.site if first else None


@pytest.mark.parametrize(
    "how", [[], ["inplace"], ["checkpoint"], ["reentrant"], ["checkpoint", "module"]], ids="-".join
)
def test_masks_of_another_run_make_it_that_run_bit_for_bit(script: Path, how: list[str]) -> None:
    """The gradients too: what a checkpoint repeats drops what it dropped the first time."""
    baseline = recorded(script, "1", *how)
    assert first_site(baseline, recorded(script, "2", *how)) == "0/rng/torch.cpu:state"
    verdict = bisect(baseline, replayed(script, baseline, "2", *how))
    assert verdict.first is None
    outcomes = {stage.stage: stage.outcome for stage in verdict.stages if stage.compared}
    assert outcomes.pop("rng") == "equivalent"  # they differ without effect
    assert set(outcomes.values()) == {"identical"}
    assert {"forward", "loss", "backward", "optimizer"} <= outcomes.keys()


def test_what_the_masks_do_not_explain_is_named(script: Path) -> None:
    baseline = recorded(script, "1")
    again = replayed(script, baseline, "2", "louder")
    assert first_site(baseline, again) == "0/forward/attn#0:out"


def test_a_mask_that_comes_out_otherwise_is_named(script: Path) -> None:
    """The generators agree, and another generator was drawn from."""
    for level, site in (
        ("module", "0/forward/attn.dropout#0:out"),
        ("digest", "0/forward/attn.dropout#0:out"),
        ("op", "0/forward/attn.dropout@bernoulli#0:out"),
    ):
        baseline = recorded(script, "1", level=level)
        assert first_site(baseline, recorded(script, "1", "redrawn", level=level)) == site
    baseline = recorded(script, "1")
    assert first_site(baseline, replayed(script, baseline, "1", "redrawn")) is None


def test_its_draws_are_its_own(script: Path) -> None:
    with Trace(recorded(script, "1")) as trace:
        drawn = [event.value["by"] for event in trace.events(1) if event.site.port == "drawn"]
    assert drawn == ["attn.dropout#0"]


def test_what_is_off_is_no_call(script: Path) -> None:
    """And agrees with a module that is off, which is one."""
    for how in ("off", "eval"):
        path = recorded(script, "1", how)
        with Trace(path) as trace:
            assert not [e for step in trace.steps for e in trace.events(step) if _is_dropout(e)]
        assert first_site(path, recorded(script, "2", how)) is None
        assert first_site(path, recorded(script, "1", how, "module")) is None


def _is_dropout(event: Any) -> bool:
    return event.site.phase == "forward" and "dropout" in event.op.lower()


def test_it_is_the_module_of_another_run(script: Path) -> None:
    """Whose path is another: it is found by its place, and its masks are given alike."""
    function, module = recorded(script, "1"), recorded(script, "1", "module")
    for verdict in (bisect(function, module), bisect(module, function)):
        assert verdict.first is None
        forward = next(s for s in verdict.stages if s.stage == "forward")
        assert (forward.outcome, forward.unmatched) == ("identical", (0, 0))
    assert first_site(module, replayed(script, module, "2")) is None
    assert first_site(function, replayed(script, function, "2", "module")) is None


def test_masks_of_the_other_stack_can_be_given(script: Path) -> None:
    """What is left then is that MLX's AdamW corrects no bias."""
    pytest.importorskip("mlx.core")
    mlx = script.with_name("mlx.py")
    mlx.write_text(MLX, encoding="utf-8")
    baseline = recorded(mlx, stack="mlx")
    for stages, left in (
        (("loading",), "0/forward/attn.attn_drop#0:out"),
        (("loading", "masks"), "0/optimizer/embed.weight:hyper"),
    ):
        assert first_site(baseline, replayed(script, baseline, "1", stages=stages)) == left


# ---- what is recorded ---------------------------------------------------------------------------


class Calls(nn.Module):
    """A linear layer and whatever a test calls."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 8)
        self.call = call

    def forward(self, x: Any) -> Any:
        return self.call(self.fc(x))


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Any], Any]], Recording]:
    record = recorder_into(tmp_path)

    def run(call: Callable[[Any], Any]) -> Recording:
        return record(lambda: Calls(call)(torch.ones(2, 3, 8)).sum().backward())

    return run


@pytest.mark.parametrize(
    "call",
    [
        lambda x: dropout(x, 0.5),
        lambda x: dropout(x, 0.5, inplace=True),
        lambda x: nn.functional.dropout1d(x, 0.5),
        lambda x: torch.dropout(x, 0.5, train=True),
    ],
    ids=["by name", "in place", "of channels", "of torch"],
)
def test_a_call_has_an_input_an_output_and_a_gradient(
    run: Callable[..., Recording], call: Callable[[Any], Any]
) -> None:
    trace = run(call)
    given, dropped = (trace[f"0/forward/root.dropout#0:{port}"] for port in ("in", "out"))
    assert (given == trace["0/forward/fc#0:out"]).all()
    assert (dropped == trace["0/forward/root#0:out"]).all()
    assert ((dropped == 0) | (dropped == given * 2)).all()
    assert 0 < (dropped == 0).sum() < dropped.size
    assert "0/backward/root.dropout#0:grad_out" in trace.sites("backward")


def test_a_module_s_own_call_is_no_other(run: Callable[..., Recording]) -> None:
    for module in (nn.Dropout(0.5), nn.Dropout1d(0.5), nn.Dropout(0.5, inplace=True)):
        trace = run(module)
        assert not [site for site in trace.sites("forward") if "root.dropout" in site]


def test_dropout_inside_of_a_kernel_is_told(run: Callable[..., Recording]) -> None:
    attend = nn.functional.scaled_dot_product_attention
    for share, count in ((0.0, 0), (0.5, 1)):
        # As a script does that looks the function up when it calls it.
        trace = run(lambda x, p=share: getattr(nn.functional, attend.__name__)(x, x, x, None, p))
        told = [note for note in trace.trace.run.notes if "dropout_p > 0" in note]
        assert len(told) == count


def test_torchscript_compiles_it_meanwhile_and_afterwards(run: Callable[..., Recording]) -> None:
    def scripted(x: Any) -> Any:
        return torch.jit.script(_halved)(x)

    run(scripted)
    scripted(torch.ones(3))


def _halved(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.5)
