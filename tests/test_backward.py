"""Gradients and updates held to each side's own values: what is named, who is blamed, what is not.

A gated MLP with norm, residual and optimizer, computed by the reference and rounded once; the
target's inputs are nudged by rounding, so that no two values are bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tracediff import stacks
from tracediff.bisection import bisect
from tracediff.events import Run
from tracediff.recording import Policy, Tape
from tracediff.replaying import Call
from tracediff.trace import TraceWriter
from tracediff.verdict import Verdict

Array = NDArray[Any]
Fault = Callable[[str, Array], Array]
"""Given a site and its value: what is recorded there, and used from there on."""

REFERENCE = stacks.load_replayer("reference")()
WIDTH, INNER, ROWS, STEPS = 32, 48, (2, 12), 3
HYPER = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1,
    "bias_correction": True,
}  # fmt: skip


def array(*shape: int, seed: int, scale: float = 1.0) -> Array:
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def right(site: str, value: Array) -> Array:
    return value


class Job:
    """One run: forward, backward and AdamW, every value passed through the fault."""

    def __init__(self, path: Path, fault: Fault, nudge: float, hyper: Mapping[str, Any]) -> None:
        self._writer = TraceWriter(path, Run(stack="pytorch", level="module"))
        self._tape = Tape(self._writer, Policy())
        self._fault = fault
        self._hyper = {**HYPER, **hyper}
        self._x = array(*ROWS, WIDTH, seed=0) * np.float32(1 + nudge)
        self._params = {
            "block.norm": 1 + array(WIDTH, seed=1, scale=0.1),
            "block.mlp.gate": array(INNER, WIDTH, seed=2, scale=0.2),
            "block.mlp.up": array(INNER, WIDTH, seed=3, scale=0.2),
            "block.mlp.down": array(WIDTH, INNER, seed=4, scale=0.2),
        }
        self._moments = {n: [np.zeros_like(p), np.zeros_like(p)] for n, p in self._params.items()}

    def run(self) -> None:
        self._tape.emit_settings({"block.norm.eps": 1e-5})
        for name, value in self._params.items():
            self._tape.emit("loading", f"{name}.weight", "param", self._at(f"{name}:param", value))
        for step in range(STEPS):
            self._step(step)
            self._tape.advance()
        self._tape.finish()

    def _at(self, site: str, value: Array) -> Array:
        return self._fault(site, value).astype(np.float32)

    def _call(self, name: str, op: str, x: Array) -> Call:
        params = {"weight": self._params[name]} if name in self._params else {}
        return Call(op=op, inputs={"in": x}, params=params, settings={"eps": 1e-5})

    def _module(self, name: str, op: str, x: Array) -> tuple[Any, Array]:
        frame = self._tape.enter(name, op)
        self._tape.emit_in(frame, "in", x)
        found = REFERENCE.replay(self._call(name, op, x))
        assert found is not None
        out = self._at(f"{name}:out", found.value.astype(np.float32))
        self._tape.emit_out(frame, "out", out)
        self._tape.exit(frame)
        return frame, out

    def _back(self, frame: Any, grad: Array, x: Array, grads: dict[str, Array]) -> Array:
        """Records the gradients of one call, and returns that of its input."""
        self._tape.emit_grad(frame, "grad_out", grad)
        call = self._call(frame.path, frame.op, x)
        if frame.path in self._params:
            found = REFERENCE.gradient(call, grad, "weight")
            assert found is not None
            path = f"{frame.path}.weight"
            value = self._at(f"{frame.path}:grad", found.value.astype(np.float32))
            self._tape.emit("backward", path, "grad", value, inputs=(*frame.grads, *frame.ins))
            grads[path] = value
        passed = REFERENCE.gradient(call, grad, "in")
        assert passed is not None
        return self._at(f"{frame.path}:grad_in", passed.value.astype(np.float32))

    def _step(self, step: int) -> None:
        tape, x, grads = self._tape, self._x, dict[str, Array]()
        root = tape.enter("root", "Model")
        tape.emit_in(root, "in", x)
        block = tape.enter("block", "Block")
        tape.emit_in(block, "in", x)
        norm, h = self._module("block.norm", "LlamaRMSNorm", x)
        mlp = tape.enter("block.mlp", "MLP")
        tape.emit_in(mlp, "in", h)
        gate, a = self._module("block.mlp.gate", "Linear", h)
        act, s = self._module("block.mlp.act", "SiLU", a)
        up, b = self._module("block.mlp.up", "Linear", h)
        down, y = self._module("block.mlp.down", "Linear", s * b)
        tape.emit_out(mlp, "out", y)
        tape.exit(mlp)
        tape.emit_out(block, "out", x + y)
        tape.exit(block)
        tape.emit_out(root, "out", x + y)
        tape.exit(root)
        grad = (x + y) * np.float32(1e-2)
        tape.emit("loss", "loss", "out", np.asarray(np.square(x + y).mean()))
        for frame in (root, block, mlp):
            tape.emit_grad(frame, "grad_out", grad)
        of_product = self._back(down, grad, s * b, grads)
        of_up = self._back(up, of_product * s, h, grads)
        of_gate = self._back(gate, self._back(act, of_product * b, a, grads), h, grads)
        self._back(norm, self._at("block.mlp:grad_in", of_gate + of_up), x, grads)
        self._update(grads, step)

    def _update(self, grads: Mapping[str, Array], step: int) -> None:
        tape, hyper = self._tape, {**self._hyper, "step": step + 1}
        for path, grad in grads.items():
            name = path.removesuffix(".weight")
            used = self._at(f"{name}:optimizer", grad)
            m, v = self._moments[name]
            m = self._at(f"{name}:exp_avg", np.float32(0.9) * m + np.float32(0.1) * used)
            v = self._at(f"{name}:exp_avg_sq", np.float32(0.999) * v + np.float32(1e-3) * used**2)
            before, rate = self._params[name], hyper["lr"]
            first, second = (m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1)))
            moved = -rate * first / (np.sqrt(second) + 1e-8) - rate * hyper["weight_decay"] * before
            after = before + self._at(f"{name}:update", moved)
            self._moments[name], self._params[name] = [m, v], after
            events = {"grad": used, "hyper": hyper, "state.exp_avg": m, "state.exp_avg_sq": v}
            for port, value in (*events.items(), ("update", after - before), ("param", after)):
                tape.emit("optimizer", path, port, value, op="AdamW")


def judge(
    tmp_path: Path, fault: Fault, wrong: str = "target", hyper: Mapping[str, Any] | None = None
) -> Verdict:
    for side, nudge in (("baseline", 0.0), ("target", 3e-7)):
        own = fault if side == wrong else right
        Job(tmp_path / side, own, nudge, hyper or {} if side == wrong else {}).run()
    return bisect(tmp_path / "baseline", tmp_path / "target")


def times(site: str, factor: float) -> Fault:
    return lambda at, value: value * np.float32(factor) if at == site else value


def from_step(site: str, start: int, edit: Callable[[Array], Array]) -> Fault:
    calls = 0

    def fault(at: str, value: Array) -> Array:
        nonlocal calls
        calls += at == site
        return edit(value) if at == site and calls > start else value

    return fault


def test_correct_runs_agree(tmp_path: Path) -> None:
    verdict = judge(tmp_path, right)
    assert verdict.outcome == "equivalent", verdict.reason


FACTORS = {
    "a gradient through one MLP times 1.01": ("block.mlp:grad_in", 1.01, "block.norm#0:grad_out"),
    "through its down projection": ("block.mlp.down:grad_in", 1.01, "block.mlp.up#0:grad_out"),
    "through its activation": ("block.mlp.act:grad_in", 1.0001, "block.mlp.gate#0:grad_out"),
    "a gradient of a weight": ("block.mlp.up:grad", 1.0001, "block.mlp.up.weight#0:grad"),
    "a gradient of a norm": ("block.norm:grad", 1.0001, "block.norm.weight#0:grad"),
}


@pytest.mark.parametrize("wrong", ["baseline", "target"])
@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_in_the_backward_pass_is_named_and_blamed(
    tmp_path: Path, name: str, wrong: str
) -> None:
    site, factor, named = FACTORS[name]
    first = judge(tmp_path, times(site, factor), wrong).first
    assert first is not None
    assert first.site == f"0/backward/{named}"
    assert (first.origin, first.blame) == ("introduced", wrong)
    assert first.pattern == "scaled" or factor < 1.001  # among rounding it cannot be told


def test_a_class_that_computes_something_else_is_not_held_to_its_name(tmp_path: Path) -> None:
    """A SiLU that is none on one side: told in the forward pass, its gradient not accused."""
    verdict = judge(tmp_path, times("block.mlp.act:out", 0.5))
    assert verdict.first is not None
    assert verdict.first.site == "0/forward/block.mlp.act#0:out"
    accused = {also.path for also in verdict.also if also.stage == "backward"}
    assert "block.mlp.gate" not in accused


def test_one_weight_changed_by_0_05_behind_the_back(tmp_path: Path) -> None:
    """The output is then not that of the weight that was recorded as loaded."""

    def fault(site: str, value: Array) -> Array:
        if site != "block.mlp.down:out":
            return value
        return value + np.float32(0.05) * (np.arange(WIDTH) == 3)

    first = judge(tmp_path, fault).first
    assert first is not None
    assert (first.site, first.blame) == ("0/forward/block.mlp.down#0:out", "target")


UPDATES = {
    "a gradient on its way to the optimizer": ("block.mlp.up:optimizer", "grad", 1.001),
    "a first moment": ("block.mlp.up:exp_avg", "state.exp_avg", 1.0001),
    "a second moment": ("block.mlp.up:exp_avg_sq", "state.exp_avg_sq", 1.0001),
    "an update": ("block.mlp.up:update", "update", 1.01),
}


@pytest.mark.parametrize("wrong", ["baseline", "target"])
@pytest.mark.parametrize("name", UPDATES)
def test_an_optimizer_that_departs_from_its_own_state_is_blamed(
    tmp_path: Path, name: str, wrong: str
) -> None:
    site, port, factor = UPDATES[name]
    fault = from_step(site, 1, lambda value: value * np.float32(factor))
    first = judge(tmp_path, fault, wrong).first
    assert first is not None
    assert (first.site, first.blame) == (f"1/optimizer/block.mlp.up.weight:{port}", wrong)
    assert first.detail["agreed_steps"] == 1


def test_a_lost_state_is_blamed(tmp_path: Path) -> None:
    """Moments that start at zero again, while the number of updates goes on."""
    calls = 0

    def fault(site: str, value: Array) -> Array:
        nonlocal calls
        calls += site == "block.mlp.up:exp_avg"
        return value if site != "block.mlp.up:exp_avg" or calls != 3 else np.zeros_like(value)

    first = judge(tmp_path, fault).first
    assert first is not None
    assert first.site == "2/optimizer/block.mlp.up.weight:state.exp_avg"
    assert first.blame == "target"


@pytest.mark.parametrize("hyper", [{"lr": 2e-3}, {"weight_decay": 0.0}])
def test_other_hyper_parameters_are_nobodys_fault(tmp_path: Path, hyper: dict[str, float]) -> None:
    first = judge(tmp_path, right, hyper=hyper).first
    assert first is not None
    assert (first.port, first.blame) == ("hyper", "undecided")
