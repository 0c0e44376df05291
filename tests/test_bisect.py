"""Bisection: planted faults are named exactly, clean twins are silent, claims match evidence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import toy

from tracediff.bisection import bisect, diff
from tracediff.errors import NotATraceError, UsageError


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.record(tmp_path_factory.mktemp("toy") / "baseline.zarr")


def at(name: str, step: int, change: object) -> toy.Fault:
    """A fault that applies `change` to one named value at one step."""

    def fault(found: str, at_step: int, value: toy.Array) -> toy.Array:
        return change(value) if (found, at_step) == (name, step) else value  # type: ignore[operator]

    return fault


def one_element(value: toy.Array) -> toy.Array:
    changed = value.copy()
    changed.reshape(-1)[3] += 0.05
    return changed


FAULTS = [
    (at("layers.0.weight", -1, one_element), "0/loading/layers.0.weight:param", "few elements"),
    (
        at("layers.0.weight", -1, lambda w: np.ascontiguousarray(w.T)),
        "0/loading/layers.0.weight:param",
        "transposed",
    ),
    (at("ids", 1, lambda ids: np.roll(ids, 1, axis=1)), "1/rendering/batch.input_ids", None),
    (at("layers.0", 0, lambda y: y * np.float32(1.01)), "0/forward/layers.0#0:out", "scaled"),
    (at("layers.1", 2, one_element), "2/forward/layers.1#0:out", "few elements"),
    (at("act", 1, lambda y: np.where(y > 0.9, 0.9, y)), "1/forward/act#0:out", None),
    (at("loss", 0, lambda y: y * np.float32(1.001)), "0/loss/loss#0:out", "scaled"),
    (
        at("grad act", 0, lambda g: g * np.float32(1.01)),
        "0/backward/act#0:grad_out",
        "scaled",
    ),
    (
        at("grad layers.1.weight", 1, lambda g: g * np.float32(2)),
        "1/backward/layers.1.weight#0:grad",
        "scaled",
    ),
    (
        at("clip layers.1.weight", 1, lambda g: g * np.float32(0.5)),
        "1/optimizer/layers.1.weight:grad",
        "scaled",
    ),
    (
        at("m layers.0.weight", 0, lambda m: -m),
        "0/optimizer/layers.0.weight:state.exp_avg",
        "sign",
    ),
    (
        at("new layers.0.weight", 2, lambda w: w * np.float32(1.0001)),
        "2/optimizer/layers.0.weight:update",
        None,
    ),
]


@pytest.mark.parametrize(("fault", "site", "pattern"), FAULTS, ids=[f[1] for f in FAULTS])
@pytest.mark.parametrize("exact", [False, True], ids=["same kernels", "other kernels"])
def test_a_planted_fault_is_named_and_nothing_before_it(
    baseline: Path, tmp_path: Path, fault: toy.Fault, site: str, pattern: str | None, exact: bool
) -> None:
    verdict = bisect(baseline, toy.record(tmp_path / "target.zarr", fault=fault, exact=exact))
    assert verdict.outcome == "diverged"
    assert verdict.exit_code == 1
    assert verdict.first is not None
    assert verdict.first.site == site
    assert verdict.first.origin == "introduced"
    if pattern is not None:
        assert verdict.first.pattern == pattern
    assert verdict.reason


def test_rounding_alone_is_equivalent(baseline: Path, tmp_path: Path) -> None:
    verdict = bisect(baseline, toy.record(tmp_path / "target.zarr", exact=True))
    assert (verdict.outcome, verdict.exit_code, verdict.first) == ("equivalent", 0, None)
    forward = next(stage for stage in verdict.stages if stage.stage == "forward")
    assert forward.differing > 0  # the twin is a genuine variation
    assert {s.stage for s in verdict.stages if s.compared == 0} == set()


def test_the_same_run_twice_is_identical(baseline: Path, tmp_path: Path) -> None:
    verdict = bisect(baseline, toy.record(tmp_path / "target.zarr"))
    assert (verdict.outcome, verdict.coverage) == ("identical", 1.0)


def test_a_trace_against_itself_says_nothing_about_a_model(baseline: Path) -> None:
    verdict = bisect(baseline, baseline)
    assert (verdict.outcome, verdict.exit_code) == ("incomparable", 125)
    assert "same trace" in verdict.reason


def test_a_dropped_newline_is_rendering_and_not_arithmetic(baseline: Path, tmp_path: Path) -> None:
    target = toy.record(tmp_path / "t.zarr", text="<|user|>\nHow much?\n<|assistant|>")
    first = bisect(baseline, target).first
    assert first is not None
    assert (first.site, first.kind, first.pattern) == (
        "0/rendering/sample[0].text",
        "text",
        "newline",
    )


def test_missing_bias_correction_is_named_as_the_setting(baseline: Path, tmp_path: Path) -> None:
    first = bisect(baseline, toy.record(tmp_path / "t.zarr", bias_correction=False)).first
    assert first is not None
    assert (first.stage, first.step, first.kind) == ("optimizer", 0, "setting")
    assert first.settings == (("bias_correction", True, False),)


def test_a_schedule_off_by_one_is_named_at_its_step(baseline: Path, tmp_path: Path) -> None:
    target = toy.record(tmp_path / "t.zarr", lr=lambda step: 1e-2 / max(step, 1))
    first = bisect(baseline, target).first
    assert first is not None
    assert (first.stage, first.step, first.port) == ("optimizer", 1, "hyper")
    assert first.settings[0][0] == "lr"


def test_what_follows_a_fault_is_inherited(baseline: Path, tmp_path: Path) -> None:
    fault = at("layers.0", 0, lambda y: y * np.float32(1.01))
    verdict = bisect(baseline, toy.record(tmp_path / "t.zarr", fault=fault))
    assert verdict.also == ()
    assert verdict.last_agreeing == "0/forward/layers.0#0:in"
    marks = {n.site: n.mark for n in verdict.neighbours}
    assert marks["0/forward/layers.0#0:in"] == "identical"
    assert marks["0/forward/act#0:out"] == "diverged"


def test_two_independent_faults_are_both_told(baseline: Path, tmp_path: Path) -> None:
    def fault(name: str, step: int, value: toy.Array) -> toy.Array:
        if name in ("layers.0", "grad act"):
            return value * np.float32(1.5)
        return value

    verdict = bisect(baseline, toy.record(tmp_path / "t.zarr", fault=fault))
    assert verdict.first is not None
    assert verdict.first.site == "0/forward/layers.0#0:out"


def test_nan_on_one_side_is_told(baseline: Path, tmp_path: Path) -> None:
    def poison(value: toy.Array) -> toy.Array:
        changed = value.copy()
        changed[0, 0, 0] = np.nan
        return changed

    target = toy.record(tmp_path / "t.zarr", fault=at("act", 0, poison))
    first = bisect(baseline, target).first
    assert first is not None
    assert (first.site, first.kind) == ("0/forward/act#0:out", "nonfinite")


def test_generators_that_differ_without_effect_do_not_decide(
    baseline: Path, tmp_path: Path
) -> None:
    fault = at("rng", 1, lambda state: state + np.uint32(1))
    verdict = bisect(baseline, toy.record(tmp_path / "t.zarr", fault=fault))
    assert verdict.exit_code == 0
    assert any("generators differ" in warning for warning in verdict.warnings)


def test_an_idle_generator_does_not_hide_a_later_fault(baseline: Path, tmp_path: Path) -> None:
    state = np.arange(4, dtype=np.uint32)

    def idle(seed: int, scale: float) -> toy.Fault:
        def fault(name: str, step: int, value: toy.Array) -> toy.Array:
            if name == "rng":
                return state + np.uint32(seed)  # the same at every step: nobody draws
            return value * np.float32(scale) if name == "act" else value

        return fault

    a = toy.record(tmp_path / "a.zarr", fault=idle(0, 1.0))
    first = bisect(a, toy.record(tmp_path / "b.zarr", fault=idle(1, 1.01))).first
    assert first is not None
    assert first.site == "0/forward/act#0:out"


def test_generators_that_were_drawn_from_are_where_the_runs_part(
    baseline: Path, tmp_path: Path
) -> None:
    def fault(name: str, step: int, value: toy.Array) -> toy.Array:
        if step == 1 and name == "rng":
            return value + np.uint32(7)
        return value * np.float32(1.01) if (name, step) == ("act", 1) else value

    first = bisect(baseline, toy.record(tmp_path / "t.zarr", fault=fault)).first
    assert first is not None
    assert first.site == "1/rng/python:state"


def test_a_longer_finished_run_diverges_where_the_shorter_ends(
    baseline: Path, tmp_path: Path
) -> None:
    verdict = bisect(baseline, toy.record(tmp_path / "t.zarr", steps=2))
    assert verdict.first is not None
    assert (verdict.first.kind, verdict.first.step) == ("missing", 2)


def test_a_run_that_was_cut_off_is_compared_over_what_it_has(
    baseline: Path, tmp_path: Path
) -> None:
    verdict = bisect(baseline, toy.record(tmp_path / "t.zarr", steps=2, finish=False))
    assert verdict.outcome == "identical"
    assert any("cut off" in warning for warning in verdict.warnings)


def test_all_zero_captures_are_a_recorder_fault(tmp_path: Path) -> None:
    def zero(name: str, step: int, value: toy.Array) -> toy.Array:
        return np.zeros_like(value) if name in ("layers.0", "act", "layers.1") else value

    a = toy.record(tmp_path / "a.zarr")
    verdict = bisect(a, toy.record(tmp_path / "b.zarr", fault=zero))
    assert verdict.outcome == "incomparable"
    assert "recorder fault" in verdict.reason


@pytest.mark.parametrize("exact", [False, True])
def test_digest_traces_compare_by_sketch(tmp_path: Path, exact: bool) -> None:
    a = toy.record(tmp_path / "a.zarr", level="digest")
    clean = bisect(a, toy.record(tmp_path / "b.zarr", level="digest", exact=exact))
    assert clean.outcome == ("equivalent" if exact else "identical")
    fault = at("act", 1, lambda y: y * np.float32(1.01))
    target = toy.record(tmp_path / "c.zarr", level="digest", exact=exact, fault=fault)
    first = bisect(a, target).first
    assert first is not None
    assert first.site == "1/forward/act#0:out"
    assert first.error.estimated
    assert first.error.rel_l2 == pytest.approx(0.01, rel=0.3)


def test_a_tolerance_of_the_user_replaces_the_bound(baseline: Path, tmp_path: Path) -> None:
    fault = at("loss", 0, lambda y: y * np.float32(1.001))
    target = toy.record(tmp_path / "t.zarr", fault=fault)
    assert bisect(baseline, target, rtol=["0/loss/*=1e-2"]).outcome == "equivalent"
    assert bisect(baseline, target, rtol=["0/loss/*=1e-4"]).outcome == "diverged"


@pytest.mark.parametrize("option", ["nonsense", "*=-1", "*=nan", "*=x"])
def test_a_malformed_tolerance_is_refused(baseline: Path, option: str) -> None:
    with pytest.raises(UsageError, match="PATTERN=VALUE"):
        bisect(baseline, baseline, rtol=[option])


def test_low_coverage_gives_no_clean_verdict(baseline: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[[ignore]]\npattern = 'layers|act'\n")
    target = toy.record(tmp_path / "t.zarr", exact=True)
    verdict = bisect(baseline, target, rules=rules)
    assert verdict.outcome == "incomparable"
    assert "coverage" in verdict.reason
    assert sum(row.count for row in verdict.unmatched) > 0


def test_diff_lists_every_site(baseline: Path, tmp_path: Path) -> None:
    fault = at("act", 1, lambda y: y * np.float32(1.01))
    rows = diff(baseline, toy.record(tmp_path / "t.zarr", fault=fault))
    marks = {row.site: row.mark for row in rows}
    assert marks["0/forward/act#0:out"] == "identical"
    assert marks["1/forward/act#0:out"] == "diverged"
    assert marks["2/optimizer/layers.0.weight:param"] == "diverged"


def test_a_path_that_is_no_trace_is_refused(baseline: Path, tmp_path: Path) -> None:
    with pytest.raises(NotATraceError):
        bisect(baseline, tmp_path / "nothing.zarr")
