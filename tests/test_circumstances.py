"""What other steps and parameters say of a divergence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tracediff.bisection import bisect
from tracediff.testing import build_trace

SHAPES = {"a.weight": (4, 4), "b.weight": (4, 4), "norm.weight": (4,), "b.bias": (4,)}


def trace(path: Path, changed: tuple[str, ...], start: int = 0) -> Path:
    """Three steps of gradients at the optimizer, some of them doubled from a step on."""
    values: list[tuple[str, Any]] = []
    for step in range(3):
        generator = np.random.default_rng(step)
        for name, shape in SHAPES.items():
            grad = generator.normal(size=shape).astype(np.float32)
            factor = 2 if name in changed and step >= start else 1
            values.append((f"{step}/optimizer/{name}:grad", (grad * factor, {"op": "SGD"})))
    return build_trace(path, values)


def test_parameters_of_one_dimension_are_told(tmp_path: Path) -> None:
    right, wrong = trace(tmp_path / "a", ()), trace(tmp_path / "b", ("norm.weight", "b.bias"))
    first = bisect(right, wrong).first
    assert first is not None
    assert first.detail["only"] == "1-D parameters"
    assert first.pattern == "scaled"
    for name, changed in (("c", ("norm.weight",)), ("d", ("a.weight", "norm.weight", "b.bias"))):
        other = bisect(right, trace(tmp_path / name, changed)).first
        assert other is not None
        assert "only" not in other.detail


def test_steps_that_agreed_are_counted(tmp_path: Path) -> None:
    first = bisect(trace(tmp_path / "a", ()), trace(tmp_path / "b", ("a.weight",), start=2)).first
    assert first is not None
    assert first.step == 2
    assert first.detail["agreed_steps"] == 2
    assert "agrees in 2 steps before" in first.meaning
