"""Arithmetic faults of the catalogue (section c), each named at the operation, and clean twins.

The target has the fault; the baseline is right. Both are written by hand, as one stack or two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tracediff
from tests.op_traces import Array, Stack, Value

Job = Callable[[Stack, bool], Value]


def floats(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def c01_weight_plus_one(stack: Stack, faulty: bool) -> Value:
    """1 + w of Gemma's norm is left out."""
    x, w = stack.leaf("norm", floats(8, 64)), stack.leaf("norm", floats(64, seed=1, scale=0.1))
    gain = w if faulty else stack.op("norm@add", lambda a: a + 1, w, operands=[None, 1.0])
    normed = stack.op(
        "norm@rms_norm",
        lambda a: a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6),
        x,
        args={"eps": 1e-6},
    )
    return stack.op("norm@mul", lambda a, b: a * b, normed, gain)


def c03_sum_in_bfloat16(stack: Stack, faulty: bool) -> Value:
    """The sum of squares of a fused norm runs in bfloat16; one channel is huge."""
    data = np.ones((4, 256), np.float32)
    data[:, 7] = 40

    def norm(a: Array) -> Array:
        squares = (a * a).astype(np.float64)
        if faulty:
            total = np.zeros((len(a), 1), ml_dtypes.bfloat16)
            for column in squares.T:
                total = (total + column[:, None].astype(ml_dtypes.bfloat16)).astype(total.dtype)
        else:
            total = squares.sum(-1, keepdims=True)
        return a / np.sqrt(total.astype(np.float64) / a.shape[-1] + 1e-6)

    return stack.op("norm@rms_norm", norm, stack.leaf("norm", data), args={"eps": 1e-6})


def c04_gelu(stack: Stack, faulty: bool) -> Value:
    """The tanh formula in place of erf."""
    erf = np.vectorize(math.erf)
    grid = np.linspace(-6, 6, 600, dtype=np.float32)

    def gelu(a: Array) -> Array:
        if faulty:
            return 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
        return 0.5 * a * (1 + erf(a / math.sqrt(2)))

    args = {"approximate": "tanh" if faulty else "none"}
    return stack.op("mlp@gelu", gelu, stack.leaf("mlp", grid), args=args)


def attention(q: Array, k: Array, v: Array, visible: Array) -> Array:
    scores = np.where(visible, q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]), -np.inf)
    return np.asarray(softmax(scores) @ v)


def c05_causal_alignment(stack: Stack, faulty: bool) -> Value:
    """Two queries on five keys: top left in place of bottom right."""
    q = stack.leaf("attn.q", floats(1, 2, 2, 16))
    k, v = (stack.leaf(f"attn.{n}", floats(1, 2, 5, 16, seed=i)) for i, n in ((1, "k"), (2, "v")))
    visible = np.tri(2, 5, 0 if faulty else 3, dtype=bool)
    args = {"is_causal": True} if faulty else {"mask": "causal"}
    return stack.op(
        "attn@attention", lambda a, b, c: attention(a, b, c, visible), q, k, v, args=args
    )


def c08_meaning_of_a_mask(stack: Stack, faulty: bool) -> Value:
    """True hides where it should keep."""
    q, k, v = (stack.leaf(f"attn.{i}", floats(1, 2, 6, 16, seed=i)) for i in range(3))
    visible = np.tri(6, dtype=bool)
    mask = stack.leaf("attn.mask", visible)

    def attend(a: Array, b: Array, c: Array, m: Array) -> Array:
        keep = ~m | np.eye(6, dtype=bool) if faulty else m
        return attention(a, b, c, keep)

    return stack.op("attn@attention", attend, q, k, v, mask)


def c11_renormalised_router(stack: Stack, faulty: bool) -> Value:
    """The weights of the chosen experts do not add up to one."""
    p = stack.op("gate@softmax", softmax, stack.leaf("gate", floats(16, 4)), args={"dim": -1})
    top = stack.op("gate@topk", lambda a: -np.sort(-a, -1)[:, :2], p, args={"k": 2, "dim": -1})
    if not faulty:
        total = stack.op(
            "gate@sum",
            lambda a: a.sum(-1, keepdims=True),
            top,
            args={"dim": [-1], "keepdim": True},
        )
        top = stack.op("gate@div", lambda a, b: a / b, top, total)
    return stack.op(
        "experts@mul", lambda a, b: a * b, top, stack.leaf("experts", floats(16, 2, seed=3))
    )


