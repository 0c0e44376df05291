"""Bisection to the operation, on hand-made traces: which operation is named, and when none is."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tracediff
from tracediff.events import Run
from tracediff.report.html import to_html
from tracediff.report.json import to_json
from tracediff.report.terminal import render
from tracediff.tape import Policy, Tape
from tracediff.trace import TraceWriter

Array = NDArray[np.float32]
Change = Callable[[str, Array], Array]


def same(name: str, value: Array) -> Array:
    return value


class Stack:
    """A stack of its own: a norm, a product and an activation, each result rounded as `exact` says.

    `pytorch` computes the norm as five operations, `mlx` as one. `change` alters the result of an
    operation by its canonical name.
    """

    def __init__(self, path: Path, stack: str, change: Change = same, exact: bool = False) -> None:
        run = Run(stack=stack, level="op")
        self._tape = Tape(TraceWriter(path, run), Policy(level="op"))
        self._change, self._exact = change, exact
        self._calls: dict[str, int] = {}

    def emit(self, place: str, value: Any, inputs: tuple[int, ...], **facts: Any) -> int:
        name = place.rpartition("@")[2]
        attributes = {"level": "op", "canonical": name, **facts}
        number = self._calls.get(place, 0)
        self._calls[place] = number + 1
        return self._tape.emit(
            "forward",
            place,
            "out",
            value,
            call=number,
            op=facts.get("op", name),
            source=f"model.py:{len(self._calls)}",
            inputs=inputs,
            attributes=attributes,
        )

    def op(
        self, place: str, function: Any, *inputs: tuple[Array, int], **facts: Any
    ) -> tuple[Array, int]:
        """Computes in float64, or in float32, and stores float32."""
        wide = np.float64 if self._exact else np.float32
        value = np.asarray(function(*(x.astype(wide) for x, _ in inputs)), np.float32)
        value = self._change(place.rpartition("@")[2], value)
        return value, self.emit(place, value, tuple(order for _, order in inputs), **facts)

    def leaf(self, place: str, value: Array) -> tuple[Array, int]:
        return value, self.emit(f"{place}@leaf", value, (), leaf=True)

    def run(self, fused: bool, eps: float = 1e-5) -> None:
        generator = np.random.default_rng(0)
        x = self.leaf("root", generator.standard_normal((16, 32)).astype(np.float32))
        w = self.leaf("proj", generator.standard_normal((32, 32)).astype(np.float32))
        gain = self.leaf("norm", (1 + 0.1 * generator.standard_normal(32)).astype(np.float32))
        y = self.op("proj@matmul", lambda a, b: a @ b, x, w)
        if fused:
            z = self.op(
                "norm@rms_norm",
                lambda a, g: g * a / np.sqrt((a * a).mean(-1, keepdims=True) + eps),
                y,
                gain,
                args={"eps": eps},
            )
        else:
            square = self.op("norm@pow", lambda a: a**2, y, operands=[None, 2])
            args = {"dim": [-1], "keepdim": True}
            mean = self.op("norm@mean", lambda a: a.mean(-1, keepdims=True), square, args=args)
            shifted = self.op("norm@add", lambda a: a + eps, mean, operands=[None, eps])
            root = self.op("norm@rsqrt", lambda a: 1 / np.sqrt(a), shifted)
            scaled = self.op("norm@mul", lambda a, b: a * b, y, root)
            z = self.op("norm@mul", lambda g, a: g * a, gain, scaled)
        act = self.op("mlp@silu", lambda a: a / (1 + np.exp(-a)), z)
        self._tape.emit("forward", "root", "out", act[0], op="Net", inputs=())
        self._tape.advance()
        self._tape.writer.finish("finished")


def bisected(
    folder: Path, change: tuple[Change, Change] = (same, same), **target: Any
) -> tracediff.Verdict:
    Stack(folder / "a", "pytorch", change[0]).run(fused=False)
    Stack(folder / "b", "mlx", change[1], exact=True).run(fused=True, **target)
    return tracediff.bisect(folder / "a", folder / "b")


def scaled(name: str, size: float) -> Change:
    def change(op: str, value: Array) -> Array:
        signs = np.where(np.random.default_rng(1).random(value.shape) < 0.5, -1, 1)
        return (value * (1 + size * signs)).astype(np.float32) if op == name else value

    return change


def test_two_correct_stacks_are_silent(tmp_path: Path) -> None:
    assert bisected(tmp_path).outcome == "equivalent"


@pytest.mark.parametrize("size", [1e-5, 1e-3, 1e-1])
@pytest.mark.parametrize("name", ["matmul", "pow", "mean", "rsqrt", "silu"])
def test_an_operation_of_the_baseline_is_named(tmp_path: Path, name: str, size: float) -> None:
    verdict = bisected(tmp_path, (scaled(name, size), same))
    first = verdict.first
    assert first is not None
    assert first.op["baseline"] == name
    assert first.blame == "baseline"
    assert first.span is not None
    assert [row.op for row in first.span.baseline if row.errs] == [name]


@pytest.mark.parametrize("size", [1e-5, 1e-1])
@pytest.mark.parametrize("name", ["matmul", "rms_norm", "silu"])
def test_an_operation_of_the_target_is_named(tmp_path: Path, name: str, size: float) -> None:
    first = bisected(tmp_path, (same, scaled(name, size))).first
    assert first is not None
    assert (first.op["target"], first.blame) == (name, "target")
    assert first.where["target"].startswith("model.py:")


def test_spans_that_compute_something_else_are_named_with_no_blame(tmp_path: Path) -> None:
    first = bisected(tmp_path, eps=1e-3).first
    assert first is not None
    assert (first.op, first.blame) == ({"baseline": "mul", "target": "rms_norm"}, "undecided")
    assert first.span is not None
    assert [row.op for row in first.span.baseline] == ["pow", "mean", "add", "rsqrt", "mul", "mul"]
    assert [row.op for row in first.span.target] == ["rms_norm"]


def test_the_inputs_of_a_span_agree(tmp_path: Path) -> None:
    first = bisected(tmp_path, eps=1e-3).first
    assert first is not None
    assert first.span is not None
    assert ("0/forward/proj@matmul#0:out",) * 2 in first.span.inputs


def test_every_report_shows_both_spans(tmp_path: Path) -> None:
    from rich.console import Console

    verdict = bisected(tmp_path, (scaled("rsqrt", 1e-3), same))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(verdict))
    for text in (console.export_text(), to_html(verdict)):
        assert "rsqrt" in text
        assert "rms_norm" in text
    span = json.loads(json.dumps(to_json(verdict)))["first"]["span"]
    assert [row["op"] for row in span["baseline"] if row["errs"]] == ["rsqrt"]
    assert span["target"][0]["shape"] == [16, 32]


def test_the_operation_comes_before_the_module_around_it(tmp_path: Path) -> None:
    first = bisected(tmp_path, (scaled("pow", 1e-1), same)).first
    assert first is not None
    assert first.site == "0/forward/norm@pow#0:out"
    assert first.path == "norm"


def test_two_traces_are_what_bisect_takes(capsys: pytest.CaptureFixture[str]) -> None:
    from tracediff.cli.app import main

    assert main(["bisect", "a", "b", "c"]) == 2
    assert "--replay only" in capsys.readouterr().err
    assert main(["bisect", "--deepen", "--", "a.py", "b.py"]) == 2
    assert "--deepen takes two scripts" in capsys.readouterr().err
