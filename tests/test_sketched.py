"""Runs of level `digest` that differ by rounding: silent, and a fault is told from what is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import toy
from tests.damage import rewrite
from tracediff.bisection import bisect
from tracediff.trace import Trace
from tracediff.trace.summary import SHORT_SKETCH, SKETCH_SIZE, shortened, sketch, sketched_distance

STEPS = 12


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about a loss of power."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def changed(name: str, step: int, by: Callable[[toy.Array], toy.Array]) -> toy.Fault:
    return lambda site, at, value: by(value) if (site, at) == (name, step) else value


def pair(folder: Path, fault: toy.Fault = toy.no_fault) -> tuple[Path, Path]:
    a = toy.record(folder / "a.zarr", steps=STEPS, level="digest")
    b = toy.record(
        folder / "b.zarr", steps=STEPS, level="digest", exact=True, stack="mlx", fault=fault
    )
    return a, b


def test_steps_between_two_whole_sketches_have_short_ones(tmp_path: Path) -> None:
    """Of the optimizer's state, and of what each module returns."""
    path = toy.record(tmp_path / "a.zarr", steps=5, level="digest")
    with Trace(path) as trace:
        kept = [e for e in trace.events(4) if e.sketch is not None]
        assert {np.size(e.sketch) for e in kept} == {SHORT_SKETCH}
        assert {(e.site.phase, e.site.port) for e in kept} == {
            ("forward", "out"),
            ("optimizer", "grad"),
            ("optimizer", "update"),
            ("optimizer", "param"),
        }
        assert {e.site.path for e in kept if e.site.phase == "forward"} == {
            "layers.0",
            "act",
            "layers.1",
            "root",
        }
        whole = {np.size(e.sketch) for e in trace.events(2) if e.sketch is not None}
        assert whole == {SKETCH_SIZE}


@pytest.mark.parametrize("size", [1e-7, 1e-4, 1e-1])
def test_distances_from_short_sketches(size: float) -> None:
    """Within four standard deviations of 12% of the true distance, whichever side is short."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=1 << 16)
    y = x + size * rng.normal(size=x.size)
    short = [shortened(sketch(value)) for value in (x, y)]
    true = float(np.linalg.norm(x - y))
    assert sketched_distance(*short) == pytest.approx(true, rel=0.48)
    assert sketched_distance(sketch(x), short[1]) == pytest.approx(true, rel=0.48)
    assert sketched_distance(sketch(x), sketch(y)) == pytest.approx(true, rel=0.15)


def test_sketches_of_another_definition_are_not_compared(tmp_path: Path) -> None:
    """As in traces of an earlier release, whose sketches would all seem to differ."""

    def earlier(document: Any) -> Any:
        del document["attributes"]["tracediff"]["sketches"]
        return document

    a, b = pair(tmp_path)
    for step in range(STEPS):
        rewrite(b, {"zarr.json": earlier}, step)
    with Trace(a) as new, Trace(b) as old:
        assert any(e.sketch is not None for e in new.events(1))
        assert all(e.sketch is None for e in old.events(1))
    assert bisect(a, b).outcome == "equivalent"


def test_rounding_alone_is_silent(tmp_path: Path) -> None:
    verdict = bisect(*pair(tmp_path))
    assert verdict.outcome == "equivalent"
    assert verdict.first is None


FAULTS = {
    "the output of a module": (
        "layers.1",
        lambda x: x * np.float32(1.02),
        "forward/layers.1#0:out",
    ),
    "the output of a module, as large as before": (
        "layers.1",
        lambda x: x[:, ::-1],
        "forward/layers.1#0:out",
    ),
    "a gradient before the update": (
        "clip layers.0.weight",
        lambda x: -x,
        "optimizer/layers.0.weight:grad",
    ),
    "the update itself": (
        "new layers.1.weight",
        lambda x: x + np.float32(1e-3) * np.sign(x),
        "optimizer/layers.1.weight:update",
    ),
}


@pytest.mark.parametrize("step", [1, 7, STEPS - 1])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_without_any_value(tmp_path: Path, name: str, step: int) -> None:
    site, by, expected = FAULTS[name]
    verdict = bisect(*pair(tmp_path, changed(site, step, by)))
    assert verdict.first is not None
    assert verdict.first.site == f"{step}/{expected}"
