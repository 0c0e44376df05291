"""Replay with whole stages: what the runs were given is out of the way, what they do remains."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tracediff.bisection import bisect
from tracediff.cli import main
from tracediff.errors import UsageError
from tracediff.session import record_script
from tracediff.stage_substitution import replay
from tracediff.trace import Trace

PYTORCH = """
import sys
import numpy as np, torch
from torch import nn
seed, length, faulty = int(sys.argv[1]), int(sys.argv[2]), "faulty" in sys.argv
other = "other" in sys.argv

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.drop = nn.Dropout(0.3)
        self.act = nn.Tanh()
        self.head = nn.Linear(8, 30)

    def forward(self, input_ids):
        return self.head(self.act(self.drop(self.embed(input_ids))))

torch.manual_seed(seed)
model = Model()
if faulty:
    model.act.register_forward_hook(lambda module, given, out: out * 1.01)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.from_numpy(np.random.default_rng(seed).integers(0, 30, (2, 2, length)))
torch.manual_seed(seed + 100 + other)
for ids in data:
    logits = model(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, 30), ids[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

MLX = """
import sys
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.drop = nn.Dropout(0.3)
        self.act = nn.Tanh()
        self.head = nn.Linear(8, 30)

    def __call__(self, input_ids):
        return self.head(self.act(self.drop(self.embed(input_ids))))

class Louder(nn.Tanh):
    def __call__(self, x):
        return super().__call__(x) * 1.01

def main(seed, length, faulty, other):
    mx.random.seed(seed)
    model = Model()
    if faulty:
        model.act.__class__ = Louder
    optimizer = optim.AdamW(1e-2)
    step = nn.value_and_grad(model, lambda model, inputs, targets: nn.losses.cross_entropy(
        model(inputs), targets, reduction="mean"))
    mx.random.seed(seed + 100 + other)
    for ids in mx.array(np.random.default_rng(seed).integers(0, 30, (2, 2, length))):
        loss, grads = step(model, ids[:, :-1], ids[:, 1:])
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)

main(int(sys.argv[1]), int(sys.argv[2]), "faulty" in sys.argv, "other" in sys.argv)
"""

SCRIPTS = {"pytorch": PYTORCH, "mlx": MLX}
ALL = ("rendering", "loading", "rng")


class Job:
    """The script of one stack, recorded once for each set of arguments.

    Run 1 has other data, weights and random numbers than run 0, and one that is `other` has other
    masks.
    """

    def __init__(self, folder: Path, stack: str) -> None:
        pytest.importorskip({"pytorch": "torch", "mlx": "mlx.core"}[stack])
        self.folder, self.stack = folder, stack
        self.script = folder / f"{stack}.py"
        self.script.write_text(SCRIPTS[stack], encoding="utf-8")

    def recorded(self, *args: str) -> Path:
        path = self.folder / f"{self.stack}-{'-'.join(args)}.zarr"
        if not path.exists():
            gc.collect()  # an optimizer of an earlier run would count as existing
            record_script(str(self.script), args, output=path, stack=self.stack)
        return path

    def replayed(self, baseline: Path, target: Path, *args: str, stages: tuple[str, ...]) -> Path:
        path = self.folder / f"{target.stem}-{'-'.join(stages)}-{baseline.stem}.zarr"
        gc.collect()
        replay(str(self.script), args, target=target, baseline=baseline, output=path, stages=stages)
        return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(params=["pytorch", "mlx"], scope="module")
def job(request: pytest.FixtureRequest, folder: Path) -> Job:
    return Job(folder, request.param)


def test_a_run_on_all_stages_of_another_is_that_run(job: Job) -> None:
    baseline, target = job.recorded("0", "7"), job.recorded("1", "7")
    first = bisect(baseline, target).first
    assert first is not None
    assert first.stage == "rendering"
    again = job.replayed(baseline, target, "1", "7", stages=ALL)
    assert bisect(baseline, again).outcome == "identical"
    with Trace(again) as trace:
        assert trace.run.settings["substituted"]["stages"] == list(ALL)


def test_batches_of_another_length_can_be_given(job: Job) -> None:
    baseline, target = job.recorded("0", "9"), job.recorded("1", "6")
    again = job.replayed(baseline, target, "1", "6", stages=ALL)
    assert bisect(baseline, again).outcome == "identical"


def test_what_is_left_is_named(job: Job) -> None:
    baseline, target = job.recorded("0", "7"), job.recorded("1", "7", "faulty")
    again = job.replayed(baseline, target, "1", "7", "faulty", stages=ALL)
    first = bisect(baseline, again).first
    assert first is not None
    assert first.site == "0/forward/act#0:out"


@pytest.mark.parametrize(
    ("stages", "left"),
    [
        (("loading", "rng"), {"rendering"}),
        (("rendering", "rng"), {"loading"}),
        (("rendering", "loading"), {"rng", "forward"}),
    ],
)
def test_a_stage_that_was_not_given_is_named(
    job: Job, stages: tuple[str, ...], left: set[str]
) -> None:
    baseline, target = job.recorded("0", "7"), job.recorded("1", "7")
    first = bisect(baseline, job.replayed(baseline, target, "1", "7", stages=stages)).first
    assert first is not None
    assert first.stage in left


def test_weights_of_the_other_stack_can_be_given(folder: Path) -> None:
    torch, mlx = Job(folder, "pytorch"), Job(folder, "mlx")
    baseline, target = torch.recorded("0", "7"), mlx.recorded("1", "7")
    again = mlx.replayed(baseline, target, "1", "7", stages=("rendering", "loading"))
    loading = next(s for s in bisect(baseline, again).stages if s.stage == "loading")
    assert (loading.outcome, loading.compared) == ("identical", 3)


def test_masks_alone_can_be_given(job: Job) -> None:
    baseline, target = job.recorded("0", "7"), job.recorded("0", "7", "other")
    first = bisect(baseline, target).first
    assert first is not None
    assert first.stage == "rng"
    again = job.replayed(baseline, target, "0", "7", "other", stages=("masks",))
    verdict = bisect(baseline, again)
    assert verdict.first is None
    forward = next(s for s in verdict.stages if s.stage == "forward")
    assert forward.outcome == "identical"


@pytest.mark.parametrize(("mine", "other"), [("pytorch", "mlx"), ("mlx", "pytorch")])
def test_masks_of_the_other_stack_can_be_given(folder: Path, mine: str, other: str) -> None:
    """What is left then is that MLX's AdamW corrects no bias."""
    job, given = Job(folder, mine), Job(folder, other)
    baseline, target = given.recorded("0", "7"), job.recorded("0", "7")
    for stages, left in (
        (("loading",), "0/forward/drop#0:out"),
        (("loading", "masks"), "0/optimizer/embed.weight:hyper"),
    ):
        first = bisect(baseline, job.replayed(baseline, target, "0", "7", stages=stages)).first
        assert first is not None
        assert first.site == left


@pytest.mark.parametrize(
    ("faults", "left"), [([], None), (["faulty"], "0/forward/act#0:out")], ids=["clean", "faulty"]
)
def test_one_step_with_the_masks_of_another_run(
    job: Job, tmp_path: Path, faults: list[str], left: str | None
) -> None:
    """What differs by the masks is gone, and what does not remains."""
    baseline, args = job.recorded("0", "7"), ["0", "7", "other", *faults]
    target, shown, again = job.recorded(*args), tmp_path / "shown.zarr", tmp_path / "again.zarr"
    for command in (
        [str(baseline), "--step", "0", "-o", str(shown), "--", str(job.script), "0", "7"],
        [
            *(str(target), "--step", "0", "--with", str(shown), "--substitute", "masks"),
            *("-o", str(again), "--", str(job.script), *args),
        ],
    ):
        gc.collect()
        assert main(["replay", *command]) == 0
    first = bisect(shown, again).first
    assert (first.site if first else None) == left


def test_what_a_step_cannot_be_given_is_said(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job(folder, "pytorch")
    target = str(job.recorded("1", "7"))
    command = ["replay", target, "--step", "0", "-o", str(tmp_path / "r.zarr")]
    run = ["--", str(job.script), "1", "7"]
    for options, said in (
        (["--with", target], "--step with --with A needs --substitute"),
        (["--substitute", "masks"], "--substitute needs --with A"),
        (["--with", target, "--substitute", "loading"], "a step loads nothing"),
    ):
        assert main([*command, *options, *run]) == 2
        assert said in capfd.readouterr().err


def test_the_command_line(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(folder, "pytorch")
    baseline, target = job.recorded("0", "7"), job.recorded("1", "7")
    command = ["replay", str(target), "--with", str(baseline), "-o", str(tmp_path / "r.zarr")]
    run = ["--", str(job.script), "1", "7"]
    assert main([*command, "--substitute", "weights", *run]) == 2
    assert (
        "'weights' is unknown: give some of rendering, loading, rng, masks"
        in capfd.readouterr().err
    )
    gc.collect()
    assert main([*command, "--substitute", "rendering,loading,rng", *run]) == 0
    said = capfd.readouterr().err
    assert "4 fields of batches, 3 parameters" in said


def test_nothing_to_give_is_said(folder: Path) -> None:
    job = Job(folder, "pytorch")
    target = job.recorded("1", "7")
    lean = folder / "digest.zarr"
    gc.collect()
    record_script(str(job.script), ["0", "7"], output=lean, stack="pytorch", level="digest")
    with pytest.raises(UsageError, match=r"holds nothing of loading"):
        job.replayed(lean, target, "1", "7", stages=("loading",))
