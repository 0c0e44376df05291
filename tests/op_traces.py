"""Traces of level `op`: written by hand, operations computed in NumPy as any stack would; and
look-ups in those of recorders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracediff.events import Event, Run
from tracediff.policy import Policy
from tracediff.tape import Tape
from tracediff.trace import TraceWriter

Array = NDArray[Any]
Value = tuple[Array, int]
Change = Callable[[str, Array], Array]


def same(name: str, value: Array) -> Array:
    return value


class Stack:
    """One step of operations.

    Args:
        change: Alters the result of an operation, given its canonical name.
        exact: Compute in float64 and round once, as another library's kernels might.
    """

    def __init__(self, path: Path, stack: str, change: Change = same, exact: bool = False) -> None:
        run = Run(stack=stack, level="op")
        self._tape = Tape(TraceWriter(path, run), Policy(level="op"))
        self._change, self._exact = change, exact
        self._calls: dict[str, int] = {}
        self._lines = 0
        self._phase = "forward"

    def leaf(self, module: str, value: Array) -> Value:
        """A parameter, a batch field or a constant."""
        return value, self._emit(f"{module}@leaf", value, (), leaf=True)

    def op(self, place: str, function: Callable[..., Any], *inputs: Value, **facts: Any) -> Value:
        """Computes an operation, `module@canonical`; `facts` are attributes of its event."""
        wide = np.float64 if self._exact else np.float32
        given = (x.astype(wide) if x.dtype.kind == "f" else x for x, _ in inputs)
        value = np.asarray(function(*given))
        if value.dtype.kind == "f":
            value = value.astype(facts.pop("dtype", np.float32))
        value = self._change(place.rpartition("@")[2], value)
        return value, self._emit(place, value, tuple(order for _, order in inputs), **facts)

    def gradient(self, parameter: str, value: Value) -> None:
        """The gradient of a parameter, as module level records it."""
        self._tape.emit("backward", parameter, "grad", value[0], inputs=())

    def finish(self, result: Value) -> None:
        """Ends the run; `result` is the output of its model, or a gradient of its input."""
        port = "out" if self._phase == "forward" else "grad_in"
        self._tape.emit(self._phase, "root", port, result[0], op="Net", inputs=())
        self._tape.advance()
        self._tape.finish()

    def _emit(self, place: str, value: Array, inputs: tuple[int, ...], **facts: Any) -> int:
        name, phase = place.rpartition("@")[2], facts.pop("phase", "forward")
        self._phase = phase
        number = self._calls.get(phase + place, 0)
        self._calls[phase + place] = number + 1
        self._lines += 1
        return self._tape.emit(
            phase,
            place,
            "out",
            value,
            kind="tensor",
            call=number,
            op=facts.get("op", name),
            source=f"model.py:{self._lines}",
            inputs=inputs,
            attributes={"level": "op", "canonical": name, **facts},
        )


# ---- recorded ------------------------------------------------------------------------------------


def operations(trace: Any, phase: str = "", leaves: bool = False) -> list[Event]:
    return [
        event
        for event in trace.events
        if event.attributes.get("level") == "op"
        and phase in ("", event.site.phase)
        and (leaves or not event.attributes.get("leaf"))
    ]


def names(trace: Any, phase: str = "") -> list[str]:
    return [event.attributes["canonical"] for event in operations(trace, phase)]


def sources(trace: Any, event: Event) -> list[str]:
    """Canonical names (of leaves, their own) of what an event was computed from."""
    by_order = {e.order: e for e in trace.events if e.site.step == event.site.step}
    inputs = [by_order[order] for order in event.inputs]
    return [e.attributes.get("name") or e.attributes["canonical"] for e in inputs]
