"""Creating, overwriting, locking and ending a trace."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tracediff.errors import NotATraceError, TraceError, TraceExistsError
from tracediff.events import Run, Site
from tracediff.recording import Policy, Tape
from tracediff.testing import build_event, build_trace
from tracediff.trace import Trace, TraceWriter, placing, verify
from tracediff.trace.summary import digest, digest_value

RUN = Run(stack="pytorch")
VALUES = [("0/forward/m#0:out", np.arange(3.0)), ("1/forward/m#0:out", np.arange(3.0))]


def litter(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_a_new_trace_is_one_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep/er/t.zarr"
    open_writer = TraceWriter(path, RUN)
    trace = Trace(path)
    assert trace.run.status == "recording"
    assert trace.steps == []
    assert verify(path).cut_off
    open_writer.finish()
    assert Trace(path).is_complete
    assert litter(path.parent) == ["t.zarr"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    TraceWriter(tmp_path, RUN).finish()
    assert Trace(tmp_path).run.status == "finished"


def test_relative_paths_survive_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    open_writer = TraceWriter("t.zarr", RUN)
    monkeypatch.chdir(tmp_path / "elsewhere")
    open_writer.add(build_event("0/environment/x:out", 1), None)
    open_writer.finish()
    assert Trace(tmp_path / "t.zarr").steps == [0]


# ---- overwriting -----------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_but_a_trace_is_ever_replaced(tmp_path: Path, overwrite: bool) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.jpg").write_text("precious")
    file = tmp_path / "file"
    file.write_text("precious")
    zarr_group = tmp_path / "other.zarr"
    zarr_group.mkdir()
    (zarr_group / "zarr.json").write_text('{"attributes": {}}')
    for path in (folder, file, zarr_group):
        with pytest.raises(TraceExistsError, match="choose another path"):
            TraceWriter(path, RUN, overwrite=overwrite)
    assert (folder / "a.jpg").read_text() == file.read_text() == "precious"
    assert litter(tmp_path) == ["file", "other.zarr", "photos"]


def test_a_trace_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = build_trace(tmp_path / "t", VALUES)
    with pytest.raises(TraceExistsError, match="--overwrite"):
        TraceWriter(path, RUN)
    assert Trace(path).steps == [0, 1]
    with TraceWriter(path, Run(stack="mlx"), overwrite=True) as new:
        assert Trace(path).run.stack == "mlx"
        new.add(build_event("7/environment/x:out", 1), None)
    assert Trace(path).steps == [7]
    assert verify(path).sound
    assert litter(tmp_path) == ["t"]


def test_a_trace_with_a_users_own_file_in_it_is_kept(tmp_path: Path) -> None:
    path = build_trace(tmp_path / "t", VALUES)
    (path / "notes.md").write_text("precious")
    with pytest.raises(TraceExistsError, match=r"notes\.md"):
        TraceWriter(path, RUN, overwrite=True)
    assert Trace(path).steps == [0, 1]


def test_the_old_trace_survives_a_failure_to_write_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_trace(tmp_path / "t", VALUES)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(placing, "write_manifest", full)
    with pytest.raises(TraceError, match=r"cannot write .*No space left"):
        TraceWriter(path, RUN, overwrite=True)
    assert verify(path).sound
    assert Trace(path).steps == [0, 1]
    assert litter(tmp_path) == ["t"]
    monkeypatch.undo()
    TraceWriter(path, RUN, overwrite=True).finish()  # the failure left no lock behind


def test_the_old_trace_survives_a_failed_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_trace(tmp_path / "t", VALUES)
    rename = Path.rename

    def fails_for_the_new(self: Path, target: Path) -> Path:
        if self.suffix == ".new":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_new)
    with pytest.raises(TraceError):
        TraceWriter(path, RUN, overwrite=True)
    assert Trace(path).steps == [0, 1]
    assert litter(tmp_path) == ["t"]


# ---- two writers -----------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_writer_is_refused(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "t"
    first = TraceWriter(path, RUN)
    with pytest.raises(TraceExistsError):
        TraceWriter(path, RUN, overwrite=overwrite)
    first.add(build_event("0/environment/x:out", 1), None)
    first.finish()
    assert Trace(path).steps == [0]
    TraceWriter(path, RUN, overwrite=True).finish()  # finishing released the lock


def test_an_overwriting_writer_holds_the_lock(tmp_path: Path) -> None:
    path = build_trace(tmp_path / "t", VALUES)
    first = TraceWriter(path, RUN, overwrite=True)
    with pytest.raises(TraceExistsError, match="another process is recording"):
        TraceWriter(path, RUN, overwrite=True)
    first.finish()


def test_a_killed_writer_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "t"
    script = (
        "import sys; from tracediff.events import Run; from tracediff.trace import TraceWriter\n"
        "w = TraceWriter(sys.argv[1], Run(stack='x')); print('ready', flush=True); input()"
    )
    command = [sys.executable, "-c", script, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(TraceExistsError, match="another process is recording"):
            TraceWriter(path, RUN, overwrite=True)
        os.kill(process.pid, signal.SIGKILL)
    TraceWriter(path, RUN, overwrite=True).finish()
    assert Trace(path).is_complete


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    open_writer = TraceWriter(tmp_path / "t", RUN)
    open_writer.add(build_event("0/environment/x:out", 1), None)
    child = os.fork()
    if child == 0:
        open_writer.add(build_event("0/forward/child#0:out", np.ones(9), 1), np.ones(9))
        open_writer.add_note("child")
        open_writer.discard_step()
        open_writer.finish("failed")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(TraceExistsError):
        TraceWriter(tmp_path / "t", RUN, overwrite=True)
    open_writer.finish()
    trace = Trace(tmp_path / "t")
    assert [event.site.path for event in trace.events()] == ["x"]
    assert (trace.run.status, trace.run.notes) == ("finished", ())
    assert verify(trace.path).sound  # the child wrote nothing into the open file either


def test_ranks_write_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(NotATraceError, match="start rank 0 first"):
        TraceWriter(path, RUN, rank=1)
    first = TraceWriter(path, RUN)
    second = TraceWriter(path, RUN, rank=1)
    with pytest.raises(TraceExistsError):
        TraceWriter(path, RUN, rank=1)
    first.add(build_event("0/environment/x:out", "rank 0"), None)
    second.add(build_event("0/environment/x:out", "rank 1"), None)
    second.finish()
    assert not Trace(path).is_complete
    first.finish()
    assert [Trace(path, rank=r).events()[0].value for r in (0, 1)] == ["rank 0", "rank 1"]
    found = verify(path)
    assert (found.sound, found.steps) == (True, 2)


# ---- steps and the end -----------------------------------------------------------------------


def test_steps_without_events_commit_nothing(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", RUN) as open_writer:
        open_writer.commit_step()
        open_writer.add(build_event("4/environment/x:out", 1), None)
        open_writer.commit_step()
        open_writer.commit_step()
    assert Trace(tmp_path / "t").steps == [4]


def test_a_discarded_step_leaves_nothing(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", RUN) as open_writer:
        open_writer.add(build_event("0/forward/x#0:out", np.ones(3)), np.ones(3))
        open_writer.discard_step()
        open_writer.add(build_event("0/environment/kept:out", 1), None)
    found = verify(tmp_path / "t")
    assert (found.steps, found.events, found.unfinished) == (1, 1, [])


def test_events_of_a_wrong_step_are_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", RUN) as open_writer:
        open_writer.add(build_event("3/environment/x:out", 1), None)
        with pytest.raises(ValueError, match="step 3 is open"):
            open_writer.add(build_event("4/environment/x:out", 1), None)
        open_writer.commit_step()
        for step in (2, 3):
            with pytest.raises(ValueError, match="committed already"):
                open_writer.add(build_event(f"{step}/environment/x:out", 1), None)
    with pytest.raises(ValueError, match="finished"):
        open_writer.add(build_event("5/environment/x:out", 1), None)


def test_an_exception_keeps_the_open_step_and_says_so(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(RuntimeError),
        TraceWriter(tmp_path / "t", RUN) as open_writer,
    ):
        open_writer.add(build_event("0/environment/x:out", 1), None)
        raise RuntimeError("out of memory\nand more")
    trace = Trace(tmp_path / "t")
    assert (trace.run.status, trace.run.error) == ("failed", "RuntimeError: out of memory")
    assert len(trace.events()) == 1
    open_writer.finish()
    assert Trace(tmp_path / "t").run.status == "failed"


def test_notes_are_on_the_disk_at_once(tmp_path: Path) -> None:
    open_writer = TraceWriter(tmp_path / "t", RUN)
    open_writer.add_note("torch.compile ran eagerly")
    assert Trace(tmp_path / "t").run.notes == ("torch.compile ran eagerly",)
    open_writer.finish()
    assert open_writer.run == Trace(tmp_path / "t").run


def test_a_full_disk_is_told_and_earlier_steps_stay(tmp_path: Path) -> None:
    """The limit on the size of files stands for the disk."""
    open_writer = TraceWriter(tmp_path / "t", RUN)
    open_writer.add(build_event("0/environment/x:out", 1), None)
    open_writer.commit_step()
    array = np.zeros(1 << 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(TraceError, match=r"cannot write .*File too large"):
            open_writer.add(build_event("1/forward/m#0:out", array), array)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    open_writer.discard_step()
    open_writer.finish("failed", "disk full")
    found = verify(tmp_path / "t")
    assert (found.sound, found.steps) == (True, 1)


def test_memory_stays_flat_while_payloads_are_written(tmp_path: Path) -> None:
    array = np.arange(1 << 18, dtype=np.float32)  # 1 MiB
    event = build_event("0/forward/m#0:out", array)
    with TraceWriter(tmp_path / "t", RUN) as open_writer:
        tracemalloc.start()
        for order in range(24):
            array[0] = order
            one = replace(event, order=order, site=Site(0, "forward", f"m{order}"), digest=b"")
            open_writer.add(one, array)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 3 << 20
    assert Trace(tmp_path / "t").bytes_stored > 24 << 20


def test_a_tape_writes_what_a_trace_reads(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", RUN) as open_writer:
        tape = Tape(open_writer, Policy())
        for step in range(2):
            frame = tape.enter("model.norm", "RMSNorm")
            tape.emit_in(frame, "in", np.full((1, 2), step, np.float32))
            tape.emit_out(frame, "out", np.full((1, 2), step + 1, np.float32))
            tape.exit(frame)
            tape.advance()
    trace = Trace(tmp_path / "t")
    given, made = trace.events(1)
    assert str(made.site) == "1/forward/model.norm#0:out"
    assert made.inputs == (given.order,)
    assert trace.array(made).tolist() == [[2, 2]]
    assert verify(trace.path).sound


def test_what_is_recorded_is_not_altered_afterwards(tmp_path: Path) -> None:
    given, known, array = {"betas": [0.9]}, {"shape": [2, 3]}, np.zeros(4, np.float32)
    with Tape(TraceWriter(tmp_path / "t", RUN), Policy(level="digest")) as tape:
        tape.emit("environment", "optimizer", "out", given)
        tape.emit("forward", "fc", "out", array, attributes=known)
        given["betas"][0] = known["shape"][0] = 7
        array += 1
    trace = Trace(tmp_path / "t")
    setting, tensor = trace.events(0)
    assert setting.value == {"betas": [0.9]}
    assert setting.digest == digest_value({"betas": [0.9]})
    assert tensor.attributes == {"shape": [2, 3]}
    assert tensor.digest == digest(np.zeros(4, np.float32))
    assert trace.run.status == "finished"


def test_events_after_the_last_step_are_kept_where_a_run_fails(tmp_path: Path) -> None:
    def run() -> None:
        with Tape(TraceWriter(tmp_path / "t", RUN), Policy(level="digest")) as tape:
            tape.emit("forward", "fc", "out", np.ones(4, np.float32))
            raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError, match="no such luck"):
        run()
    trace = Trace(tmp_path / "t")
    assert [str(event.site) for event in trace.events(0)] == ["0/forward/fc#0:out"]
    assert (trace.run.status, trace.run.error) == ("failed", "RuntimeError: no such luck")
