"""Training beside a buffer, on both stacks: nothing changes, and what was dropped is told."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as mlx_nn
import mlx.optimizers as mlx_optim
import numpy as np
import pytest
import torch

import tracediff
from tracediff.bisection import bisect
from tracediff.trace import Trace, verify

WIDTH, ROWS, STEPS, FAULTY = 520, 520, 2, 1
"""A weight, and what goes in and out, are larger than the smallest buffer: 1 MiB."""

DATA = np.random.default_rng(0).standard_normal((STEPS, ROWS, WIDTH), dtype=np.float32)

Result = tuple[list[float], list[np.ndarray[Any, Any]]]
"""Losses and final weights."""


def train_pytorch(fault: float = 1.0) -> Result:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.drop = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1)
            self.head = torch.nn.Linear(WIDTH, 1)
            self.factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(self.drop(torch.tanh(self.fc(x)) * self.factor))
            return result

    torch.manual_seed(0)
    model, losses = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        model.factor = fault if step == FAULTY else 1.0
        loss = model(torch.from_numpy(DATA[step])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().numpy().copy() for p in model.parameters()]


def train_mlx(fault: float = 1.0) -> Result:
    class Model(mlx_nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.drop = mlx_nn.Linear(WIDTH, WIDTH), mlx_nn.Dropout(0.1)
            self.head = mlx_nn.Linear(WIDTH, 1)
            self.factor = 1.0

        def __call__(self, x: mx.array) -> mx.array:
            result: mx.array = self.head(self.drop(mx.tanh(self.fc(x)) * self.factor))
            return result

    mx.random.seed(0)
    model, losses = Model(), []
    optimizer = mlx_optim.AdamW(1e-2)
    gradient = mlx_nn.value_and_grad(model, lambda model, x: mx.mean(mx.square(model(x))))
    for step in range(STEPS):
        model.factor = fault if step == FAULTY else 1.0
        loss, grads = gradient(model, mx.array(DATA[step]))
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    names = ("fc", "head")
    return losses, [np.array(model[name][key]) for name in names for key in ("weight", "bias")]


TRAIN: dict[str, Callable[..., Result]] = {"pytorch": train_pytorch, "mlx": train_mlx}


def recorded(path: Path, stack: str, on_full: str, fault: float = 1.0) -> Result:
    gc.collect()  # an optimizer of an earlier run would count as existing
    with tracediff.record(path, stack=stack, max_buffer=1, on_full=on_full):
        return TRAIN[stack](fault)


@pytest.mark.parametrize("on_full", ["wait", "drop"])
@pytest.mark.parametrize("stack", ["pytorch", "mlx"])
def test_losses_and_weights_are_bit_identical(tmp_path: Path, stack: str, on_full: str) -> None:
    losses, weights = TRAIN[stack]()
    again = recorded(tmp_path / "t", stack, on_full)
    assert again[0] == losses
    assert all(np.array_equal(a, b) for a, b in zip(again[1], weights, strict=True))
    assert verify(tmp_path / "t").sound


@pytest.mark.parametrize("stack", ["pytorch", "mlx"])
def test_a_divergence_is_found_in_values_that_were_dropped(tmp_path: Path, stack: str) -> None:
    for name, on_full, fault in (("a", "drop", 1.0), ("b", "drop", 1.01), ("c", "wait", 1.0)):
        recorded(tmp_path / name, stack, on_full, fault)
    with Trace(tmp_path / "b") as trace:
        lost = [e for e in trace.events(FAULTY) if e.attributes.get("dropped")]
        assert "drop#0:in" in {str(e.site).rpartition("/")[2] for e in lost}
        assert all(e.payload is None and e.digest for e in lost)
    verdict = bisect(tmp_path / "a", tmp_path / "b")
    assert verdict.first is not None
    assert verdict.first.site == f"{FAULTY}/forward/drop#0:in"
    assert "was dropped because the buffer was full" in verdict.first.meaning
    assert sum("were dropped because the buffer was full" in w for w in verdict.warnings) == 2
    # Of the twin that waited, all is there, and nothing differs.
    assert bisect(tmp_path / "a", tmp_path / "c").outcome == "identical"
