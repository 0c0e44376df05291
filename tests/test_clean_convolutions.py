"""Convolutions before a norm, whose biases have gradients of nothing but rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import tracediff  # noqa: E402
from tracediff.bisection import bisect  # noqa: E402
from tracediff.replayers.reference_operations import recompute  # noqa: E402
from tracediff.replaying import Operation, Replayed  # noqa: E402


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.AdaptiveAvgPool2d(1),
    )


def instance_norm() -> nn.Module:
    """Its bias has an effect on nothing, and shrinks by what Adam makes of rounding."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.LocalResponseNorm(2)
    )


def trained(
    path: Path, make: Callable[[], nn.Module], level: str, size: int, factor: float = 1.0
) -> Path:
    """Two steps, on inputs times a factor."""
    torch.manual_seed(0)
    model = make()
    with tracediff.record(path, stack="pytorch", level=level):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            out = model(torch.randn(2, 3, size, size) * factor)
            goal = torch.linspace(-1, 2, out.numel()).view_as(out)
            (out - goal).square().mean().backward()
            optimizer.step()
    return path


@pytest.mark.parametrize(
    ("make", "level", "size"),
    [(batch_norm, "module", 17), (batch_norm, "op", 17), (instance_norm, "module", 7)],
)
def test_rounding_before_a_norm_is_silent(
    tmp_path: Path, make: Callable[[], nn.Module], level: str, size: int
) -> None:
    runs = [
        trained(tmp_path / str(i), make, level, size, factor)
        for i, factor in enumerate((1.0, 1 + 2.0**-23))
    ]
    verdict = bisect(*runs)
    assert verdict.outcome == "equivalent", verdict.reason


def test_factors_of_channels_are_named(tmp_path: Path) -> None:
    class Wrong(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * torch.linspace(1, 1.001, 4)[:, None, None]

    def wrong() -> nn.Module:
        model = batch_norm()
        model[4] = Wrong(8, 4, 3, stride=2, padding=1)
        torch.manual_seed(0)
        model.load_state_dict(batch_norm().state_dict())
        return model

    runs = [trained(tmp_path / make.__name__, make, "op", 17) for make in (batch_norm, wrong)]
    verdict = bisect(*runs)
    assert verdict.first is not None
    assert verdict.first.path == "4"


@pytest.mark.parametrize("mask", [[True, True, True], [False, True, True], [False, False, True]])
def test_the_gradient_of_a_bias_is_a_sum(mask: list[bool]) -> None:
    """Against the sum in float64 by PyTorch, of a gradient that cancels."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=generator) for s in ((2, 3, 9, 9), (4, 3, 3, 3)))
    grad = torch.randn(2, 4, 7, 7, generator=generator)
    grad -= grad.mean((0, 2, 3), keepdim=True)
    ones, zeros = [1, 1], [0, 0]
    found = torch.ops.aten.convolution_backward(
        grad, x, weight, [4], ones, zeros, ones, False, zeros, 1, mask
    )
    inputs = tuple(tensor.numpy() for tensor in (grad, x, weight))

    def recomputed(output: int, shape: tuple[int, ...]) -> Replayed | None:
        return recompute(
            Operation(
                canonical="convolution_backward",
                inputs=inputs,
                args={"output_mask": mask},
                output=output,
                outputs=sum(mask),
                shape=shape,
            )
        )

    exact = grad.double().sum((0, 2, 3)).numpy()
    known = recomputed(sum(mask) - 1, (4,))
    assert known is not None
    np.testing.assert_allclose(known.value, exact, rtol=0, atol=1e-12)
    assert (np.abs(found[2].numpy() - exact) <= 6 * known.spread).all()
    assert (known.spread < 1e-4).all()
    rest = [tensor.shape for tensor in found[:2] if tensor is not None]
    assert all(recomputed(output, shape) is None for output, shape in enumerate(rest))
