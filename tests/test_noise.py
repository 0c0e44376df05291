"""A replicate as measured floor: it widens bounds where the baseline is noisy, only there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import toy

from tracediff.bisection import bisect, diff
from tracediff.cli import main
from tracediff.errors import UsageError

NOISY = "0/forward/layers.0#0:out"


def noisy(seed: int, size: float = 1e-3, extra: toy.Fault = toy.no_fault) -> toy.Fault:
    """Atomics-like noise of one relative size in the first layer, as every run of the job has."""
    random = np.random.default_rng(seed)

    def fault(name: str, step: int, value: toy.Array) -> toy.Array:
        value = extra(name, step, value)
        if name != "layers.0":
            return value
        return (value * (1 + size * random.standard_normal(value.shape))).astype(value.dtype)

    return fault


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.record(tmp_path_factory.mktemp("noise") / "a.zarr", fault=noisy(1))


@pytest.fixture(scope="module")
def replicate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.record(tmp_path_factory.mktemp("noise") / "c.zarr", fault=noisy(2))


@pytest.mark.parametrize("level", ["module", "digest"])
def test_noise_of_the_size_of_the_replicate_is_no_divergence(tmp_path: Path, level: str) -> None:
    a, b, c = (
        toy.record(tmp_path / f"{seed}.zarr", fault=noisy(seed), level=level) for seed in (1, 2, 3)
    )
    without = bisect(a, b)
    assert without.first is not None  # the twin is a genuine variation
    assert without.first.site == NOISY
    verdict = bisect(a, b, noise=c)
    assert (verdict.outcome, verdict.first) == ("equivalent", None), verdict.reason
    row = next(row for row in diff(a, b, noise=c) if row.site == NOISY)
    assert 1.5e-3 < row.bound < 4e-3  # twice the distance of two draws of 1e-3 each
    assert any("noise: the replicate 3.zarr differs" in text for text in verdict.warnings)


def test_a_fault_larger_than_the_noise_is_named_with_the_measured_bound(
    baseline: Path, replicate: Path, tmp_path: Path
) -> None:
    def scaled(name: str, step: int, value: toy.Array) -> toy.Array:
        return value * np.float32(1.05) if (name, step) == ("layers.0", 0) else value

    target = toy.record(tmp_path / "b.zarr", fault=noisy(3, extra=scaled))
    verdict = bisect(baseline, target, noise=replicate)
    assert verdict.first is not None
    assert verdict.first.site == NOISY
    assert verdict.first.bound is not None
    assert "between the baseline and its replicate" in verdict.first.bound.derivation


def test_a_site_that_is_exact_in_the_replicate_keeps_its_derived_bound(
    baseline: Path, replicate: Path, tmp_path: Path
) -> None:
    """A fault far below the noise, at a place that comes before it."""

    def fault(name: str, step: int, value: toy.Array) -> toy.Array:
        return value * np.float32(1 + 1e-5) if name == "layers.0.weight" else value

    target = toy.record(tmp_path / "b.zarr", fault=noisy(3, extra=fault))
    verdict = bisect(baseline, target, noise=replicate)
    assert verdict.first is not None
    assert verdict.first.site == "0/loading/layers.0.weight:param"
    assert verdict.first.bound is not None
    assert verdict.first.bound.derivation == bisect(baseline, target).first.bound.derivation  # type: ignore[union-attr]


def test_what_is_no_replicate_is_refused(
    baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def other_data(name: str, step: int, value: toy.Array) -> toy.Array:
        return value[::-1] if name == "ids" else value

    target = toy.record(tmp_path / "b.zarr", fault=noisy(3))
    other = toy.record(tmp_path / "other.zarr", fault=noisy(2, extra=other_data))
    mlx = toy.record(tmp_path / "mlx.zarr", fault=noisy(2), stack="mlx")
    with pytest.raises(UsageError, match="no replicate of the baseline: they differ at 0/rend"):
        bisect(baseline, target, noise=other)
    with pytest.raises(UsageError, match="of stack mlx"):
        bisect(baseline, target, noise=mlx)
    with pytest.raises(UsageError, match="is the baseline itself"):
        bisect(baseline, target, noise=baseline)
    code = main(["bisect", str(baseline), str(target), "--noise", str(mlx)])
    assert code == 2
    assert "of stack mlx" in capsys.readouterr().err
