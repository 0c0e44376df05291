"""Long runs that differ by rounding in every step: the same verdict as from all of their steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import toy
from tracediff.bisection import bisect
from tracediff.trace import Trace, verify
from tracediff.verdict import Verdict

STEPS = 100
Change = Callable[[toy.Array], toy.Array]


@pytest.fixture(scope="module", autouse=True)
def quick_disk() -> object:
    """Nothing here is about a loss of power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def steady(step: int) -> float:
    return 1e-3


def recorded(path: Path, steps: int = STEPS, level: str = "digest", **options: object) -> Path:
    return toy.record(path, steps=steps, level=level, lr=options.pop("lr", steady), **options)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("long") / "a.zarr")


def other(path: Path, steps: int = STEPS, level: str = "digest", **options: object) -> Path:
    """The run of another stack, whose values differ by rounding from the first step on."""
    return recorded(path, steps, level, exact=True, stack="mlx", **options)


def places(verdict: Verdict) -> object:
    """What a verdict says of the first divergence."""
    first = verdict.first
    return first and (first.site, first.kind, first.origin, first.pattern, first.blame)


def at(faults: dict[int, tuple[str, Change]]) -> toy.Fault:
    def fault(name: str, step: int, value: toy.Array) -> toy.Array:
        site, change = faults.get(step, ("", None))
        return change(value) if change is not None and site == name else value

    return fault


def pushed(value: toy.Array) -> toy.Array:
    """A weight after a wrong update: a thousandth off, in no special direction."""
    noise = np.random.default_rng(5).normal(size=value.shape).astype(np.float32)
    return value + np.float32(1e-3) * np.abs(value).mean() * noise


def scaled(value: toy.Array) -> toy.Array:
    return value * np.float32(1.01)


FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "update, first step left out": (
        {"fault": at({3: ("new layers.0.weight", pushed)})},
        "3/optimizer/layers.0.weight:update",
    ),
    "update, in the middle": (
        {"fault": at({57: ("new layers.0.weight", pushed)})},
        "57/optimizer/layers.0.weight:update",
    ),
    "update, last step": (
        {"fault": at({STEPS - 1: ("new layers.1.weight", pushed)})},
        f"{STEPS - 1}/optimizer/layers.1.weight:update",
    ),
    "forward pass": ({"fault": at({41: ("layers.1", scaled)})}, "41/forward/layers.1#0:out"),
    "learning rate": (
        {"lr": lambda step: 1.1e-3 if step == 66 else 1e-3},
        "66/optimizer/layers.1.weight:hyper",
    ),
    "loss that heals at once, and again": (
        {"fault": at({30: ("loss", scaled), 71: ("loss", scaled)})},
        "30/loss/loss#0:out",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_as_from_all_steps(baseline: Path, tmp_path: Path, name: str) -> None:
    options, site = FAULTS[name]
    target = other(tmp_path / "b.zarr", **options)
    verdict = bisect(baseline, target)
    assert verdict.first is not None
    assert verdict.first.site == site
    assert places(verdict) == places(bisect(baseline, target, every_step=True))
    if verdict.first.step > 40:
        assert verdict.cost.bytes_read < 0.3 * verdict.cost.bytes_stored


def test_rounding_that_grows_is_silent_and_hardly_read(baseline: Path, tmp_path: Path) -> None:
    target = other(tmp_path / "b.zarr")
    verdict, whole = bisect(baseline, target), bisect(baseline, target, every_step=True)
    assert (verdict.outcome, whole.outcome) == ("equivalent", "equivalent")
    counted = [[s for s in v.stages if s.stage != "rng"] for v in (verdict, whole)]
    compared = [[stage.compared for stage in stages] for stages in counted]
    assert compared[0] == compared[1]
    assert verdict.cost.bytes_read < 0.3 * whole.cost.bytes_read
    assert any("steps were compared by sums" in warning for warning in verdict.warnings)
    assert verify(target).sound


def test_what_its_bound_allows_and_no_step_before_is_told(
    baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times as far apart as before is told here, since nothing wider is within these bounds."""
    monkeypatch.setattr("tracediff.bisection.course.CLEAR", 8.0)
    nudged = at({57: ("layers.0", lambda value: value * np.float32(1 + 2.4e-6))})
    for fault, told in ((nudged, ["57/forward/layers.0#0:out"]), (at({}), [])):
        verdict = bisect(baseline, other(tmp_path / f"{len(told)}.zarr", fault=fault))
        assert verdict.outcome == "equivalent"
        jumps = [w.split()[0] for w in verdict.warnings if "times as far apart as such values" in w]
        assert jumps == told


def test_values_that_were_kept_are_read_for_suspects_only(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a.zarr", 60, "module")
    b = other(tmp_path / "b.zarr", 60, "module", fault=at({37: ("layers.0", scaled)}))
    verdict = bisect(a, b)
    assert verdict.first is not None
    assert verdict.first.site == "37/forward/layers.0#0:out"
    assert verdict.first.detail["factor"] == pytest.approx(1.01, rel=1e-3)
    assert places(verdict) == places(bisect(a, b, every_step=True))
    assert verdict.cost.bytes_read < 0.4 * verdict.cost.bytes_stored


def test_sums_that_are_not_those_of_the_index_are_not_believed(
    baseline: Path, tmp_path: Path
) -> None:
    target = other(tmp_path / "b.zarr", fault=at({57: ("layers.1", scaled)}))
    for file in (target / "index" / "0").glob("*.sums"):
        file.write_bytes(bytes(file.stat().st_size))
    with Trace(target) as trace:
        assert trace.sums(50) is None
    verdict = bisect(baseline, target)
    assert verdict.first is not None
    assert verdict.first.site == "57/forward/layers.1#0:out"


@pytest.mark.slow
def test_five_hundred_steps(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a.zarr", 500)
    clean = bisect(a, other(tmp_path / "b.zarr", 500))
    assert clean.outcome == "equivalent"
    assert clean.cost.bytes_read < 0.05 * clean.cost.bytes_stored
    c = other(tmp_path / "c.zarr", 500, fault=at({350: ("new layers.0.weight", pushed)}))
    faulty = bisect(a, c)
    assert faulty.first is not None
    assert faulty.first.site == "350/optimizer/layers.0.weight:update"
    assert places(faulty) == places(bisect(a, c, every_step=True))
