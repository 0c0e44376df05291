"""Two runs whose inputs are a rounding apart are called equivalent, whatever they compute."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

import tracediff  # noqa: E402
from tests.catalogue_jobs import Kernel  # noqa: E402
from tracediff.bisection import bisect  # noqa: E402

Tensor = Any
Case = tuple[tuple[int, ...], Callable[[], Any]]

CASES: dict[str, Case] = {}


class Function(nn.Module):
    """A function of an input and of parameters as a model."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.gain = nn.Parameter(torch.ones(()))
        self.parts = nn.ParameterList(
            nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5) for shape in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.gain * x, *self.parts)


def of(shape: tuple[int, ...], *parts: tuple[int, ...]) -> Callable[..., Any]:
    """Enters a function of an input of that shape and of parameters."""

    def enter(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        CASES[function.__name__] = shape, functools.partial(Function, function, *parts)
        return function

    return enter


def definite(x: Tensor) -> Tensor:
    return x @ x.transpose(-1, -2) / x.shape[-1] + torch.eye(x.shape[-2])


CASES |= {
    "lstm": ((4, 7, 12), lambda: nn.LSTM(12, 12, batch_first=True)),
    "gru": ((4, 7, 12), lambda: nn.GRU(12, 12, batch_first=True)),
    "encoder": (
        (4, 7, 12),
        lambda: nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True),
    ),
    "convolutions": (
        (4, 6, 20),
        lambda: nn.Sequential(
            nn.Conv1d(6, 8, 3, padding=1), nn.GELU(), nn.ConvTranspose1d(8, 4, 3)
        ),
    ),
    "pools": (
        (4, 3, 16, 16),
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.LPPool2d(2, 2), nn.Flatten(), nn.Linear(36, 5)
        ),
    ),
    "upsampled": (
        (2, 3, 8, 8),
        lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.Upsample(scale_factor=2, mode="bilinear")),
    ),
    "shuffled pixels": (
        (2, 4, 8, 8),
        lambda: nn.Sequential(nn.PixelShuffle(2), nn.Conv2d(1, 2, 3)),
    ),
    "activations": (
        (6, 30),
        lambda: nn.Sequential(
            nn.Linear(30, 30),
            *(nn.ELU(), nn.SELU(), nn.Softsign(), nn.LogSigmoid(), nn.Softplus()),
            *(nn.Tanhshrink(), nn.CELU(), nn.Hardtanh(), nn.Mish(), nn.GLU()),
        ),
    ),
    "weight norm": ((6, 8), lambda: parametrizations.weight_norm(nn.Linear(8, 5))),
    "spectral norm": ((6, 8), lambda: parametrizations.spectral_norm(nn.Linear(8, 5))),
    "instance norm": ((2, 3, 8, 8), lambda: nn.InstanceNorm2d(3, affine=True)),
    "dropout": (
        (4, 80),
        lambda: nn.Sequential(nn.Linear(80, 40), nn.Dropout(0.3), nn.Linear(40, 10)),
    ),
    "grouped": ((2, 6, 9, 9), lambda: nn.Sequential(nn.Conv2d(6, 6, 3, groups=6))),
}


