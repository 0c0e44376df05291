"""Both built-in recorders against the conformance tests that tracediff ships."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tracediff.testing import RecorderConformance


class TestPyTorch(RecorderConformance):
    stack = "pytorch"

    def train(self, steps: int) -> Mapping[str, np.ndarray]:
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(steps):
            x = torch.full((2, 3), step + 1.0)
            torch.nn.functional.mse_loss(model(x), torch.ones(2, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(2, 3))
        return {name: value.numpy().copy() for name, value in model.state_dict().items()}


class TestMLX(RecorderConformance):
    stack = "mlx"

    def train(self, steps: int) -> Mapping[str, np.ndarray]:
        mx = pytest.importorskip("mlx.core")
        import mlx.nn as nn
        import mlx.optimizers as optim
        from mlx.utils import tree_flatten

        mx.random.seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = optim.AdamW(0.1, bias_correction=True)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            return nn.losses.mse_loss(model(x), mx.ones((2, 1)))

        gradient = nn.value_and_grad(model, loss_fn)
        for step in range(steps):
            _, grads = gradient(model, mx.full((2, 3), step + 1.0))
            optimizer.update(model, grads)
            mx.eval(model.parameters(), optimizer.state)
        mx.eval(model(mx.ones((2, 3))))
        return {name: np.array(value) for name, value in tree_flatten(model.parameters())}


del RecorderConformance  # pytest would collect the base class itself