def c18_short_operands(stack: Stack, faulty: bool) -> Value:
    """Operands of a product are cut to 10 bits of mantissa, under the name of float32."""

    def cut(a: Array) -> Array:
        bits = a.astype(np.float32).view(np.uint32)
        return ((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)

    x, w = stack.leaf("proj", floats(32, 64)), stack.leaf("proj", floats(64, 32, seed=1))
    product = (lambda a, b: cut(a) @ cut(b)) if faulty else (lambda a, b: a @ b)
    return stack.op("proj@matmul", product, x, w)


def c19_output_left_unwritten(stack: Stack, faulty: bool) -> Value:
    """An in-place update of a tensor that is not contiguous goes to a temporary copy."""
    p, m, v = (stack.leaf(f"weight.{i}", np.abs(floats(3, 8, seed=i)) + 0.1) for i in range(3))
    update = (lambda a, b, c: a) if faulty else (lambda a, b, c: a - 0.1 * b / c)
    return stack.op(
        "weight@addcdiv", update, p, m, v, operands=[None, None, None, -0.1], op="aten.addcdiv_"
    )


def c20_backward_kernel(stack: Stack, faulty: bool) -> Value:
    """The gradient of an activation is wrong, its forward pass right."""
    x, g = stack.leaf("act", floats(8, 32)), stack.leaf("act", floats(8, 32, seed=1))

    def backward(grad: Array, a: Array) -> Array:
        s = 1 / (1 + np.exp(-a))
        return grad * s * (1 + (0 if faulty else a * (1 - s)))

    return stack.op("act@silu_backward", backward, g, x, phase="backward")


def c22_strides_of_a_slice(stack: Stack, faulty: bool) -> Value:
    """A kernel reads a slice as if it were contiguous."""
    x = stack.leaf("attn", floats(4, 32))
    part = stack.op(
        "attn@slice", lambda a: a[:, :16], x, op="aten.slice.Tensor", args={"dim": 1, "end": 16}
    )

    def wrong(a: Array) -> Array:
        return softmax(x[0].reshape(-1)[: a.size].reshape(a.shape).astype(a.dtype))

    return stack.op("attn@softmax", wrong if faulty else softmax, part, args={"dim": -1})


FAULTS: dict[Job, tuple[str, str]] = {
    c01_weight_plus_one: ("add", "undecided"),
    c03_sum_in_bfloat16: ("rms_norm", "target"),
    c04_gelu: ("gelu", "undecided"),
    c05_causal_alignment: ("attention", "undecided"),
    c08_meaning_of_a_mask: ("attention", "target"),
    c11_renormalised_router: ("div", "undecided"),
    c18_short_operands: ("matmul", "target"),
    c19_output_left_unwritten: ("aten.addcdiv_", "target"),
    c20_backward_kernel: ("silu_backward", "target"),
    c22_strides_of_a_slice: ("softmax", "target"),
}


def bisected(folder: Path, job: Job, faulty: bool) -> tracediff.Verdict:
    for name, fault, exact in (("a", False, False), ("b", faulty, True)):
        stack = Stack(folder / name, "pytorch", exact=exact)
        stack.finish(job(stack, fault))
    return tracediff.bisect(folder / "a", folder / "b")


@pytest.mark.parametrize("job", FAULTS, ids=lambda job: job.__name__)
def test_the_fault_is_named_at_its_operation(tmp_path: Path, job: Job) -> None:
    verdict = bisected(tmp_path, job, faulty=True)
    first, (op, blame) = verdict.first, FAULTS[job]
    assert first is not None, verdict.reason
    assert first.span is not None
    side = "target" if "target" in first.op else "baseline"  # what the target lacks
    assert (first.op[side], first.blame) == (op, blame)
    assert all(line.startswith("model.py:") for line in first.where.values())


@pytest.mark.parametrize("job", FAULTS, ids=lambda job: job.__name__)
def test_the_clean_twin_is_silent(tmp_path: Path, job: Job) -> None:
    assert bisected(tmp_path, job, faulty=False).outcome in ("identical", "equivalent")