@of((4, 7, 12), (12, 5))
def contracted(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("btd,dk,bsk->bts", x, w, x @ w)


@of((4, 9, 8), (8,))
def scanned(x: Tensor, a: Tensor) -> Tensor:
    summed = torch.cumsum(x * torch.sigmoid(a), 1)
    return summed * torch.exp(-torch.cumsum(functional.softplus(x), 1)) + torch.cumprod(1 + a, 0)


@of((4, 16, 8), (16, 8))
def filtered(x: Tensor, a: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.fft.rfft(a, dim=0), dim=1)


@of((2, 64))
def spectrogram(x: Tensor) -> Tensor:
    window = torch.hann_window(16)
    return torch.stft(x, 16, hop_length=8, window=window, return_complex=True).abs()


@of((4, 6, 6), (6, 3))
def solved(x: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve(definite(x), b) + torch.linalg.cholesky(definite(x))[..., :3]


@of((4, 6, 6))
def decomposed(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(definite(x))
    return torch.linalg.svdvals(x) + values + (vectors**2 * torch.exp(values[:, None])).sum(-1)


@of((4, 20), (20,))
def chosen(x: Tensor, a: Tensor) -> Tensor:
    return torch.sort(x, -1)[0] * a + x.topk(5, -1)[0].sum(-1, keepdim=True)


@of((6, 8))
def scattered(x: Tensor) -> Tensor:
    rows = torch.tensor([0, 1, 2, 3, 0, 1])
    added = torch.zeros(4, 8).scatter_add(0, rows[:, None].expand(6, 8), x)
    return added + torch.zeros(4, 8).index_add(0, rows, x)


@of((6, 8), (8,))
def in_place(x: Tensor, a: Tensor) -> Tensor:
    y = (x * a).clone()
    y[:, :3].mul_(2.0)
    y[:, 4:].add_(a[4:])
    y[1].zero_()
    return y * 2


@of((6, 8), (8,))
def filled_part_by_part(x: Tensor, a: Tensor) -> Tensor:
    y = x.new_empty(6, 12)
    y[:, :8] = x * a
    y[:, 8:] = x[:, :4]
    return y.square()


@of((6, 8), (8,))
def spread_out(x: Tensor, a: Tensor) -> Tensor:
    centred = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt() * a
    return torch.logsumexp(centred, -1, keepdim=True) - torch.logaddexp(x, a) + x.std(0)


@of((6, 8), (8,))
def special(x: Tensor, a: Tensor) -> Tensor:
    smooth = torch.erf(x) * torch.atan2(x, a) + torch.lgamma(x.abs() + 1)
    return smooth + torch.sin(x) * torch.cos(a) + torch.asin(torch.tanh(x) * 0.9)


@of((6, 8), (5, 8))
def near(x: Tensor, a: Tensor) -> Tensor:
    return functional.cosine_similarity(x[:, None], a[None], -1) + torch.cdist(x, a)


@of((4, 8), (8,), (8,))
def turned(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    z = torch.polar(functional.softplus(x), a * x) * torch.exp(1j * x)
    return z.imag + torch.complex(x, b + 0 * x).abs()


def trained(path: Path, name: str, level: str, apart: float, *modes: Any) -> Path:
    """Two steps, on inputs that are so far apart from those of another run."""
    shape, make = CASES[name]
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(2)
    for mode in modes:
        mode.__enter__()
    try:
        with tracediff.record(path, stack="pytorch", level=level):
            for _ in range(2):
                found = model(torch.randn(shape) * (1 + apart))
                y = found[0] if isinstance(found, tuple) else found
                (y * torch.linspace(-1, 2, y.numel()).view_as(y)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        for mode in modes:
            mode.__exit__(None, None, None)
    return path


@pytest.mark.parametrize("level", ["op", "module"])
@pytest.mark.parametrize("name", CASES)
def test_rounding_is_silent(tmp_path: Path, name: str, level: str) -> None:
    runs = [trained(tmp_path / str(i), name, level, i * 2.0**-23) for i in (0, 1)]
    verdict = bisect(*runs)
    assert verdict.outcome in ("identical", "equivalent"), verdict.reason


def test_what_memory_holds_before_it_is_written_to_is_nobodys_value(tmp_path: Path) -> None:
    def filled(value: float) -> Any:
        return lambda x, size, **_: torch.ops.aten.full.default(size, value)

    runs = [
        trained(
            tmp_path / str(value),
            "filled_part_by_part",
            "op",
            0.0,
            Kernel("aten.new_empty.default", filled(value)),
        )
        for value in (7.0, float("nan"))
    ]
    verdict = bisect(*runs)
    assert verdict.outcome in ("identical", "equivalent"), verdict.reason


@of((6, 40))
def dropped_in_a_kernel(x: Tensor) -> Tensor:
    """A kernel that draws and gives back its input times what it drew, as on GPUs."""
    return torch.native_dropout(x.tanh(), 0.3, True)[0]


def test_numbers_that_a_kernel_draws_and_mixes_with_its_input(tmp_path: Path) -> None:
    """Two results a rounding apart are of one mask; another mask is told."""
    name = "dropped_in_a_kernel"
    a = trained(tmp_path / "a", name, "op", 0.0)
    assert bisect(a, trained(tmp_path / "b", name, "op", 2.0**-23)).outcome == "equivalent"

    def turned_over(x: Tensor, p: float, train: bool) -> Any:
        found, mask = torch.ops.aten.native_dropout.default(x, p, train)
        return found.flip(0), mask.flip(0)

    fault = Kernel("aten.native_dropout.default", turned_over)
    first = bisect(a, trained(tmp_path / "c", name, "op", 2.0**-23, fault)).first
    assert first is not None
    assert first.op == dict.fromkeys(first.op, "aten.native_dropout.default")
    assert "draws other numbers" in first.meaning


def attention(scale_first: bool, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    q, k = x @ w, x
    scores = (q / 2) @ (k.transpose(-1, -2) / 2) if scale_first else q @ k.transpose(-1, -2) / 4
    return scores.softmax(-1) @ (x @ v)


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_scale_that_is_applied_elsewhere_makes_no_difference(
    tmp_path: Path, factor: float
) -> None:
    """The queries and keys are scaled, or their product; but not what comes after."""

    def other(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return attention(True, x, w, v) * factor if factor != 1 else attention(True, x, w, v)

    shape, parts = (2, 6, 16), ((16, 16), (16, 16))
    CASES["one way"] = shape, lambda: Function(functools.partial(attention, False), *parts)
    CASES["another"] = shape, lambda: Function(other, *parts)
    try:
        runs = [trained(tmp_path / n, n, "op", 0.0) for n in ("one way", "another")]
    finally:
        del CASES["one way"], CASES["another"]
    verdict = bisect(*runs)
    if factor == 1:
        assert verdict.outcome in ("identical", "equivalent"), verdict.reason
        return
    assert verdict.first is not None
    assert verdict.first.pattern == "scaled"
    assert verdict.first.detail["factor"] == pytest.approx(factor, rel=1e-5)
