"""Tables that code brings along, which no module has for a buffer: named where they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import tracediff  # noqa: E402
from tracediff.bisection import bisect  # noqa: E402

Tensor = Any
TABLES = np.random.default_rng(0).standard_normal((2, 16)) + 2


class Scaled(nn.Module):
    """Two layers, each times a table, in one order or the other, and attention's kind of mask."""

    def __init__(self, tables: Any, hidden: float, other_way: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.out = (nn.Linear(16, size) for size in (16, 16, 8))
        self.first, self.second = (torch.tensor(t, dtype=torch.float32) for t in tables)
        self.mask = torch.full((6, 6), hidden).triu(1)
        self.other_way = other_way

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.T + self.mask).softmax(-1)
        if self.other_way:
            right = self.b(x) * self.second
            left = self.a(x) * self.first
        else:
            left = self.a(x) * self.first
            right = self.b(x) * self.second
        return self.out(weights @ torch.tanh(left + right))


def trained(path: Path, *args: Any) -> Path:
    torch.manual_seed(0)
    model = Scaled(*args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracediff.record(path, stack="pytorch", level="op"):
        for _ in range(2):
            optimizer.zero_grad()
            functional.mse_loss(model(torch.randn(6, 16)), torch.zeros(6, 8)).backward()
            optimizer.step()
    return path


@pytest.mark.parametrize("which", [0, 1])
def test_a_constant_is_named_before_what_is_computed_from_it(tmp_path: Path, which: int) -> None:
    changed = TABLES.copy()
    changed[which] *= 1.001
    verdict = bisect(
        trained(tmp_path / "a", TABLES, -np.inf), trained(tmp_path / "b", changed, -np.inf)
    )
    first = verdict.first
    assert first is not None
    assert (first.stage, first.step, first.op) == ("forward", 0, dict.fromkeys(first.op, "leaf"))
    assert first.pattern == "scaled"
    assert first.detail["factor"] == pytest.approx(1.001, rel=1e-6)
    assert "a constant (test_constants.py:" in verdict.reason
    line = (
        Path(__file__)
        .read_text(encoding="utf-8")
        .splitlines()[int(first.where["target"].rpartition(":")[2]) - 1]
    )
    assert ("self.first", "self.second")[which] in line


@pytest.mark.parametrize(
    "target",
    [
        (TABLES * (1 + 2.0**-22), -np.inf),  # another precision of the table
        (TABLES, float(np.finfo(np.float32).min)),  # another number that hides as much
        (TABLES, -np.inf, True),  # the other table comes first
    ],
)
def test_what_makes_no_difference_is_silent(tmp_path: Path, target: tuple[Any, ...]) -> None:
    a, b = trained(tmp_path / "a", TABLES, -np.inf), trained(tmp_path / "b", *target)
    verdict = bisect(a, b)
    assert verdict.outcome in ("identical", "equivalent"), verdict.reason


def in_mlx(path: Path, table: Any) -> Path:
    mx = pytest.importorskip("mlx.core")
    import mlx.nn as mlx_nn
    import mlx.optimizers

    class Twin(mlx_nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlx_nn.Linear(16, 16)

        def __call__(self, x: Any) -> Any:
            return mx.tanh(self.layer(x) * angles)

    angles = mx.array(table.astype(np.float32))

    rng = np.random.default_rng(1)
    model: Any = Twin()
    model.layer.weight = mx.array(rng.standard_normal((16, 16)).astype(np.float32) / 4)
    model.layer.bias = mx.zeros(16)
    optimizer = mlx.optimizers.SGD(0.1)
    gradient = mlx_nn.value_and_grad(model, lambda model, x: (model(x) ** 2).mean())
    with tracediff.record(path, stack="mlx", level="op"):
        loss, grads = gradient(model, mx.array(rng.standard_normal((6, 16)).astype(np.float32)))
        optimizer.update(model, grads)
        mx.eval(loss, model.parameters())
    return path


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_constants_of_mlx(tmp_path: Path, factor: float) -> None:
    a, b = in_mlx(tmp_path / "a", TABLES[0]), in_mlx(tmp_path / "b", TABLES[0] * factor)
    first = bisect(a, b).first
    assert (first is None) == (factor == 1)
    assert first is None or first.op == dict.fromkeys(("baseline", "target"), "leaf")
