"""A disk that refuses: the trace keeps its committed steps, and the run goes on if told to."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tracediff
from tracediff.errors import TraceError, UsageError
from tracediff.recording import Recorder, Tape
from tracediff.trace import Trace, verify

LIMIT = 256 * 1024
SMALL, LARGE = 1_000, 1_000_000
"""Elements of 4 bytes: one tensor of the first size fits below the limit, one of the second not."""


class Nothing(Recorder):
    """Hooks into nothing: these tests emit by themselves."""

    stack = "pytorch"

    def attach(self) -> None:
        pass

    def environment(self) -> Mapping[str, Any]:
        return {}

    def versions(self) -> Mapping[str, str]:
        return {}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses longer files, as a full disk or a quota does."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def run(tape: Tape, sizes: list[int]) -> list[float]:
    """A script of one step per size; returns its losses."""
    losses = []
    for step, size in enumerate(sizes):
        tape.emit("forward", "fc", "out", np.full(size, step, np.float32))
        losses.append(0.5 * step)
        tape.advance()
    return losses


def check(path: Path) -> None:
    """Steps 0 and 1 are there and sound, nothing else is, and the manifest says why."""
    assert verify(path).sound
    with Trace(path) as trace:
        assert trace.steps == [0, 1]
        for step in trace.steps:
            array = trace.array(trace.find(f"{step}/forward/fc#0:out"))
            np.testing.assert_array_equal(array, np.full(SMALL, step, np.float32))
        assert trace.run.status == "failed"
        assert "File too large" in str(trace.run.error)
    assert not [file for file in path.rglob("*") if file.suffix == ".tmp"]


def test_the_script_is_stopped_by_default(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    with (
        files_of_at_most(LIMIT),
        pytest.raises(TraceError, match="File too large"),
        tracediff.record(path, recorder=Nothing, stack="pytorch") as tape,
    ):
        run(tape, [SMALL, SMALL, LARGE, SMALL])
    check(path)


def test_the_script_goes_on_if_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.zarr"
    with (
        files_of_at_most(LIMIT),
        tracediff.record(path, recorder=Nothing, stack="pytorch", on_error="continue") as tape,
    ):
        losses = run(tape, [SMALL, SMALL, LARGE, SMALL, LARGE])
    assert losses == [0.0, 0.5, 1.0, 1.5, 2.0]
    check(path)
    told = capsys.readouterr().err
    assert told.count("recording stopped") == 1
    assert "File too large" in told


def test_a_last_step_that_cannot_be_committed_is_no_finished_run(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    with (
        files_of_at_most(LIMIT),
        tracediff.record(path, recorder=Nothing, stack="pytorch", on_error="continue") as tape,
    ):
        run(tape, [SMALL, SMALL])
        for place in range(20_000):  # no payload: their columns are written with the commit
            tape.emit("forward", f"fc[{place}]", "out", float(place))
    check(path)


def test_an_unknown_choice_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="stop or continue"),
        tracediff.record(tmp_path / "x", recorder=Nothing, stack="pytorch", on_error="hope"),
    ):
        pass
    assert not (tmp_path / "x").exists()
