"""Snapshots and replays of a step: bit-exact on both stacks, whatever the loop."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import long_jobs
from tracediff.cli import main
from tracediff.errors import RerunError
from tracediff.reexecution import Reexecution, reexecute
from tracediff.trace import Trace
from tracediff.trace.snapshot import read_snapshot, snapshot_files, write_snapshot

JOBS = ("pytorch", "trainer", "mlx", "mlx_lm")


def replayed(
    script: str, recorded: Path, step: int, *arguments: str, **options: Any
) -> Reexecution:
    gc.collect()
    output = recorded.with_name(f"{recorded.stem}.step{step}.zarr")
    return reexecute(script, arguments, recorded=recorded, step=step, output=output, overwrite=True)


@pytest.fixture(scope="module", params=JOBS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    script = long_jobs.write(folder, request.param)
    path = folder / "run.zarr"
    long_jobs.record(script, path, "14", snapshot_every=4, keep_snapshots=2)
    return script, path


def saved(script: str) -> dict[str, bytes]:
    """Weights that a script has saved, by file."""
    files = Path(script).parent.rglob("*")
    return {
        str(f): f.read_bytes() for f in files if f.suffix in (".pt", ".safetensors") and f.is_file()
    }


def test_an_optimizer_of_another_run_is_in_no_snapshot(tmp_path: Path) -> None:
    script, path = long_jobs.write(tmp_path, "pytorch"), tmp_path / "run.zarr"
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    plan = torch.optim.lr_scheduler.StepLR(other, 1)
    long_jobs.record(script, path, "6", snapshot_every=4)
    del other, plan
    assert replayed(script, path, 5, "6").exact


def test_a_step_is_replayed_bit_for_bit(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script, path = run
    before = saved(script)
    capsys.readouterr()
    done = replayed(script, path, 13, "14")
    assert done.exact, done.differing[:3]
    assert done.start == 12
    assert "bit-exact replay of step 13, from the snapshot of step 12" in done.sentence()
    with Trace(path) as recorded, Trace(done.trace) as again:
        assert again.steps == [12, 13]
        weights = [e for e in again.events(13) if e.site.port == "param"]
        assert weights
        assert all(event.payload for event in weights)
        losses = [e for e in recorded.events() if str(e.site.path) == "loss"]
        assert len({event.digest for event in losses}) > 10
    assert before
    assert saved(script) == before, "a skipped step has saved other weights"


@pytest.mark.parametrize("run", ["pytorch", "mlx"], indirect=True)  # they print every loss
def test_what_a_skipped_step_prints_is_what_it_printed(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = run
    replayed(script, path, 9, "14")
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("loss")]
    with Trace(path) as trace:
        for step, line in enumerate(printed):
            event = next(e for e in trace.events(step) if str(e.site) == f"{step}/loss/loss#0:out")
            assert float(line.split()[2]) == pytest.approx(event.fingerprint[4], abs=0)
    assert len(printed) >= 9


def test_retention_keeps_the_latest_snapshots(run: Any) -> None:
    assert list(snapshot_files(run[1])) == [8, 12]


def test_without_a_snapshot_all_steps_are_computed(run: Any) -> None:
    script, path = run
    done = replayed(script, path, 3, "14")
    assert (done.exact, done.start) == (True, 0)


def test_the_base_of_an_adapter_is_not_in_a_snapshot(run: Any) -> None:
    tree = read_snapshot(run[1], 12)
    kept = {name for name, weight in tree["weights"].items() if "value" in weight}
    assert kept
    assert all("lora_" in name or name.endswith(":buffer") for name in kept)


def test_other_data_are_refused(tmp_path: Path) -> None:
    script = long_jobs.write(tmp_path, "pytorch")
    path = tmp_path / "run.zarr"
    long_jobs.record(script, path, "6", snapshot_every=4)
    other = Path(script).read_text(encoding="utf-8").replace("manual_seed(0)", "manual_seed(1)")
    Path(script).write_text(other, encoding="utf-8")
    with pytest.raises(RerunError, match="of step 0 is not what was recorded"):
        replayed(script, path, 5, "6")


def test_another_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = long_jobs.write(tmp_path, "pytorch")
    path = tmp_path / "run.zarr"
    long_jobs.record(script, path, "6", snapshot_every=4)
    text = Path(script).read_text(encoding="utf-8")
    changed = text.replace(
        "loss.backward()", "loss = loss * (1.5 if step == 5 else 1)\n        loss.backward()"
    )
    Path(script).write_text(changed, encoding="utf-8")
    gc.collect()
    out = str(tmp_path / "again.zarr")
    code = main(["replay", str(path), "--step", "5", "-o", out, "--", script, "6"])
    assert code == 1
    assert "5/loss/loss#0:out is not bit-equal" in capsys.readouterr().err


def test_wrong_use_is_one_sentence(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script, path = run
    assert main(["replay", str(path), "--", script]) == 2
    assert "give --step K" in capsys.readouterr().err
    assert main(["replay", str(path), "--step", "99", "--", script]) == 2
    assert "has no step 99: it has steps 0 to" in capsys.readouterr().err
    out = str(path.with_name("x.zarr"))
    every = ["--snapshot-every", "0"]
    assert main(["record", "-o", out, *every, "--", script]) == 2
    assert "--snapshot-every is 0" in capsys.readouterr().err


def test_a_snapshot_gives_back_any_tree(tmp_path: Path) -> None:
    tree = {
        "weights": {"a": {"value": np.arange(6, dtype=np.float16).reshape(2, 3)}},
        "state": {0: {"step": 3, "betas": (0.9, 0.999)}, 1: None},
        "odd": [float("inf"), "x", True, (), {"$array": 1}],
    }
    lost = write_snapshot(tmp_path, 7, tree | {"function": print, "in": [object()]})
    assert lost == ["function", "in.0"]
    found = read_snapshot(tmp_path, 7)
    np.testing.assert_array_equal(found["weights"]["a"].pop("value"), np.arange(6).reshape(2, 3))
    assert found["state"] == tree["state"]
    assert found["odd"] == tree["odd"]
    assert not list((tmp_path / "snapshots").glob(".*"))
