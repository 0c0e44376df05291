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
from tracediff.replayers.reference_catalogue import operations  # noqa: E402
from tracediff.replaying import Operation  # noqa: E402


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


@pytest.mark.parametrize(
    "mask", [[True, True, True], [False, True, True], [True, False, True], [False, False, True]]
)
def test_gradients_that_are_asked_for_are_those_of_pytorch(mask: list[bool]) -> None:
    """In float64; and the sum of a gradient that cancels is within its bound in float32."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=generator) for s in ((2, 3, 9, 9), (4, 3, 3, 3)))
    grad = torch.randn(2, 4, 7, 7, generator=generator)
    grad -= grad.mean((0, 2, 3), keepdim=True)
    tensors, ones, zeros = (grad, x, weight), [1, 1], [0, 0]
    rest = [4], ones, zeros, ones, False, zeros, 1, mask
    differentiated = torch.ops.aten.convolution_backward
    exact = [y for y in differentiated(*(t.double() for t in tensors), *rest) if y is not None]
    for output, expected in enumerate(exact):
        known = operations.recompute(
            Operation(
                canonical="convolution_backward",
                inputs=tuple(tensor.numpy() for tensor in tensors),
                args={"output_mask": mask},
                output=output,
                outputs=sum(mask),
                shape=tuple(expected.shape),
            )
        )
        assert known is not None
        np.testing.assert_allclose(known.value, expected.numpy(), rtol=0, atol=1e-12)
        assert (known.spread < 1e-4).all()
    found = differentiated(*tensors, *rest)[2]
    assert (np.abs(found.numpy() - exact[-1].numpy()) <= 6 * known.spread).all()
