"""Runs of several processes: every rank is compared, and the first to differ is named."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import tracediff
from tests.test_full_disk import Nothing
from tracediff.bisection import bisect, diff
from tracediff.cli import main
from tracediff.errors import TraceError, UsageError
from tracediff.events import Run
from tracediff.launched import await_rank_zero, launched_rank
from tracediff.report.json import to_json
from tracediff.testing import build_event
from tracediff.trace import Trace, TraceWriter, verify

NONE: Mapping[int, int] = {}


def record(path: Path, ranks: int = 3, faults: Mapping[int, int] = NONE) -> Path:
    """Three steps on each rank; `faults` says at which step a rank goes wrong."""
    writers = [TraceWriter(path, Run(stack="pytorch"), rank=rank) for rank in range(ranks)]
    for rank, writer in reversed(list(enumerate(writers))):
        for step in range(3):
            value = np.arange(8.0) + 10 * rank + step + 0.5 * (faults.get(rank) == step)
            writer.add(build_event(f"{step}/forward/fc#0:out", value), value)
            writer.commit_step()
        writer.finish()
    return path


def test_equal_runs_agree_on_all_ranks(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b")
    verdict = bisect(a, b)
    assert verdict.outcome == "identical"
    assert verdict.reason.startswith("3 ranks agree")
    assert verdict.warnings == ()
    one = bisect(Trace(a, rank=1), Trace(b, rank=1))
    assert (one.outcome, one.rank) == ("identical", None)


@pytest.mark.parametrize(
    ("faults", "rank", "step", "others"),
    [
        ({2: 1}, 2, 1, ""),
        ({0: 2, 1: 1}, 1, 1, ", and so do ranks 0"),
        ({1: 1, 2: 1}, 1, 1, ", and so do ranks 2"),
        ({2: 0, 0: 1}, 2, 0, ", and so do ranks 0"),
    ],
    ids=["one", "two, the higher first", "two at once", "the last first"],
)
def test_the_rank_that_differs_first_is_named(
    tmp_path: Path, faults: Mapping[int, int], rank: int, step: int, others: str
) -> None:
    verdict = bisect(record(tmp_path / "a"), record(tmp_path / "b", faults=faults))
    assert verdict.outcome == "diverged"
    assert verdict.first is not None
    assert (verdict.rank, verdict.first.site) == (rank, f"{step}/forward/fc#0:out")
    assert verdict.reason.startswith(f"rank {rank} of 3 diverges{others}: ")
    assert to_json(verdict)["rank"] == rank


def test_a_missing_rank_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, part = record(tmp_path / "a"), record(tmp_path / "b")
    shutil.rmtree(part / "segments/1")
    shutil.rmtree(part / "index/1")
    verdict = bisect(whole, part)
    assert verdict.outcome == "diverged"
    assert verdict.reason == "the target has no rank 1 (3 ranks against 2)"
    assert verdict.first is not None
    assert verdict.first.kind == "missing"
    assert bisect(part, whole).reason == "the baseline has no rank 1 (2 ranks against 3)"
    faulty = record(tmp_path / "c", faults={2: 0})
    shutil.rmtree(faulty / "segments/1")
    found = bisect(whole, faulty)
    assert found.rank == 2
    assert "the target has no rank 1 (3 ranks against 2)" in found.warnings
    assert main(["verify", str(part)]) == 0
    assert "rank 1 is missing" in capsys.readouterr().out


def test_a_rank_that_ends_early_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = record(tmp_path / "a")
    assert main(["verify", str(path)]) == 0
    assert "3 ranks, 3 steps each" in capsys.readouterr().out
    (path / "segments/2/00000002.zip").unlink()
    assert verify(path).ranks == {0: 3, 1: 3, 2: 2}
    assert main(["verify", str(path)]) == 0
    assert "rank 2 has 2 steps" in capsys.readouterr().out


def test_show_and_diff_take_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b", faults={1: 2})
    assert main(["show", str(a)]) == 0
    assert "ranks 0, 1, 2; these are the steps of rank 0" in capsys.readouterr().out
    assert main(["show", str(a), "0/forward/fc#0:out", "--rank", "2"]) == 0
    assert "20. 21. 22." in capsys.readouterr().out
    assert main(["show", str(a), "--rank", "7"]) == 2
    assert "has no rank 7: it has ranks 0, 1, 2" in capsys.readouterr().err
    assert main(["diff", str(a), str(b)]) == 0
    assert main(["diff", str(a), str(b), "--rank", "1"]) == 1
    assert [row.mark for row in diff(a, b, rank=1)] == ["identical", "identical", "diverged"]


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "3"}, 0),  # whatever that is, a launcher says how many there are
        ({"RANK": "3", "WORLD_SIZE": "4"}, 3),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1),
        ({"MLX_RANK": "1"}, 1),
        ({"RANK": "4", "WORLD_SIZE": "4"}, None),
        ({"RANK": "first", "WORLD_SIZE": "4"}, None),
    ],
    ids=["alone", "no size", "torchrun", "mpirun", "mlx.launch", "too large", "no number"],
)
def test_the_rank_is_what_the_launcher_says(
    environment: Mapping[str, str], rank: int | None
) -> None:
    if rank is None:
        with pytest.raises(UsageError, match="RANK is"):
            launched_rank(environment)
    else:
        assert launched_rank(environment) == rank


def test_launched_processes_record_into_one_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.zarr"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with ExitStack() as stack:
        for rank in (0, 1):
            monkeypatch.setenv("RANK", str(rank))
            tape = stack.enter_context(tracediff.record(path, recorder=Nothing, stack="pytorch"))
            tape.emit("forward", "fc", "out", np.full(4, rank, np.float32))
            tape.advance()
    with Trace(path) as trace, trace.of_rank(1) as other:
        assert trace.ranks == [0, 1]
        site = "0/forward/fc#0:out"
        assert [int(each.array(each.find(site))[0]) for each in (trace, other)] == [0, 1]
    assert verify(path).ranks == {0: 1, 1: 1}
    # It has ended: nobody can join it any more.
    with pytest.raises(TraceError, match="rank 1 found no recording of rank 0"):
        await_rank_zero(path, 1, patience=0)
