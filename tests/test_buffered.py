"""Writing beside the program: the same trace, bounded memory, and nothing lost without a word."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tracediff
from tests.test_full_disk import LARGE, LIMIT, SMALL, Nothing, check, files_of_at_most, run
from tracediff.errors import TraceError, UsageError
from tracediff.events import Run
from tracediff.policy import Policy
from tracediff.tape import Tape
from tracediff.trace import BufferedWriter, Trace, TraceWriter, verify
from tracediff.trace.segment_writer import SegmentWriter

MIB = 1 << 20


@contextmanager
def tape_into(path: Path, limit: int, on_full: str = "wait") -> Iterator[Tape]:
    writer = TraceWriter(path, Run(stack="pytorch"))
    buffered = BufferedWriter(writer, limit, on_full) if limit else writer
    with Tape(buffered, Policy()) as tape:
        yield tape


def emit_steps(tape: Tape) -> None:
    """Three steps with what a run has: repeated values, views, texts, rows of samples."""
    for step in range(3):
        messages = [{"role": "user"}]
        tape.emit("rendering", "sample[0].messages", "out", messages)
        messages[0]["role"] = "changed afterwards"
        ids = np.arange(8)
        tape.emit("rendering", "sample[0].ids", "out", ids, kind="ids")
        tape.emit("rendering", "sample[1].ids", "out", ids, kind="ids")
        x = np.full((4, 5), step, np.float32)
        first = tape.emit("forward", "fc", "in", x.T)
        tape.emit("forward", "fc", "out", x.T, inputs=[first], attributes={"eps": step})
        x += 1
        tape.emit("forward", "fc", "out", x, call=1)
        tape.advance()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that takes nothing until the event is set."""
    ready = threading.Event()
    add = SegmentWriter.add

    def waiting(self: SegmentWriter, event: Any, payload: Any) -> None:
        ready.wait(30)
        add(self, event, payload)

    monkeypatch.setattr(SegmentWriter, "add", waiting)
    return ready


def test_the_trace_is_the_same_to_the_byte(tmp_path: Path) -> None:
    for name, limit in (("at_once", 0), ("beside", MIB)):
        with tape_into(tmp_path / name, limit) as tape:
            emit_steps(tape)
    for step in range(3):
        place = Path("segments", "0", f"{step:08d}.zip")
        assert (tmp_path / "beside" / place).read_bytes() == (
            tmp_path / "at_once" / place
        ).read_bytes()
    assert verify(tmp_path / "beside").sound


def test_a_full_buffer_makes_the_program_wait(tmp_path: Path, slow: threading.Event) -> None:
    emitted = []

    def program() -> None:
        with tape_into(tmp_path / "t", 2 * MIB) as tape:
            for number in range(8):
                tape.emit("forward", "fc", f"out.{number}", np.full(MIB // 4, number, np.float32))
                emitted.append(number)

    thread = threading.Thread(target=program)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert len(emitted) <= 2  # of 1 MiB each, as many as fit
    slow.set()
    thread.join(30)
    with Trace(tmp_path / "t") as trace:
        for number, event in enumerate(trace.events(0)):
            assert trace.array(event)[0] == number
        assert len(trace.events(0)) == 8


def test_payloads_are_dropped_and_digests_are_not(tmp_path: Path, slow: threading.Event) -> None:
    with tape_into(tmp_path / "t", MIB, "drop") as tape:
        for number in range(4):
            tape.emit("forward", "fc", f"out.{number}", np.full(200_000, number, np.float32))
        slow.set()
    with Trace(tmp_path / "t") as trace:
        first, *others = trace.events(0)
        assert trace.array(first)[0] == 0
        for number, event in enumerate(others, 1):
            assert event.payload is None
            assert event.attributes == {"dropped": True}
            whole = np.full(200_000, number, np.float32)
            assert event.digest == tracediff.trace.summary.digest(whole)
            assert event.fingerprint[4] == number  # the mean
        (note,) = trace.run.notes
        assert "3 payloads (2.4 MB) were dropped" in note


def test_a_full_disk_stops_the_script(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    with (
        files_of_at_most(LIMIT),
        pytest.raises(TraceError, match="File too large"),
        tracediff.record(path, recorder=Nothing, stack="pytorch", max_buffer="64M") as tape,
    ):
        run(tape, [SMALL, SMALL, LARGE, SMALL])
    check(path)


def test_a_full_disk_lets_the_script_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.zarr"
    options = {"max_buffer": "64M", "on_error": "continue"}
    with (
        files_of_at_most(LIMIT),
        tracediff.record(path, recorder=Nothing, stack="pytorch", **options) as tape,
    ):
        assert len(run(tape, [SMALL, SMALL, LARGE, SMALL, LARGE])) == 5
    check(path)
    assert capsys.readouterr().err.count("recording stopped") == 1


def test_a_forked_child_writes_nothing_and_ends(tmp_path: Path) -> None:
    with tape_into(tmp_path / "t", MIB) as tape:
        tape.emit("forward", "fc", "out", np.zeros(MIB, np.float32))
        child = os.fork()
        if not child:
            tape.emit("forward", "child", "out", np.ones(MIB, np.float32))
            tape.advance()
            tape.writer.finish()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    with Trace(tmp_path / "t") as trace:
        assert [event.site.path for event in trace.events(0)] == ["fc"]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"max_buffer": "much"}, "no size"), ({"on_full": "burst"}, "wait or drop")],
    ids=["size", "choice"],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, str], said: str) -> None:
    with (
        pytest.raises(UsageError, match=said),
        tracediff.record(tmp_path / "x", recorder=Nothing, stack="pytorch", **options),
    ):
        pass
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("limit", [0, MIB], ids=["at once", "beside"])
def test_values_of_any_layout_are_those_that_were_passed(tmp_path: Path, limit: int) -> None:
    """Each is laid out anew in the same memory."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((3, 40, 50)).transpose(0, 2, 1) for _ in range(4)]
    values += [values[0][:, ::-2], rng.standard_normal((700, 800)).T]
    with tape_into(tmp_path / "a", limit) as tape:
        for call, value in enumerate(values):
            tape.emit("forward", "fc", "out", value, call=call)
        tape.advance()
    assert verify(tmp_path / "a").sound
    with Trace(tmp_path / "a") as trace:
        for event, value in zip(trace.events(0), values, strict=True):
            np.testing.assert_array_equal(trace.array(event), value)
