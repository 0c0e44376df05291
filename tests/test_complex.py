"""Complex numbers: rotary embeddings as products of them, Fourier transforms, complex weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import tracediff  # noqa: E402
from tests.catalogue_jobs import Kernel  # noqa: E402
from tracediff.bisection import bisect  # noqa: E402
from tracediff.compare import largest_deviations  # noqa: E402
from tracediff.compare.layouts import find_layout  # noqa: E402
from tracediff.compare.patterns import recognise  # noqa: E402
from tracediff.replayers.reference_catalogue import operations  # noqa: E402
from tracediff.replaying import Operation  # noqa: E402

Tensor = Any


class Rotary(nn.Module):
    """Attention whose heads are rotated as complex numbers (RoFormer, equation 34)."""

    def __init__(self, fused: bool, base: float = 1e4, conjugate: bool = False) -> None:
        super().__init__()
        self.fused, self.conjugate = fused, conjugate
        self.qkv, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64)
        frequencies = base ** -(torch.arange(0, 16, 2) / 16)
        self.angles = torch.outer(torch.arange(12.0), frequencies)

    def rotated(self, x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(self.angles), self.angles)
        turn = turn.conj() if self.conjugate else turn
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], 8, 2))
        return torch.view_as_real(pairs * turn).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 12, 3, 4, 16).permute(2, 0, 3, 1, 4)
        q, k = self.rotated(q), self.rotated(k)
        if self.fused:
            heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-1, -2) / 4).masked_fill(
                torch.ones(12, 12, dtype=torch.bool).triu(1), -math.inf
            )
            heads = scores.softmax(-1) @ v
        return self.out(heads.transpose(1, 2).flatten(2))


class Filter(nn.Module):
    """A filter of frequencies with complex weights, by one transform or another."""

    def __init__(self, real: bool) -> None:
        super().__init__()
        self.real = real
        self.weight = nn.Parameter(torch.randn(7, 64, dtype=torch.complex64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.real:
            spectrum = torch.fft.rfft(x, dim=1)
        else:
            spectrum = torch.fft.fft(x.to(torch.complex64), dim=1)[:, :7]
        return torch.fft.irfft(spectrum * self.weight, n=12, dim=1)


def trained(path: Path, make: Callable[[], nn.Module], level: str, seed: int, *modes: Any) -> Path:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(32, 64), nn.LayerNorm(64), make(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ExitStack() as contexts:
        for mode in modes:
            contexts.enter_context(mode)
        contexts.enter_context(tracediff.record(path, stack="pytorch", level=level))
        for _ in range(2):
            ids = torch.randint(0, 32, (2, 12))
            optimizer.zero_grad()
            functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
    return path


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("make", [Rotary, Filter])
@pytest.mark.parametrize("seed", range(4))
def test_rounding_is_silent(tmp_path: Path, make: Any, level: str, seed: int) -> None:
    runs = [
        trained(tmp_path / str(one), functools.partial(make, one), level, seed)
        for one in (False, True)
    ]
    verdict = bisect(*runs)
    assert verdict.outcome == "equivalent", verdict.reason


def times(factor: Any, only: str) -> Callable[..., Any]:
    """A product that is wrong for operands of one kind."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        found = torch.ops.aten.mul.Tensor(a, b)
        return found * factor if str(found.dtype) == only else found

    return product


FAULTS = [
    ("aten.mul.Tensor", times(1.001, "torch.complex64"), "forward"),
    ("aten.mul.Tensor", times(1 + 0.001j, "torch.complex64"), "forward"),
    ("aten._conj.default", torch.ops.aten.clone.default, "backward"),  # of a gradient
]


@pytest.mark.parametrize(("op", "wrong", "stage"), FAULTS)
def test_a_wrong_operation_is_named(
    tmp_path: Path, op: str, wrong: Callable[..., Any], stage: str
) -> None:
    a = trained(tmp_path / "a", lambda: Rotary(True), "op", 0)
    b = trained(tmp_path / "b", lambda: Rotary(False), "op", 0, Kernel(op, wrong))
    first = bisect(a, b).first
    assert first is not None
    assert (first.op["target"], first.blame) == (op, "target")
    assert first.site.startswith(f"0/{stage}/2")


