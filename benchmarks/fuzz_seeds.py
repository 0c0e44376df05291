"""What `benchmarks.fuzz` mutates: pairs of small sound traces, one for each form of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from tracediff.testing import build_trace
from tracediff.trace.snapshot import write_snapshot

Values = Iterator[tuple[str, Any]]

_RNG: Final = np.random.default_rng(0)
_X: Final = _RNG.standard_normal((2, 4, 8), dtype=np.float32)
_W: Final = _RNG.standard_normal((8, 8), dtype=np.float32)
_WIDE: Final = _RNG.standard_normal((2, 4, 64), dtype=np.float32)
_IDS: Final = np.arange(8, dtype=np.int64).reshape(2, 4)


@dataclass(frozen=True, slots=True)
class Seed:
    """Two traces that differ in one place, of which the second one is mutated."""

    name: str
    clean: Path
    faulty: Path


def make_seeds(folder: Path) -> list[Seed]:
    """Writes all pairs into a folder."""
    return [make(folder, name) for name, make in _SEEDS.items()]


def _pair(
    values: Callable[[float], Values],
    folder: Path,
    name: str,
    stack: str = "mlx",
    **options: Any,
) -> Seed:
    clean = build_trace(folder / f"{name}.clean", values(0.0), **options)
    faulty = build_trace(folder / f"{name}.faulty", values(0.5), stack=stack, **options)
    return Seed(name, clean, faulty)


def _stages(fault: float) -> Values:
    """One step with an event or two of every stage."""
    linear = {"op": "Linear", "attributes": {"settings": {"bias": False}}}
    yield "0/environment/config.rope_theta", 1e4
    yield "0/rendering/batch.input_ids", (_IDS, {"kind": "ids"})
    yield "0/rendering/batch.attention_mask", (np.ones((2, 4), np.int64), {"kind": "mask"})
    yield "0/loading/fc.weight:param", _W
    yield "0/rng/python:state", (np.arange(5, dtype=np.uint32), {"kind": "state"})
    yield "0/forward/fc#0:in", (_X, {**linear, "source": "model.py:3"})
    yield "0/forward/fc#0:out", (_X @ _W.T + fault, {**linear, "inputs": (5,)})
    yield "0/forward/norm#0:out", (_X + fault, {"op": "LlamaRMSNorm", "inputs": (6,)})
    yield "0/loss/loss#0", 2.5 + fault
    yield "0/backward/fc.weight#0:grad", (_W * 0.1, {"inputs": (7,)})
    yield "0/optimizer/fc.weight:hyper", {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}
    yield "0/optimizer/fc.weight:param", _W * 0.99
    yield "0/trajectory/loss#0", 2.5 + fault


def _wide(fault: float) -> Values:
    """Payloads that are large enough to be compressed."""
    yield "0/loading/fc.weight:param", np.tile(_W, (8, 1))
    yield "0/forward/fc#0:in", (_WIDE, {"op": "Linear"})
    yield "0/forward/fc#0:out", (_WIDE + fault, {"op": "Linear", "inputs": (1,)})


def _operations(fault: float) -> Values:
    """`x @ w.T * 2`, with its gradient, operation by operation."""
    y = _X @ _W.T

    def of(canonical: str, *inputs: int, **more: Any) -> dict[str, Any]:
        attributes = {"level": "op", "canonical": canonical, "args": {"alpha": 1}, **more}
        named = {"op": f"aten.{canonical}", "source": "model.py:3", "inputs": inputs}
        return named | {"attributes": attributes}

    leaf = of("leaf", leaf=True, name="fc.weight")
    yield "0/forward/fc@leaf#0:out", (_X, leaf)
    yield "0/forward/fc@leaf#1:out", (_W, leaf)
    yield "0/forward/fc@transpose#0:out", (_W.T.copy(), of("transpose", 1, view_of=1))
    yield "0/forward/fc@matmul#0:out", (y, of("matmul", 0, 2))
    yield "0/forward/fc@mul#0:out", (y * 2 + fault, of("mul", 3, operands=[None, 2.0]))
    yield "0/backward/fc@mul#0:out", (y * 0.2, of("mul", 4, forward_order=4))


def _samples(fault: float) -> Values:
    """The rendering of three samples, which stands in the table, and their batch."""
    for number in range(3):
        user = {"role": "user", "content": f"dose {number}"}
        yield f"0/rendering/sample[{number}].messages", [user]
        text = f"<|user|>\ndose {number + (number == 1) * (fault > 0)}\n"
        yield f"0/rendering/sample[{number}].text", text
        ids = np.array([*text.encode()], np.int64)
        attributes = {"special": [0], "truncated": number}
        yield f"0/rendering/sample[{number}].ids", (ids, {"kind": "ids", "attributes": attributes})
    yield "0/rendering/batch.input_ids", (_IDS, {"kind": "ids"})


def _steps(fault: float) -> Values:
    """Steps of which only the last but one differs, for the bisection by index."""
    for step in range(4):
        yield f"{step}/forward/fc#0:out", _W + step + fault * (step == 2)
        yield f"{step}/trajectory/loss#0", 2.5 - step + fault * (step == 2)


def _generators(fault: float) -> Values:
    """Steps in which a dropout draws, and before the second one the script, once too often."""
    generator = np.random.RandomState(1)

    def state() -> Any:
        words, place = generator.get_state()[1:3]
        return np.append(words, np.uint32(place)).astype(np.uint32)

    def drawn(step: int, call: int, by: str) -> Values:
        found = state()
        value = {"by": by, "at": [int(found[0]), int(found[-1])]}
        yield f"{step}/rng/numpy#{call}:draw", (value, {"op": "rand", "source": "model.py:3"})
        yield f"{step}/rng/numpy#{call}:drawn", value

    masked = {"level": "op", "canonical": "bernoulli", "rng": True}
    for step in range(3):
        if fault and step == 1:
            generator.randint(9, size=3)
            yield from drawn(step, 0, "the script")
        yield f"{step}/rng/numpy:state", (state(), {"kind": "state"})
        yield f"{step}/forward/drop#0:in", (_X, {"op": "Dropout"})
        mask = (generator.random_sample(_X.shape) < 0.5).astype(np.float32)
        yield from drawn(step, 1, "drop#0")
        named = {"op": "aten.bernoulli_", "source": "model.py:3", "attributes": masked}
        yield f"{step}/forward/drop@bernoulli#0:out", (mask, named)
        yield f"{step}/forward/drop#0:out", (_X * mask * 2, {"op": "Dropout"})
        yield f"{step}/rng/numpy:after", (state(), {"kind": "state"})


def _snapshots(folder: Path, name: str) -> Seed:
    seed = _pair(_stages, folder, name)
    tree = {
        "weights": {"fc.weight": {"digest": "00", "value": _W}},
        "optimizers": [{"class": "AdamW", "state": {0: {"step": 3, "exp_avg": _W * 0.1}}}],
        "spare": {"python": None, "numpy": (0, 0.5)},
    }
    write_snapshot(seed.faulty, 1, tree)
    return seed


_SEEDS: Final[Mapping[str, Callable[[Path, str], Seed]]] = {
    "stages": partial(_pair, _stages),
    "compressed": partial(_pair, _wide, compress=True),
    "operations": partial(_pair, _operations),
    "samples": partial(_pair, _samples),
    "steps": partial(_pair, _steps),
    "sealed": partial(_pair, _steps, seal=True),
    "snapshots": _snapshots,
    "generators": partial(_pair, _generators, stack="pytorch"),
}
