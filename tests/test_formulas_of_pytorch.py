"""Formulas of single operations against what PyTorch computes, forward and backward.

In float64 the values have to be the same; in float32 they have to be within the bound of rounding,
and that bound has to be small.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import tracediff  # noqa: E402
from tests.catalogue_jobs import Kernel  # noqa: E402
from tracediff.align.flow import Flow, is_operation, name_of  # noqa: E402
from tracediff.bisection import bisect  # noqa: E402
from tracediff.bisection.spans import Check, Engine, is_float, is_leaf  # noqa: E402
from tracediff.trace import Trace  # noqa: E402

Tensor = Any
Case = tuple[tuple[int, ...], Callable[..., Tensor], str]

IMAGE = (2, 4, 9, 8)

CASES: dict[str, Case] = {}

LABELS = torch.tensor([0, 3, -100, 5, 1, 3])


class Function(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.gain = nn.Parameter(torch.ones(()))  # what has no parameters is no model

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.gain * x)


def of(names: str, *shape: int) -> Callable[..., Any]:
    """Enters a function of an input of that shape, of which these operations have formulas."""

    def enter(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        CASES[function.__name__] = shape, function, names
        return function

    return enter


def of_image(names: str, layer: Callable[[], nn.Module]) -> Case:
    return IMAGE, lambda x: layer().to(x)(x), names


CASES |= {
    "convolution": of_image("convolution convolution_backward", lambda: nn.Conv2d(4, 6, 3)),
    "strided": of_image(
        "convolution convolution_backward",
        lambda: nn.Conv2d(4, 6, (3, 2), (2, 3), (1, 0), (2, 1), groups=2, bias=False),
    ),
    "transposed": of_image(
        "convolution convolution_backward",
        lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2, dilation=2),
    ),
    "volume": (
        (2, 3, 4, 5, 3),
        lambda x: nn.Conv3d(3, 2, 2, padding=1).to(x)(x),
        "convolution convolution_backward",
    ),
    "batch_norm": of_image(
        "batch_norm native_batch_norm_backward", lambda: _spread(nn.BatchNorm2d(4))
    ),
    "batch_norm_in_evaluation": of_image(
        "batch_norm native_batch_norm_backward", lambda: _spread(nn.BatchNorm2d(4)).eval()
    ),
    "statistics_in_evaluation": of_image(
        "batch_norm native_batch_norm_backward", lambda: nn.BatchNorm2d(4, affine=False).eval()
    ),
    "group_norm": of_image(
        "group_norm native_group_norm_backward", lambda: _spread(nn.GroupNorm(2, 4))
    ),
    "group_norm_without_weights": of_image(
        "group_norm native_group_norm_backward", lambda: nn.GroupNorm(4, 4, affine=False)
    ),
    "average": of_image("avg_pool2d avg_pool2d_backward", lambda: nn.AvgPool2d(2)),
    "padded_average": of_image(
        "avg_pool2d avg_pool2d_backward", lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True)
    ),
    "inner_average": of_image(
        "avg_pool2d", lambda: nn.AvgPool2d((3, 2), 2, 1, True, count_include_pad=False)
    ),
    "adaptive": of_image(
        "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward", lambda: nn.AdaptiveAvgPool2d((4, 3))
    ),
    "largest": of_image(
        "max_pool2d_with_indices max_pool2d_with_indices_backward",
        lambda: nn.MaxPool2d((3, 2), 2, 1, (1, 2), ceil_mode=True),
    ),
    "tan": ((4, 30), lambda x: (0.3 * x).tan() + x.tanh().arcsin() + x.arctan(), "tan arcsin"),
    "shuffled": (
        (2, 8, 3, 5),
        lambda x: functional.pixel_unshuffle(functional.pixel_shuffle(x, 2), 2),
        "pixel_shuffle",
    ),
}


def _spread(norm: Any) -> nn.Module:
    """Weights, biases and running statistics that are not one and zero."""
    for place, tensor in enumerate(norm.state_dict().values()):
        if tensor.is_floating_point():
            tensor.copy_(torch.linspace(0.5, 1.5, len(tensor)) + place)
    return norm  # type: ignore[no-any-return]


for mode in ("nearest", "bilinear", "bicubic"):
    CASES[mode] = (
        IMAGE,
        lambda x, mode=mode: functional.interpolate(x, scale_factor=(1.7, 2), mode=mode),
        f"upsample_{mode}2d upsample_{mode}2d_backward",
    )
CASES["aligned"] = (
    IMAGE,
    lambda x: functional.interpolate(x, (5, 11), mode="bilinear", align_corners=True),
    "upsample_bilinear2d upsample_bilinear2d_backward",
)
CASES["linear"] = (
    (2, 3, 9),
    lambda x: functional.interpolate(x, scale_factor=2.3, mode="linear"),
    "upsample_linear1d upsample_linear1d_backward",
)
for mode in ("reflect", "replicate"):
    CASES[mode] = (
        IMAGE,
        lambda x, mode=mode: functional.pad(x, (1, 2, 3, 0), mode),
        {"reflect": "reflection_pad2d", "replicate": "replication_pad2d"}[mode],
    )


@of("leaky_relu elu hardswish mish softplus hardsigmoid hardtanh log_sigmoid glu", 6, 40)
def activations(x: Tensor) -> Tensor:
    x = 3 * x
    first = functional.leaky_relu(x, 0.2) + functional.selu(x) + functional.celu(x, 0.7)
    second = functional.hardswish(x) + functional.mish(x) + functional.softplus(x, 2, 3)
    third = functional.hardsigmoid(x) + functional.relu6(x) + functional.logsigmoid(x)
    return functional.glu(first * second + third)


@of("_prelu_kernel _prelu_kernel_backward arctan2 logaddexp lgamma", 6, 8)
def functions(x: Tensor) -> Tensor:
    slopes = torch.linspace(0.1, 0.4, 8, dtype=x.dtype, requires_grad=True)
    found = functional.prelu(x, slopes) + torch.atan2(x, x.flip(0)) + torch.logaddexp(x, 2 * x)
    return found + torch.lgamma(x.abs() + 1)


@of("var std cumprod logcumsumexp", 4, 6, 8)
def statistics(x: Tensor) -> Tensor:
    found = x.var(1, keepdim=True) + x.std((0, 2), correction=0, keepdim=True) + x.var()
    return found + torch.cumprod(1 + 0.1 * x, 1) + torch.logcumsumexp(x, 2)


@of("flip roll sort pad diagonal diag_embed scatter index_add split", 4, 6, 6)
def moves(x: Tensor) -> Tensor:
    rolled = x.flip(0, -1) + x.roll(2, 1) + x.roll(5) + x.sort(-1, descending=True)[0]
    padded = functional.pad(x, (1, -1, 2, 0, -1, 0), value=2.0)[:, :6].sum(0)
    diagonal = torch.diag_embed(x.diagonal(1, 1, 2), -1)
    places = torch.tensor([1, 0, 1, 3])
    added = torch.zeros_like(x).index_add(0, places, x, alpha=0.5)
    spread = torch.zeros_like(x).scatter_add(1, (x > 0).long(), x)
    halves = torch.unsafe_split(x, 3, 1)
    return rolled + padded + diagonal + added + spread + halves[0].repeat(1, 2, 1)


@of("arange eye full zeros", 6, 6)
def constants(x: Tensor) -> Tensor:
    kind = {"dtype": x.dtype}
    ranges = torch.linspace(0.1, 0.7, 6, **kind) + torch.arange(6, **kind)
    more = torch.arange(0.3, 1.5, 0.2, **kind) + torch.full((6,), 0.1, **kind)
    return x @ torch.eye(6, **kind) + ranges + more + torch.zeros(6, **kind).fill_(0.3)


@of("mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy", 6, 8)
def losses(x: Tensor) -> Tensor:
    goal = torch.linspace(-1, 1, 48, dtype=x.dtype).view(6, 8)
    found = functional.mse_loss(x, goal, reduction="sum") + functional.huber_loss(
        x, goal, delta=0.5
    )
    each = functional.smooth_l1_loss(x, goal, beta=0.3, reduction="none")
    found = found + each.sum() + functional.soft_margin_loss(x, goal.sign())
    chance = functional.binary_cross_entropy(x.sigmoid(), goal.sigmoid())
    return found + chance + functional.binary_cross_entropy_with_logits(x, goal.sigmoid())


@of("nll_loss nll_loss_backward mse_loss_backward huber_loss_backward", 6, 8)
def weighted(x: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, 8, dtype=x.dtype)
    never = torch.tensor([False] * 2 + [True] + [False] * 5)  # of a target that is ignored
    logs, goal = x.log_softmax(-1), torch.zeros_like(x)
    logs = logs.masked_fill((LABELS < 0)[:, None] & ~never, -torch.inf)
    each = functional.nll_loss(logs, LABELS, weights, reduction="none").square().sum()
    found = functional.nll_loss(logs, LABELS, weights) + each + functional.nll_loss(logs, LABELS)
    return found + functional.mse_loss(x, goal) + functional.huber_loss(x, goal, "sum")


@of("smooth_l1_loss_backward soft_margin_loss_backward binary_cross_entropy_backward", 6, 8)
def differentiated(x: Tensor) -> Tensor:
    goal = torch.linspace(-1, 1, 48, dtype=x.dtype).view(6, 8)
    found = functional.smooth_l1_loss(x, goal) + functional.soft_margin_loss(x, goal.sign())
    return found + functional.binary_cross_entropy(x.sigmoid(), goal.sigmoid(), reduction="sum")


@of("scatter", 6, 8)
def masked(x: Tensor) -> Tensor:
    """Written to where a mask says, as `Rprop` does."""
    copy = x.clone()
    copy[x > 0] = 0.5
    return copy + torch.zeros_like(x).index_put((LABELS > 2,), x[LABELS > 2], accumulate=True)


def recorded(path: Path, name: str, dtype: Any, *modes: Any, factor: float = 1.0) -> Path:
    """One forward and backward pass of a case, on an input times a factor."""
    shape, function, _ = CASES[name]
    torch.manual_seed(0)
    x = (torch.randn(shape).to(dtype) * factor).requires_grad_()
    with ExitStack() as stack:
        for mode in modes:  # below the recorder
            stack.enter_context(mode)
        stack.enter_context(tracediff.record(path, stack="pytorch", level="op"))
        out = Function(function).to(dtype)(x)
        weights = torch.linspace(-1, 2, out.numel(), dtype=dtype).view_as(out)
        (out * weights).sum().backward()
    return path


def checks(path: Path) -> dict[str, list[Check | None]]:
    """What is found of each operation, by its name."""
    found: dict[str, list[Check | None]] = {}
    with Trace(path) as trace:
        flow = Flow([event for event in trace.events(0) if is_operation(event)])
        engine = Engine(trace, flow)
        for event in flow.events.values():
            if not is_leaf(event) and is_float(event):
                found.setdefault(name_of(event), []).append(engine.check(event))
    return found


@pytest.mark.parametrize("name", sorted(CASES))
def test_formulas_give_what_pytorch_gives(name: str, tmp_path: Path) -> None:
    exact = checks(recorded(tmp_path / "exact", name, torch.float64))
    rounded = checks(recorded(tmp_path / "rounded", name, torch.float32))
    for canonical in CASES[name][2].split():
        found = [check for check in exact[canonical] if check is not None]
        assert found, canonical
        assert max(check.error for check in found) < 1e-12, canonical
    for canonical, each in rounded.items():
        for check in filter(None, each):
            assert check.ratio <= 1, (canonical, check)
            assert check.bound < 1e-3 or canonical not in CASES[name][2].split(), (canonical, check)


def slightly(op: Any, output: int = 0) -> Callable[..., Any]:
    """The operation with one of its outputs a thousandth too large."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = op(*args, **kwargs)
        if isinstance(found, torch.Tensor):
            return found * 1.001
        return tuple(x * 1.001 if place == output else x for place, x in enumerate(found))

    return wrong


