"""The gradient of attention's values: cut off or scaled on one side, and whom the verdict blames.

Forward and backward pass are torch's own, of attention in which two heads share each value.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tracediff.bisection import bisect
from tracediff.bisection.attention_gradients import examine
from tracediff.events import Run, Site
from tracediff.recording import Policy, Tape
from tracediff.trace import Trace, TraceWriter
from tracediff.verdict import Verdict

Array = NDArray[Any]
BATCH, LENGTH, HEADS, KEY_HEADS, SIZE = 2, 10, 4, 2, 8
WIDTH, SHARED = HEADS * SIZE, KEY_HEADS * SIZE
WIDTHS = {"q_proj": WIDTH, "k_proj": SHARED, "v_proj": SHARED, "o_proj": WIDTH}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(size=shape) / shape[-1] ** 0.5
    return torch.tensor(values, dtype=torch.float32)


class Job:
    """One step of training, recorded.

    Args:
        cut: Values are cut off from the backward pass; their weight has no gradient, or a zero one.
        factor: Of the gradient of the values.
        trains: The value projection is trained.
        share: What the weights of a query sum to.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype = torch.float32,
        stack: str = "pytorch",
        nudge: float = 0.0,
        cut: bool = False,
        factor: float = 1.0,
        trains: bool = True,
        share: float = 1.0,
    ) -> None:
        self.cut, self.factor, self.share, self.stack = cut, factor, share, stack
        self.tape = Tape(TraceWriter(path, Run(stack=stack, level="module")), Policy())
        self.tape.emit_settings({"config.num_attention_heads": HEADS})
        self.weights = {
            name: drawn(width, WIDTH, seed=seed).to(dtype).requires_grad_()
            for seed, (name, width) in enumerate(WIDTHS.items())
        }
        for name, weight in self.weights.items():
            attributes = {"trainable": trains or name != "v_proj"}
            self.tape.emit(
                "loading", f"attn.{name}.weight", "param", plain(weight), attributes=attributes
            )
        self.frames: dict[str, Any] = {}
        self.outs: dict[str, torch.Tensor] = {}
        x = drawn(BATCH, LENGTH, WIDTH, seed=7) * 6 * (1 + nudge)
        self.step(x.to(dtype))
        self.tape.advance()
        self.tape.finish()
        self.path = path

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        frame = self.frames[name] = self.tape.enter(f"attn.{name}", "Linear")
        self.tape.emit_in(frame, "in", plain(x))
        out = self.outs[name] = x @ self.weights[name].T
        out.retain_grad()
        self.tape.emit_out(frame, "out", plain(out))
        self.tape.exit(frame)
        return out

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self.linear(name, x) for name in ("q_proj", "k_proj", "v_proj"))
        if self.cut:
            value = value.detach()
        if self.factor != 1:  # the same value, whose gradient is multiplied
            value = self.factor * value + ((1 - self.factor) * value).detach()
        q, k, v = (
            each.view(BATCH, LENGTH, -1, SIZE).transpose(1, 2) for each in (query, key, value)
        )
        k, v = (each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) * SIZE**-0.5
        hidden = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) * self.share
        return (weights @ v).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)

    def step(self, x: torch.Tensor) -> None:
        tape = self.tape
        attn = tape.enter("attn", "Attention")
        tape.emit_in(attn, "in", plain(x))
        out = self.linear("o_proj", self.attention(x))
        tape.emit_out(attn, "out", plain(out))
        tape.exit(attn)
        loss = (out.float() * drawn(BATCH, LENGTH, WIDTH, seed=8)).sum()
        tape.emit("loss", "loss", "out", plain(loss))
        loss.backward()
        tape.emit_grad(attn, "grad_out", plain(self.outs["o_proj"].grad))
        for name in ("o_proj", "v_proj", "k_proj", "q_proj"):
            grad, of_weight = self.outs[name].grad, self.weights[name].grad
            frame = self.frames[name]
            if grad is not None:
                tape.emit_grad(frame, "grad_out", plain(grad))
            if of_weight is None and self.stack == "mlx":  # its gradients are never missing
                of_weight = torch.zeros_like(self.weights[name])
            if of_weight is not None:
                inputs = (*frame.grads, *frame.ins)
                path = f"attn.{name}.weight"
                tape.emit("backward", path, "grad", plain(of_weight), inputs=inputs)


def plain(value: torch.Tensor | None) -> Array:
    assert value is not None
    if value.dtype == torch.bfloat16:
        import ml_dtypes

        return value.detach().float().numpy().astype(ml_dtypes.bfloat16)
    return value.detach().numpy()


def judged(tmp_path: Path, baseline: dict[str, Any], target: dict[str, Any]) -> Verdict:
    a = Job(tmp_path / "a.zarr", **baseline)
    b = Job(tmp_path / "b.zarr", nudge=3e-7, **target)
    return bisect(a.path, b.path)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize("wrong", ["baseline", "target"])
@pytest.mark.parametrize("fault", [{"cut": True}, {"factor": 1.25}], ids=["cut", "scaled"])
def test_values_that_get_another_gradient_are_blamed_on_their_side(
    tmp_path: Path, dtype: torch.dtype, wrong: str, fault: dict[str, Any]
) -> None:
    sides: dict[str, dict[str, Any]] = {"baseline": {"dtype": dtype}, "target": {"dtype": dtype}}
    sides[wrong] |= fault
    first = judged(tmp_path, **sides).first
    assert first is not None
    assert first.site == "0/backward/attn.v_proj#0:grad_out"
    assert first.blame == wrong
    assert "does not sum to what attention passes back" in first.meaning


def test_a_small_factor_is_blamed(tmp_path: Path) -> None:
    first = judged(tmp_path, {}, {"factor": 1.0001}).first
    assert first is not None
    assert (first.site, first.blame) == ("0/backward/attn.v_proj#0:grad_out", "target")


def test_a_weight_whose_gradient_is_zero_on_a_stack_that_tells_no_other(tmp_path: Path) -> None:
    first = judged(tmp_path, {}, {"cut": True, "stack": "mlx"}).first
    assert first is not None
    assert (first.site, first.blame) == ("0/backward/attn.v_proj.weight#0:grad", "target")


@DTYPES
@pytest.mark.parametrize("stack", ["pytorch", "mlx"])
def test_the_same_on_both_sides_is_silent(tmp_path: Path, dtype: torch.dtype, stack: str) -> None:
    common = {"dtype": dtype}
    assert judged(tmp_path, common, common | {"stack": stack}).outcome != "diverged"
    site = Site(0, "backward", "attn.v_proj", 0, "grad_out")
    traces = Trace(tmp_path / "a.zarr"), Trace(tmp_path / "b.zarr")
    assert examine(traces, (site, site)) == [True, True]
    keys = replace(site, path="attn.k_proj")
    assert examine(traces, (keys, keys)) == [None, None]


@pytest.mark.parametrize(
    ("baseline", "target"),
    [
        ({}, {"cut": True, "trains": False}),  # frozen: nothing is asked of it
        ({"share": 0.9}, {"share": 0.9, "cut": True}),  # another attention than the sum is of
        ({"factor": 1.1}, {"factor": 1.2}),  # neither is right
    ],
)
def test_where_it_cannot_be_said_nobody_is_blamed(
    tmp_path: Path, baseline: dict[str, Any], target: dict[str, Any]
) -> None:
    verdict = judged(tmp_path, baseline, target)
    assert verdict.outcome == "diverged"
    assert verdict.first is not None
    assert verdict.first.blame == "undecided"
