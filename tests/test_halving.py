"""Long runs: the first step that differs is found by halving, also where the difference heals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import toy
from tracediff.bisection import bisect
from tracediff.events import Event, Run, Site
from tracediff.trace import Trace, TraceWriter, verify
from tracediff.trace.summary import digest, fingerprint

Fault = Callable[[int, str, np.ndarray], np.ndarray]
SITES = ("a", "b", "c", "d")


def long_run(path: Path, steps: int, fault: Fault | None = None, size: int = 64) -> Path:
    """A trace of equal steps, whose values a fault may change in one step alone."""
    with TraceWriter(path, Run(stack="pytorch")) as writer:
        for step in range(steps):
            for order, name in enumerate(SITES):
                value = np.random.default_rng((step, order)).normal(size=size).astype(np.float32)
                if fault is not None:
                    value = fault(step, name, value)
                event = Event(
                    site=Site(step, "forward", name),
                    order=order,
                    dtype="float32",
                    shape=value.shape,
                    digest=digest(value),
                    fingerprint=fingerprint(value),
                    inputs=(order - 1,) if order else (),
                )
                writer.add(event, value)
            writer.commit_step()
    return path


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about a loss of power."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def changed_at(place: int, name: str) -> Fault:
    return lambda step, site, value: value * 2 if (step, site) == (place, name) else value


@pytest.mark.parametrize("place", [0, 1, 2, 3, 57, 98, 99])
def test_one_event_of_one_step_is_named_and_little_is_read(tmp_path: Path, place: int) -> None:
    a = long_run(tmp_path / "a.zarr", 100)
    b = long_run(tmp_path / "b.zarr", 100, changed_at(place, "d"))  # what follows is equal again
    verdict = bisect(a, b)
    assert verdict.outcome == "diverged"
    assert verdict.first is not None
    assert verdict.first.site == f"{place}/forward/d#0:out"
    assert sum(stage.compared for stage in verdict.stages) == 4 * (place + 1)
    before = place - 1 if place else 0
    assert verdict.last_agreeing == (f"{place}/forward/c#0:out" if place >= before else None)


def test_equal_runs_are_proven_equal_from_three_steps(tmp_path: Path) -> None:
    a, b = (long_run(tmp_path / f"{name}.zarr", 200) for name in "ab")
    with Trace(a) as one, Trace(b) as two:
        verdict = bisect(one, two)
        assert (verdict.outcome, verdict.reason) == (
            "identical",
            "all 800 events compared are bit-equal",
        )
        assert verdict.cost.events == 2 * 2 * 4
        assert verdict.cost.bytes_read < 0.1 * verdict.cost.bytes_stored


def test_the_number_of_indices_read_grows_with_the_logarithm(tmp_path: Path) -> None:
    read = []
    for steps in (16, 256):
        a = long_run(tmp_path / f"a{steps}.zarr", steps)
        b = long_run(tmp_path / f"b{steps}.zarr", steps, changed_at(steps - 2, "d"))
        verdict = bisect(a, b)
        assert verdict.first is not None
        assert verdict.first.site == f"{steps - 2}/forward/d#0:out"
        read.append(verdict.cost.bytes_read)
    assert read[1] < 2 * read[0]  # 16 times the steps, and 4 more doublings and halvings


def test_without_an_index_the_answer_is_the_same(tmp_path: Path) -> None:
    a = long_run(tmp_path / "a.zarr", 30)
    b = long_run(tmp_path / "b.zarr", 30, changed_at(20, "d"))
    for file in (b / "index" / "0").iterdir():
        if int(file.stem) % 3:
            file.unlink()
    assert verify(b).sound
    verdict = bisect(a, b)
    assert verdict.first is not None
    assert verdict.first.site == "20/forward/d#0:out"


def test_a_prefix_that_lies_is_found_by_verify(tmp_path: Path) -> None:
    path = long_run(tmp_path / "a.zarr", 5)
    other = long_run(tmp_path / "b.zarr", 5, changed_at(2, "a"))
    name = Path("index") / "0" / "00000003.json"
    (path / name).write_bytes((other / name).read_bytes())
    damage = verify(path).damage
    assert [d.where for d in damage] == [str(name)]


def test_a_difference_that_heals_does_not_hide_the_next(tmp_path: Path) -> None:
    def faults(step: int, name: str, value: np.ndarray) -> np.ndarray:
        return value * 2 if (step, name) in ((20, "b"), (70, "d")) else value

    a = long_run(tmp_path / "a.zarr", 100)
    b = long_run(tmp_path / "b.zarr", 100, faults)
    verdict = bisect(a, b)
    assert verdict.first is not None
    assert verdict.first.site == "70/forward/d#0:out"
    assert any("healed: 20/forward/b#0:out" in warning for warning in verdict.warnings)
    assert verdict.cost.events == 2 * 4 * len((0, 19, 20, 69, 70))


def test_a_fault_in_the_middle_of_a_training_is_named(tmp_path: Path) -> None:
    def fault(name: str, step: int, value: toy.Array) -> toy.Array:
        return value * np.float32(1.5) if (name, step) == ("layers.1", 9) else value

    a = toy.record(tmp_path / "a.zarr", steps=14)
    b = toy.record(tmp_path / "b.zarr", steps=14, fault=fault)
    verdict = bisect(a, b)
    assert verdict.first is not None
    assert verdict.first.site == "9/forward/layers.1#0:out"
    assert verdict.first.origin == "introduced"
    assert verdict.first.detail["factor"] == pytest.approx(1.5)


def test_steps_that_only_rounding_tells_apart_are_all_judged(tmp_path: Path) -> None:
    a = toy.record(tmp_path / "a.zarr", steps=8)
    b = toy.record(tmp_path / "b.zarr", steps=8, exact=True)
    verdict = bisect(a, b)
    assert verdict.outcome == "equivalent"
    assert verdict.cost.bytes_read > 0.5 * verdict.cost.bytes_stored
