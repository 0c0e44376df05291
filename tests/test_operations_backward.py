"""MLX's backward pass, of which only gradients are seen: the one that errs is named; and what
PyTorch keeps for its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
torch = pytest.importorskip("torch")

import mlx.nn as nn  # noqa: E402

import tracediff  # noqa: E402
from benchmarks.perturbing import Meter, Perturbation, perturbing  # noqa: E402
from tracediff.align.flow import is_operation  # noqa: E402
from tracediff.events import Event  # noqa: E402
from tracediff.trace import Trace  # noqa: E402

LABELS = mx.array([[1, 2, 3, 4]] * 2)


class Layer(nn.Module):
    """A norm, an activated product, a residual sum in place, and logits."""

    def __init__(self) -> None:
        super().__init__()
        generator = np.random.default_rng(0)
        self.gain = mx.ones(16)
        self.inner, self.outer = (
            mx.array((generator.standard_normal(shape) / 4).astype(np.float32))
            for shape in ((16, 16), (16, 24))
        )

    def __call__(self, x: Any) -> Any:
        h = mx.fast.rms_norm(x, self.gain, 1e-6)
        h = mx.exp(-mx.square(h @ self.inner))
        h += x
        return (h * mx.stop_gradient(mx.rsqrt(h.max() + 9.0))) @ self.outer


def loss(model: Layer, x: Any) -> Any:
    logits = model(x)
    top = logits - mx.stop_gradient(logits.max(axis=-1, keepdims=True))
    chosen = mx.take_along_axis(top, LABELS[..., None], axis=-1)
    return (mx.logsumexp(top, axis=-1, keepdims=True) - chosen).mean()


def record(path: Path, perturbation: Perturbation | None = None) -> Path:
    meter = Meter()
    x = mx.array(np.random.default_rng(1).standard_normal((2, 4, 16)).astype(np.float32))
    perturbed = perturbation or Perturbation(-1, "", 0.0)
    with (
        perturbing("mlx", perturbed, meter),
        tracediff.record(path, stack="mlx", level="op") as meter.tape,
    ):
        model = Layer()
        mx.eval(nn.value_and_grad(model, loss)(model, x))
    assert meter.done == (perturbation is not None)
    return path


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    with Trace(record(tmp_path_factory.mktemp("clean") / "a")) as trace:
        yield trace


def gradients(trace: Trace) -> dict[str, Event]:
    """Gradients of the step by canonical name and number of the call."""
    return {
        str(e.site).partition("@")[2]: e
        for e in trace.events(0)
        if is_operation(e) and e.site.phase == "backward"
    }


def test_every_real_result_has_a_gradient(clean: Trace) -> None:
    """What is changed in place as well; but not what only a stopped gradient was computed from."""
    known = {e.attributes["forward_order"] for e in gradients(clean).values()}
    rest = [
        e.attributes["canonical"]
        for e in clean.events(0)
        if is_operation(e) and e.site.phase != "backward" and e.dtype == "float32"
        if e.order not in known and not e.attributes.get("leaf")
    ]
    assert sorted(rest) == ["add", "detach", "detach", "max", "max", "rsqrt"]


NAMES = (
    *("logsumexp#0", "take_along_axis#0", "matmul#1", "mul#0", "add#0", "exp#0", "square#0"),
    *("rms_norm#0", "leaf#1"),
)


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 1e-5) for name in NAMES), ("take_along_axis#0", 0.1), ("add#0", 0.1)],
)
def test_the_gradient_that_errs_is_named(
    clean: Trace, tmp_path: Path, name: str, size: float
) -> None:
    event = gradients(clean)[f"{name}:grad_out"]
    path = record(tmp_path / "b", Perturbation(event.order, event.op, size))
    first = tracediff.bisect(clean.path, path).first
    assert first is not None
    assert (first.target_site, first.op["target"]) == (str(event.site), event.op)
    assert first.where["target"] == event.source
    assert first.blame == "target"


@pytest.mark.parametrize(("size", "told"), [(0.1, "gives 1.1 times"), (-1.0, "gives nothing of")])
def test_of_several_operations_that_read_a_value_one_is_named(
    clean: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: float, told: str
) -> None:
    """Logits less their largest are read by log-sum-exp, and for the label, whose own part of the
    gradient is -1/8 there: the loss is a mean of eight."""
    part = -np.eye(24, dtype=np.float32)[np.array(LABELS)] / 8
    monkeypatch.setattr(
        "benchmarks.perturbing._scaled", lambda array, size: array + size * mx.array(part)
    )
    event = gradients(clean)["sub#0:grad_out"]
    path = record(tmp_path / "b", Perturbation(event.order, event.op, size))
    first = tracediff.bisect(clean.path, path).first
    assert first is not None
    assert first.target_site == str(event.site)
    assert told in first.meaning
    assert "mlx.take_along_axis" in first.meaning
    assert "logsumexp" not in first.meaning


def test_the_same_twice_is_silent(clean: Trace, tmp_path: Path) -> None:
    assert tracediff.bisect(clean.path, record(tmp_path / "b")).outcome == "identical"


# ---- what is kept for the backward pass ---------------------------------------------------------


class Attending(torch.nn.Module):
    """Attention by one kernel, which keeps the logarithm of a sum for its gradient, or by hand."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = torch.nn.Linear(8, 8, bias=False)
        self.fused = fused

    def forward(self, x: Any) -> Any:
        query = self.query(x)
        if self.fused:
            return torch.nn.functional.scaled_dot_product_attention(query, x, x)
        return torch.softmax(query @ x.mT / 8**0.5, -1) @ x


def attend(path: Path, fused: bool, perturbation: Perturbation | None = None) -> Trace:
    meter, perturbed = Meter(), perturbation or Perturbation(-1, "", 0.0)
    model, x = Attending(fused), torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(1))
    with (
        perturbing("pytorch", perturbed, meter),
        tracediff.record(path, stack="pytorch", level="op") as meter.tape,
    ):
        model(x).square().mean().backward()
    assert meter.done == (perturbation is not None)
    return Trace(path)


def test_what_is_kept_for_the_backward_pass_is_named_if_it_errs(tmp_path: Path) -> None:
    """The formula of the gradient computes it anew, so that it does not lead to it there."""
    plain, kernel = attend(tmp_path / "a", fused=False), attend(tmp_path / "b", fused=True)
    assert tracediff.bisect(plain, kernel).outcome == "equivalent"
    (kept,) = (e for e in kernel.events(0) if str(e.site).endswith("attention#0:out.1"))
    perturbation = Perturbation(kept.order - 1, kept.op, 1e-3, output=1)
    first = tracediff.bisect(plain, attend(tmp_path / "c", True, perturbation)).first
    assert first is not None
    assert (first.target_site, first.op["target"]) == (str(kept.site), kept.op)
    assert (first.stage, first.blame, first.where["target"]) == ("forward", "target", kept.source)
