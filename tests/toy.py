"""A two-layer network trained with AdamW in NumPy, recorded through the tape.

It stands for a stack in the tests of bisection: `exact` computes every product in float64 before
rounding, as another library's kernels would, so two runs differ by rounding in every value. Each
fault breaks one named thing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tracediff.events import Run
from tracediff.recording import Policy, Tape
from tracediff.trace import TraceWriter

Array = NDArray[np.float32]
Fault = Callable[[str, int, Array], Array]

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
BATCH, SEQUENCE, WIDTH, OUT = 4, 8, 32, 16


def no_fault(name: str, step: int, value: Array) -> Array:
    return value


def record(
    path: Path,
    *,
    exact: bool = False,
    fault: Fault = no_fault,
    steps: int = 3,
    level: str = "module",
    stack: str = "pytorch",
    text: str = "<|user|>\nHow much?\n<|assistant|>\n",
    bias_correction: bool = True,
    lr: Callable[[int], float] = lambda step: 1e-2 / (step + 1),
    finish: bool = True,
) -> Path:
    """Records a run. `fault(name, step, value)` may return another value for a named tensor."""
    writer = TraceWriter(path, Run(stack=stack, level=level))
    tape = Tape(writer, Policy(level=level))
    tape.emit_settings({"config.eps": 1e-5, f"version.{stack}": "1.0"})
    tape.emit("rendering", "sample[0].text", "out", text, kind="text")
    rng = np.random.default_rng(0)
    weights = {
        "layers.0.weight": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32),
        "layers.1.weight": rng.normal(size=(OUT, WIDTH)).astype(np.float32) / 8,
    }
    weights = {name: fault(name, -1, value) for name, value in weights.items()}
    for name, value in weights.items():
        tape.emit("loading", name, "param", value, op="Linear")
    state = {name: (np.zeros_like(w), np.zeros_like(w)) for name, w in weights.items()}
    for step in range(steps):
        ids = np.random.default_rng(100 + step).integers(0, WIDTH, size=(BATCH, SEQUENCE))
        tape.start_step()
        tape.emit_batch("input_ids", fault("ids", step, ids), 0)
        generator = np.arange(4, dtype=np.uint32) + step
        tape.emit("rng", "python", "state", fault("rng", step, generator), kind="state")
        _step(tape, step, ids, weights, state, exact, fault, lr(step), bias_correction)
        tape.advance()
    if finish:
        tape.finish()
    return path


def _step(
    tape: Tape,
    step: int,
    ids: NDArray[np.int64],
    weights: dict[str, Array],
    state: dict[str, tuple[Array, Array]],
    exact: bool,
    fault: Fault,
    lr: float,
    bias_correction: bool,
) -> None:
    def matmul(a: Array, b: Array) -> Array:
        if exact:
            return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
        return a @ b

    def call(name: str, op: str, x: Array, function: Callable[[Array], Array]) -> Array:
        frame = tape.enter(name, op)
        frames[name] = frame
        tape.emit_in(frame, "in", x)
        y = fault(name, step, function(x))
        tape.emit_out(frame, "out", y)
        tape.exit(frame)
        return y

    frames: dict = {}
    table = np.random.default_rng(7).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    root = frames["root"] = tape.enter("root", "Model")
    tape.emit_in(root, "in", ids)
    x0 = table[ids]
    h0 = call("layers.0", "Linear", x0, lambda x: matmul(x, weights["layers.0.weight"].T))
    h1 = call("act", "Tanh", h0, np.tanh)
    h2 = call("layers.1", "Linear", h1, lambda x: matmul(x, weights["layers.1.weight"].T))
    tape.emit_out(root, "out", h2)
    tape.exit(root)
    loss = fault("loss", step, np.asarray(np.mean(h2.astype(np.float64) ** 2), np.float32))
    tape.emit("loss", "loss", "out", loss)
    grads = {}
    g2 = fault("grad layers.1", step, 2 * h2 / np.float32(h2.size))
    tape.emit_grad(frames["layers.1"], "grad_out", g2)
    grads["layers.1.weight"] = matmul(g2.reshape(-1, OUT).T, h1.reshape(-1, WIDTH))
    g1 = fault("grad act", step, matmul(g2, weights["layers.1.weight"]))
    tape.emit_grad(frames["act"], "grad_out", g1)
    g0 = fault("grad layers.0", step, g1 * (1 - h1 * h1))
    tape.emit_grad(frames["layers.0"], "grad_out", g0)
    grads["layers.0.weight"] = matmul(g0.reshape(-1, WIDTH).T, x0.reshape(-1, WIDTH))
    for name, grad in grads.items():
        frame = frames[name.removesuffix(".weight")]
        inputs = (*frame.grads, *frame.ins)
        tape.emit("backward", name, "grad", fault(f"grad {name}", step, grad), inputs=inputs)
    _update(tape, step, weights, state, grads, fault, lr, bias_correction)
    tape.emit("trajectory", "loss", "out", loss)


def _update(
    tape: Tape,
    step: int,
    weights: dict[str, Array],
    state: dict[str, tuple[Array, Array]],
    grads: dict[str, Array],
    fault: Fault,
    lr: float,
    bias_correction: bool,
) -> None:
    hyper = HYPER | {"lr": lr, "step": step + 1, "bias_correction": bias_correction}
    b1, b2 = hyper["beta1"], hyper["beta2"]
    for name, grad in grads.items():
        clipped = fault(f"clip {name}", step, grad)
        tape.emit("optimizer", name, "grad", clipped, op="AdamW")
        tape.emit("optimizer", name, "hyper", hyper, kind="setting", op="AdamW")
        m, v = state[name]
        m = fault(f"m {name}", step, np.float32(b1) * m + np.float32(1 - b1) * clipped)
        v = np.float32(b2) * v + np.float32(1 - b2) * clipped * clipped
        state[name] = m, v
        c1, c2 = (1 - b1 ** (step + 1), 1 - b2 ** (step + 1)) if bias_correction else (1, 1)
        before = weights[name]
        decayed = before * np.float32(1 - lr * hyper["weight_decay"])
        new = decayed - np.float32(lr / c1) * m / (np.sqrt(v / np.float32(c2)) + np.float32(1e-8))
        weights[name] = fault(f"new {name}", step, new.astype(np.float32))
        tape.emit("optimizer", name, "state.exp_avg", m, op="AdamW")
        tape.emit("optimizer", name, "state.exp_avg_sq", v, op="AdamW")
        tape.emit("optimizer", name, "update", weights[name] - before, op="AdamW")
        tape.emit("optimizer", name, "param", weights[name], op="AdamW")
