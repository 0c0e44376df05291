"""Values that are computed after they were recorded: the trace is the one of a run without them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tracediff.deferred import LARGEST_WAIT, Deferred
from tracediff.events import Event, Run
from tracediff.policy import Policy
from tracediff.tape import Tape
from tracediff.trace import Trace, TraceWriter

Lazy = Callable[[], NDArray[Any]]


def lazy(value: float, size: int = 4) -> Deferred:
    array = np.full(size, value, np.float32)
    return Deferred(lambda: array, array.nbytes)


class Framework:
    """Computes what is lazy, and keeps how many arrays it was asked for at a time."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def read(self, arrays: list[Lazy]) -> list[NDArray[Any]]:
        self.asked.append(len(arrays))
        return [array() for array in arrays]


def record(path: Path, job: Callable[[Tape], Any]) -> tuple[list[Event], list[int]]:
    """The events of a job in the order in which they lie in the file, and what was asked for."""
    framework = Framework()
    with TraceWriter(path, Run(stack="toy")) as writer:
        tape = Tape(writer, Policy())
        tape.waiting.read = framework.read
        job(tape)
        tape.advance()
        writer.finish()
    with Trace(path) as trace:
        return trace.events(), framework.asked


def forward(tape: Tape, make: Callable[[float], Any]) -> None:
    for step in range(2):
        first = tape.emit("forward", "a", "in", make(step))
        second = tape.emit("forward", "a", "out", make(step + 1), inputs=[first])
        tape.emit("environment", f"eps[{step}]", "out", 0.1)
        tape.emit("forward", "b", "out", make(step + 2), inputs=[second], attributes={"x": 1})
        tape.advance()


def test_the_trace_is_that_of_values_which_were_there_at_once(tmp_path: Path) -> None:
    found, asked = record(tmp_path / "lazy.zarr", lambda tape: forward(tape, lazy))
    expected, _ = record(
        tmp_path / "eager.zarr",
        lambda tape: forward(tape, lambda value: np.full(4, value, np.float32)),
    )
    assert str(found) == str(expected)  # as texts, since not-a-number is equal to nothing
    assert asked == [3, 3]  # a setting among them waits, too


def test_what_waits_is_bounded_by_its_bytes(tmp_path: Path) -> None:
    def job(tape: Tape) -> None:
        for number in range(10):
            tape.emit("forward", f"a{number}", "out", lazy(number, LARGEST_WAIT // 4 // 4 + 1))

    events, asked = record(tmp_path / "run.zarr", job)
    assert [event.order for event in events] == list(range(10))
    assert asked == [4, 4, 2]


def test_digests_and_norms_can_be_asked_for_while_values_wait(tmp_path: Path) -> None:
    known: list[Any] = []

    def job(tape: Tape) -> None:
        first = tape.emit("forward", "a", "out", lazy(3.0))
        second = tape.emit("forward", "b", "out", lazy(3.0))
        known.extend([tape.norm_of(first), tape.digest_of(second)])

    events, _ = record(tmp_path / "run.zarr", job)
    assert known == [6.0, events[0].digest]


def test_another_thread_computes_nothing_and_keeps_its_place(tmp_path: Path) -> None:
    threads = []

    def job(tape: Tape) -> None:
        read = tape.waiting.read

        def watched(arrays: list[Any]) -> Any:
            threads.append(threading.get_ident())
            return read(arrays)

        tape.waiting.read = watched
        value = [1]

        def other() -> None:
            tape.emit("rendering", "sample[0].ids", "out", value)
            value.append(2)

        tape.emit("forward", "a", "out", lazy(1.0))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        tape.emit("forward", "b", "out", lazy(2.0))

    events, _ = record(tmp_path / "run.zarr", job)
    assert [event.site.path for event in events] == ["a", "sample[0].ids", "b"]
    assert events[1].value == [1]
    assert threads == [threading.get_ident()]


def test_a_value_that_is_not_there_after_all_leaves_orders_as_they_are(tmp_path: Path) -> None:
    def job(tape: Tape) -> None:
        tape.waiting.read = lambda arrays: [None for _ in arrays]
        first = tape.emit("forward", "a", "out", lazy(1.0))
        tape.emit("forward", "b", "out", np.zeros(3), inputs=[first])

    first, second = record(tmp_path / "run.zarr", job)[0]
    assert (first.kind, first.value) == ("setting", None)
    assert second.inputs == (first.order,)


def test_what_waits_when_it_cannot_be_read_waits_on(tmp_path: Path) -> None:
    def job(tape: Tape) -> None:
        read = tape.waiting.read

        def interrupted(arrays: list[Any]) -> Any:
            tape.waiting.read = read
            raise KeyboardInterrupt

        tape.emit("forward", "a", "out", lazy(1.0))
        tape.waiting.read = interrupted
        with pytest.raises(KeyboardInterrupt):
            tape.settle()

    events, asked = record(tmp_path / "run.zarr", job)
    assert [event.site.path for event in events] == ["a"]
    assert asked == [1]