@pytest.mark.parametrize("change", [{"base": 1.01e4}, {"conjugate": True}])
def test_another_rotation_is_named_on_both_sides(tmp_path: Path, change: dict[str, Any]) -> None:
    a = trained(tmp_path / "a", lambda: Rotary(True), "op", 0)
    b = trained(tmp_path / "b", lambda: Rotary(True, **change), "op", 0)
    first = bisect(a, b).first
    assert first is not None
    assert first.site.startswith("0/forward/2")
    assert first.blame == "undecided"


def rotated_in_mlx(path: Path, weights: Any, angles: Any, inputs: Any, factor: float) -> Path:
    mx = pytest.importorskip("mlx.core")
    import mlx.nn as mlx_nn
    import mlx.optimizers

    class Model(mlx_nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (mlx_nn.Linear(16, 16, bias=False) for _ in range(2))

        def __call__(self, x: Any) -> Any:
            pairs = self.a(x).reshape(3, 6, 8, 2)
            turn = mx.cos(mx.array(angles)) + 1j * mx.sin(mx.array(angles))
            turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn * factor
            return self.b(mx.stack([turned.real, turned.imag], -1).reshape(3, 6, 16))

    model: Any = Model()
    model.a.weight, model.b.weight = map(mx.array, weights)
    optimizer = mlx.optimizers.SGD(0.1)
    gradient = mlx_nn.value_and_grad(model, lambda model, x: (model(x) ** 2).mean())
    with tracediff.record(path, stack="mlx", level="op"):
        for x in inputs:
            loss, grads = gradient(model, mx.array(x))
            optimizer.update(model, grads)
            mx.eval(loss, model.parameters())
    return path


def rotated_in_pytorch(path: Path, weights: Any, angles: Any, inputs: Any) -> Path:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(16, 16, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(self.a(x).reshape(3, 6, 8, 2))
            turn = torch.polar(torch.ones(6, 8), torch.tensor(angles))
            return self.b(torch.view_as_real(pairs * turn).flatten(2))

    model = Model()
    model.a.weight.data, model.b.weight.data = map(torch.tensor, weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracediff.record(path, stack="pytorch", level="op"):
        for x in inputs:
            optimizer.zero_grad()
            model(torch.tensor(x)).square().mean().backward()
            optimizer.step()
    return path


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_two_stacks_rotate_alike(tmp_path: Path, factor: float) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((2, 16, 16), np.float32) / 4
    angles = np.outer(np.arange(6), 10.0 ** -np.arange(8)).astype(np.float32)
    inputs = rng.standard_normal((2, 3, 6, 16), np.float32)
    a = rotated_in_pytorch(tmp_path / "a", weights, angles, inputs)
    first = bisect(a, rotated_in_mlx(tmp_path / "b", weights, angles, inputs, factor)).first
    assert (first is None) == (factor == 1)
    if first is not None:
        assert (first.stage, first.pattern) == ("forward", "scaled")
        assert first.detail["factor"] == pytest.approx(factor, rel=1e-5)
        assert first.blame == "undecided"


OPERATIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "aten.mul.Tensor": (lambda a, b, r: (a * b, (a, b)), "mul"),
    "aten.div.Tensor": (lambda a, b, r: (a / b, (a, b)), "div"),
    "aten.add.Tensor": (lambda a, b, r: (a + r, (a, r)), "add"),
    "aten.mm.default": (lambda a, b, r: (a @ b.T.contiguous(), (a, b.T.contiguous())), "matmul"),
    "aten.sum.default": (lambda a, b, r: (a.sum(), (a,)), "sum"),
    "aten.abs.default": (lambda a, b, r: (a.abs(), (a,)), "abs"),
    "aten.exp.default": (lambda a, b, r: (a.exp(), (a,)), "exp"),
    "aten._conj.default": (lambda a, b, r: (a.conj().resolve_conj(), (a,)), "conj"),
    "aten.view_as_real.default": (lambda a, b, r: (torch.view_as_real(a), (a,)), "view_as_real"),
    "aten.polar.default": (lambda a, b, r: (torch.polar(r.abs(), r), (r.abs(), r)), "polar"),
    "aten.complex.default": (lambda a, b, r: (torch.complex(r, r), (r, r)), "complex"),
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_formulas_hold_what_pytorch_computes_and_nothing_else(op: str) -> None:
    function, canonical = OPERATIONS[op]
    torch.manual_seed(1)
    a, b = torch.randn(2, 40, 30, dtype=torch.complex64)
    found, inputs = function(a, b, torch.randn(40, 30))
    exact = operations.recompute(
        Operation(
            canonical=canonical,
            op=op,
            inputs=tuple(x.numpy() for x in inputs),
            shape=tuple(found.shape),
            dtype=str(found.dtype).removeprefix("torch."),
        )
    )
    assert exact is not None
    error = np.abs(found.numpy() - exact.value)
    assert (error <= 6 * exact.spread).all()
    assert (6 * exact.spread <= 1e-4 * np.abs(exact.value).max()).all()


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_transforms_are_held_to_their_formula(norm: str) -> None:
    """As PyTorch numbers the norms, with dimensions that were worked out by hand."""
    number = {"backward": (0, 2), "ortho": (1, 1), "forward": (2, 0)}[norm]
    x = torch.randn(5, 12, 6)
    z = torch.fft.rfft2(x, dim=(0, 1), norm=norm)
    cases = [
        ("_fft_r2c", x, z, {"normalization": number[0], "onesided": True}),
        ("_fft_c2c", z, torch.fft.fft2(z, dim=(0, 1), norm=norm),
         {"normalization": number[0], "forward": True}),
        ("_fft_c2c", z, torch.fft.ifft2(z, dim=(0, 1), norm=norm),
         {"normalization": number[1], "forward": False}),
        ("_fft_c2r", z, torch.fft.irfft2(z, s=(5, 12), dim=(0, 1), norm=norm),
         {"normalization": number[1], "last_dim_size": 12}),
    ]  # fmt: skip
    for canonical, given, found, args in cases:
        exact = operations.recompute(
            Operation(
                canonical=canonical,
                inputs=(given.numpy(),),
                args={"dim": [0, 1], **args},
                shape=tuple(found.shape),
                dtype=str(found.dtype).removeprefix("torch."),
            )
        )
        assert exact is not None
        assert (np.abs(found.numpy() - exact.value) <= 6 * exact.spread).all()
        assert (6 * exact.spread <= 1e-4 * np.abs(exact.value).max()).all()


def test_formulas_of_real_numbers_only_leave_complex_ones_alone() -> None:
    z = (np.ones(3) + 1j).astype(np.complex64)
    for canonical in ("tanh", "softmax", "relu", "sign", "log"):
        operation = Operation(canonical=canonical, inputs=(z,), shape=(3,), dtype="complex64")
        assert operations.recompute(operation) is None


@pytest.mark.filterwarnings("error")
def test_reports_tell_both_parts_of_a_number() -> None:
    rng = np.random.default_rng(0)
    a = (rng.standard_normal((4, 6, 2)).astype(np.float32)).view(np.complex64)[..., 0]
    b = a.copy()
    b[2, 3] += 0.5j
    worst = largest_deviations(a, b)[0]
    assert worst.index == (2, 3, 1)
    assert (worst.baseline, worst.target) == (float(a[2, 3].imag), float(b[2, 3].imag))
    turned = recognise(a, a.conj())
    assert turned is not None
    assert turned.name == "conjugate"
    scaled = recognise(a, a * np.complex64(1 + 0.5j))
    assert scaled is not None
    assert scaled.detail["factor"] == pytest.approx([1, 0.5], rel=1e-6)
    # Real parts that are all alike say nothing of how they are laid out.
    alike = (1 + 1j * rng.standard_normal((6, 4))).astype(np.complex64)
    layout = find_layout(alike, np.ascontiguousarray(alike.T))
    assert layout is not None
    assert layout.name == "transpose"
