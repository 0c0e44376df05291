"""Jobs with the arithmetic faults of the catalogue (section c); shared by the tests.

Each takes whether it is to have its fault. A fault of a kernel that no CPU has is planted below the
recorder: one operation gives another result than it should.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

Tensor = Any
Job = Callable[[bool], None]


class Net(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any], weight: Tensor | None = None) -> None:
        super().__init__()
        self.function, self.takes_weight = function, weight is not None
        self.weight = nn.Parameter(torch.zeros(1) if weight is None else weight)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        given = (self.weight,) if self.takes_weight else ()
        return self.function(*inputs, *given, **named)


def run(function: Callable[..., Any], *inputs: Tensor, weight: Tensor | None = None) -> Tensor:
    return Net(function, weight)(*inputs)


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


class Kernel(TorchDispatchMode):
    """Runs something else in place of one operation, below the recorder."""

    def __init__(self, op: str, wrong: Callable[..., Any]) -> None:
        super().__init__()
        self.op, self.wrong = op, wrong

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self.wrong if str(func) == self.op else func
        return run(*args, **(kwargs or {}))


KERNELS: dict[Job, tuple[str, Callable[..., Any]]] = {}


def kernel(op: str, wrong: Callable[..., Any]) -> Callable[[Job], Job]:
    """Plants a fault of a kernel in a job."""

    def plant(job: Job) -> Job:
        KERNELS[job] = op, wrong
        return job

    return plant


# ---- norms and activations ----------------------------------------------------------------------


def c01(faulty: bool) -> None:
    """1 + w of Gemma's norm is left out."""

    def norm(x: Tensor, w: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed * (w if faulty else 1 + w)

    run(norm, floats(4, 64), weight=0.1 * floats(64, seed=1))


def c02(faulty: bool) -> None:
    """The cast to bfloat16 comes before the weight, or after it: rounding."""

    def norm(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed.to(torch.bfloat16) * w if faulty else (normed * w.float()).to(torch.bfloat16)

    weight = (1 + 0.1 * floats(64, seed=1)).to(torch.bfloat16)
    run(norm, floats(4, 64).to(torch.bfloat16), weight=weight)


def _summed_in_bfloat16(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    total = torch.zeros(x.shape[0], dtype=torch.bfloat16)
    for column in x.T:
        total = (total + column).to(torch.bfloat16)
    return total.float()[:, None] / x.shape[-1]


@kernel("aten.mean.dim", _summed_in_bfloat16)
def c03(faulty: bool) -> None:
    """The sum of squares of a norm runs in bfloat16; one channel is huge."""
    x = torch.ones(4, 256)
    x[:, 7] = 40
    run(lambda x, w: functional.rms_norm(x, (256,), w, 1e-6), x, weight=torch.ones(256))


def c04(faulty: bool) -> None:
    """The tanh formula in place of erf."""
    approximate = "tanh" if faulty else "none"
    run(lambda x: functional.gelu(x, approximate=approximate), torch.linspace(-6, 6, 600))


# ---- attention ----------------------------------------------------------------------------------


def c05(faulty: bool) -> None:
    """Two queries on five keys: PyTorch aligns a causal mask top left."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(2, 5, dtype=torch.bool).tril(0 if faulty else 3)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    run(attend, floats(1, 2, 2, 16), floats(1, 2, 5, 16, seed=1), floats(1, 2, 5, 16, seed=2))


def _masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, hidden: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~keep, hidden).softmax(-1) @ v


def _padded(attend: Callable[..., Tensor]) -> None:
    """Three tokens of which the first is padding, and no query may see it."""
    q, k, v = (floats(1, 2, 3, 16, seed=i) for i in range(3))

    def model(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        keep = torch.ones(3, 3, dtype=torch.bool).tril() & attention_mask.bool()
        return attend(q, k, v, keep[None, None]).transpose(1, 2)

    ids = torch.tensor([[0, 5, 6]])
    Net(model)(ids, attention_mask=torch.tensor([[0, 1, 1]]))


def c06(faulty: bool) -> None:
    """A row that may see nothing is NaN: reported, though it is of padding."""
    hidden = -torch.inf if faulty else torch.finfo(torch.float32).min
    _padded(lambda q, k, v, keep: _masked(q, k, v, keep, hidden))


def c06_padding(faulty: bool) -> None:
    """The same row is zero, or the mean of the values: padding, which nobody looks at."""

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        if faulty:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return _masked(q, k, v, keep, torch.finfo(torch.float32).min)

    _padded(attend)


def c08(faulty: bool) -> None:
    """True hides where it should keep."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        mask = mask.logical_not() | torch.eye(6, dtype=torch.bool) if faulty else mask
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    run(attend, *(floats(1, 2, 6, 16, seed=i) for i in range(3)))


# ---- router -------------------------------------------------------------------------------------


def c11(faulty: bool) -> None:
    """The weights of the chosen experts do not add up to one."""

    def route(logits: Tensor, experts: Tensor) -> Tensor:
        top = logits.softmax(-1).topk(2, -1).values
        return experts * (top if faulty else top / top.sum(-1, keepdim=True))

    run(route, floats(16, 4), floats(16, 2, seed=1))


def c11_same_function(faulty: bool) -> None:
    """softmax, top-k, norm is top-k, softmax."""

    def route(logits: Tensor, experts: Tensor) -> Tensor:
        if faulty:
            return experts * logits.topk(2, -1).values.softmax(-1)
        top = logits.softmax(-1).topk(2, -1).values
        return experts * (top / top.sum(-1, keepdim=True))

    run(route, floats(16, 4), floats(16, 2, seed=1))


def c11_no_gradient(faulty: bool) -> None:
    """Top-k before softmax with one expert: the router has no gradient."""

    def route(logits: Tensor, experts: Tensor) -> Tensor:
        if faulty:
            return experts * logits.topk(1, -1).values.softmax(-1)
        return experts * logits.softmax(-1).topk(1, -1).values

    run(route, floats(16, 4).requires_grad_(), floats(16, 1, seed=1)).sum().backward()


def c12(faulty: bool) -> None:
    """Probabilities that tie in bfloat16 go to other experts."""

    def route(logits: Tensor) -> Tensor:
        scores = logits.to(torch.bfloat16).float() if faulty else logits
        return scores.topk(2, -1).indices

    run(route, torch.tensor([[3.0, 2.999, 2.998, 0.0]] * 8) - torch.arange(8.0)[:, None])


def c13(faulty: bool) -> None:
    """The auxiliary loss takes a softmax of probabilities."""

    def balance(logits: Tensor) -> Tensor:
        probabilities = logits.softmax(-1)
        if faulty:
            probabilities = probabilities.softmax(-1)
        return (probabilities.mean(0) * 4).square().sum()

    run(balance, floats(16, 4))


# ---- loss ---------------------------------------------------------------------------------------


def c16(faulty: bool) -> None:
    """The smoothing term counts ignored rows."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        counted = labels != -100
        logs = logits.log_softmax(-1)
        picked = -logs.gather(-1, labels.clamp(min=0)[:, None])[:, 0] * counted
        smooth = -logs.mean(-1)
        if not faulty:
            smooth = smooth * counted
        return (0.9 * picked + 0.1 * smooth).sum() / counted.sum()

    labels = torch.tensor([1, -100, 2, -100] * 8)
    run(loss, floats(32, 5), labels)


# ---- kernels ------------------------------------------------------------------------------------


def c14(faulty: bool) -> None:
    """A row alone, or in a batch of eight: another kernel, and rounding."""

    def project(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([row @ w for row in x.split(1)]) if faulty else x @ w

    run(project, floats(8, 1024), weight=floats(1024, 16, seed=1))


def _read_after_write(x: Tensor, index: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    return torch.ops.aten.index_put_(x, index, 2 * values, accumulate)


@kernel("aten.index_put_.default", _read_after_write)
def c17(faulty: bool) -> None:
    """An indexed in-place sum reads what it has written."""

    def double(x: Tensor, rows: Tensor) -> Tensor:
        y = x.clone()
        y[rows] += y[rows]
        return y * 3

    run(double, floats(8, 16), torch.tensor([1, 4, 6]))


def _cut(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@kernel("aten.mm.default", lambda a, b: _cut(a) @ _cut(b))
def c18(faulty: bool) -> None:
    """Operands of a product are cut to 10 bits of mantissa, under the name of float32."""
    run(lambda x, w: x @ w, floats(32, 64), weight=floats(64, 32, seed=1))


def _update_of_a_copy(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    torch.ops.aten.addcdiv_(x if x.is_contiguous() else x.contiguous(), a, b, value=value)
    return x


@kernel("aten.addcdiv_.default", _update_of_a_copy)
def c19(faulty: bool) -> None:
    """The update of a tensor that is not contiguous goes to a temporary copy."""
    model = Net(lambda x, w: x @ w, floats(8, 16).T)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    model(floats(4, 16)).square().sum().backward()
    optimizer.step()


@kernel("aten.silu_backward.default", lambda grad, x: grad * torch.sigmoid(x))
def c20(faulty: bool) -> None:
    """The gradient of an activation is wrong, its forward pass right."""
    model = Net(lambda x, w: functional.silu(x @ w), floats(16, 32, seed=1))
    model(floats(8, 16)).square().sum().backward()


def c21(faulty: bool) -> None:
    """Ids go through float32: above 2**24 they are rounded."""

    def offset(ids: Tensor) -> Tensor:
        return (ids.float() + 1).long() if faulty else ids + 1

    run(offset, torch.arange(16777216 - 16, 16777216 + 16))


@kernel("aten.argmax.default", lambda x, dim: torch.full(x.shape[:-1], -(2**63)))
def c21_argmax(faulty: bool) -> None:
    """argmax gives the smallest integer."""
    run(lambda x: x.argmax(-1), floats(32, 8))


def _contiguous(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    flat = torch.as_strided(x, x.shape, (x.shape[1], 1))
    return torch.ops.aten._softmax(flat.contiguous(), dim, half_to_float)


@kernel("aten._softmax.default", _contiguous)
def c22(faulty: bool) -> None:
    """A kernel reads a slice as if it were contiguous."""
    run(lambda x: x[:, :16].softmax(-1), floats(4, 32))


def c23(faulty: bool) -> None:
    """The inside of an MLP in float32, or in bfloat16 all through: rounding."""

    def mlp(x: Tensor, w: Tensor) -> Tensor:
        inner = torch.bfloat16 if faulty else torch.float32
        up = (x @ w).to(inner)
        return (functional.silu(up) * up).to(torch.bfloat16)

    run(mlp, floats(8, 64).to(torch.bfloat16), weight=floats(64, 32, seed=1).to(torch.bfloat16))


# ---- two stacks ---------------------------------------------------------------------------------


def _attention_of_mlx(queries: int) -> None:
    import mlx.core as mx
    import mlx.nn

    class Net(mlx.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.zeros(1)

        def __call__(self, *inputs: Any) -> Any:
            return mx.fast.scaled_dot_product_attention(*inputs, scale=0.25, mask="causal")

    Net()(*(mx.array(x.numpy()) for x in _few_queries(queries)))


def _few_queries(queries: int) -> list[Tensor]:
    return [floats(1, 2, n, 16, seed=seed) for seed, n in enumerate((queries, 5, 5))]


def c05_of_pytorch(square: bool) -> None:
    """PyTorch aligns a causal mask top left."""
    run(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        *_few_queries(5 if square else 2),
    )


def c05_of_mlx(_: bool) -> None:
    """MLX aligns it bottom right."""
    _attention_of_mlx(2)


def c05_of_mlx_square(_: bool) -> None:
    """Where there are as many queries as keys, it is the same."""
    _attention_of_mlx(5)