aten = torch.ops.aten
PLANTED = {
    "flip": ("moves", aten.flip.default, 0),
    "sort": ("moves", aten.sort.default, 0),
    "linspace": ("constants", aten.linspace.default, 0),
    "eye": ("constants", aten.eye.default, 0),
    "pixel shuffle": ("shuffled", aten.pixel_shuffle.default, 0),
    "mean of a group": ("group_norm", aten.native_group_norm.default, 1),
    "mean of a channel": ("batch_norm", aten.native_batch_norm.default, 1),
    "gradient of a weight": ("convolution", aten.convolution_backward.default, 1),
    "variance": ("statistics", aten.var.correction, 0),
    "slope": ("functions", aten._prelu_kernel_backward.default, 1),
    "pool": ("average", aten.avg_pool2d_backward.default, 0),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_an_operation_that_is_slightly_off_is_named(fault: str, tmp_path: Path) -> None:
    name, op, output = PLANTED[fault]
    baseline = recorded(tmp_path / "a", name, torch.float32)
    other = {"factor": 1 + 2.0**-23}
    target = recorded(
        tmp_path / "b", name, torch.float32, Kernel(str(op), slightly(op, output)), **other
    )
    first = bisect(baseline, target).first
    assert first is not None
    assert (first.op["target"], first.blame) == (str(op), "target")
    twin = recorded(tmp_path / "c", name, torch.float32, **other)
    assert bisect(baseline, twin).outcome == "equivalent"


def updated(path: Path, *modes: Any, factor: float = 1.0) -> Path:
    """A step of AdamW on lists of tensors, as it is by default on accelerators."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    x = torch.randn(5, 6) * factor
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        stack.enter_context(tracediff.record(path, stack="pytorch", level="op"))
        model(x).square().sum().backward()
        optimizer.step()
    return path


@pytest.mark.parametrize("op", ["_foreach_lerp_.Scalar", "_foreach_addcdiv_.ScalarList"])
def test_an_element_of_a_list_that_is_off_is_named(op: str, tmp_path: Path) -> None:
    function = getattr(getattr(aten, op.split(".")[0]), op.split(".")[1])

    def wrong(tensors: Any, *args: Any) -> None:
        function(tensors, *args)
        tensors[2].mul_(1.001)

    other = {"factor": 1 + 2.0**-23}
    baseline = updated(tmp_path / "a")
    first = bisect(baseline, updated(tmp_path / "b", Kernel(f"aten.{op}", wrong), **other)).first
    assert first is not None
    assert (first.op["target"], first.path, first.blame) == (f"aten.{op}", "2.weight", "target")
    assert bisect(baseline, updated(tmp_path / "c", **other)).outcome == "equivalent"
