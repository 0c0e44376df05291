"""Python's collector of cyclic garbage while a run is recorded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tracediff
from tests.test_buffered import Nothing
from tracediff.recording import Tape

EVENTS = 500


@pytest.fixture(autouse=True)
def threshold() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield gc.get_threshold()
    gc.set_threshold(*before)


def step(tape: Tape) -> None:
    tape.start_step()
    for index in range(EVENTS):
        tape.emit("forward", f"layers.{index}", "out", np.ones(2), attributes={"level": "op"})
    tape.advance()


def test_events_do_not_set_off_collections(tmp_path: Path) -> None:
    seen = []
    with tracediff.record(tmp_path / "run", recorder=Nothing, stack="pytorch") as tape:
        step(tape)
        gc.callbacks.append(lambda phase, info: seen.append(phase))
        for _ in range(3):
            step(tape)
        gc.callbacks.pop()
    assert len(seen) <= 2 * 3 * 2  # each begins and ends; without it, there are dozens


def test_garbage_of_the_run_is_collected(tmp_path: Path) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    with tracediff.record(tmp_path / "run", recorder=Nothing, stack="pytorch") as tape:
        step(tape)
        lost = weakref.ref(Cycle())
        kept = [[] for _ in range(10 * EVENTS + 1000)]
        assert lost() is None
    assert kept


def test_the_threshold_is_what_it_was(tmp_path: Path, threshold: tuple[int, int, int]) -> None:
    with tracediff.record(tmp_path / "run", recorder=Nothing, stack="pytorch") as tape:
        step(tape)
        assert gc.get_threshold() > (EVENTS, *threshold[1:])
    assert gc.get_threshold() == threshold


def test_so_it_is_after_a_fault(tmp_path: Path, threshold: tuple[int, int, int]) -> None:
    def fail() -> None:
        with tracediff.record(tmp_path / "run", recorder=Nothing, stack="pytorch") as tape:
            step(tape)
            raise RuntimeError("fault")

    with pytest.raises(RuntimeError, match="fault"):
        fail()
    assert gc.get_threshold() == threshold


@pytest.mark.parametrize("chosen", [(50, 5, 5), (0, 10, 10)])
def test_the_threshold_of_a_script_stays(tmp_path: Path, chosen: tuple[int, int, int]) -> None:
    with tracediff.record(tmp_path / "run", recorder=Nothing, stack="pytorch") as tape:
        step(tape)
        gc.set_threshold(*chosen)
        step(tape)
        assert gc.get_threshold() == chosen
    assert gc.get_threshold() == chosen


def test_a_collector_that_is_off_stays_off(tmp_path: Path, threshold: tuple[int, int, int]) -> None:
    gc.disable()
    try:
        with tracediff.record(tmp_path / "run", recorder=Nothing, stack="pytorch") as tape:
            step(tape)
            assert (gc.isenabled(), gc.get_threshold()) == (False, threshold)
    finally:
        gc.enable()
