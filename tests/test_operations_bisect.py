"""Bisection to the operation, on hand-made traces: which operation is named, and when none is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tracediff
from tests import toy
from tests.op_traces import Array, Change, Stack, same
from tracediff.bisection import diff
from tracediff.errors import UsageError
from tracediff.report.html import to_html
from tracediff.report.json import to_json
from tracediff.report.terminal import render


def run(stack: Stack, fused: bool, eps: float = 1e-5) -> None:
    """A product, a norm (as five operations, or as one) and an activation."""
    generator = np.random.default_rng(0)
    x = stack.leaf("root", generator.standard_normal((16, 32)).astype(np.float32))
    w = stack.leaf("proj", generator.standard_normal((32, 32)).astype(np.float32))
    gain = stack.leaf("norm", (1 + 0.1 * generator.standard_normal(32)).astype(np.float32))
    y = stack.op("proj@matmul", lambda a, b: a @ b, x, w)
    if fused:
        z = stack.op(
            "norm@rms_norm",
            lambda a, g: g * a / np.sqrt((a * a).mean(-1, keepdims=True) + eps),
            y,
            gain,
            args={"eps": eps},
        )
    else:
        square = stack.op("norm@pow", lambda a: a**2, y, operands=[None, 2])
        args = {"dim": [-1], "keepdim": True}
        mean = stack.op("norm@mean", lambda a: a.mean(-1, keepdims=True), square, args=args)
        shifted = stack.op("norm@add", lambda a: a + eps, mean, operands=[None, eps])
        root = stack.op("norm@rsqrt", lambda a: 1 / np.sqrt(a), shifted)
        scaled = stack.op("norm@mul", lambda a, b: a * b, y, root)
        z = stack.op("norm@mul", lambda g, a: g * a, gain, scaled)
    stack.finish(stack.op("mlp@silu", lambda a: a / (1 + np.exp(-a)), z))


def bisected(
    folder: Path, change: tuple[Change, Change] = (same, same), **target: Any
) -> tracediff.Verdict:
    run(Stack(folder / "a", "pytorch", change[0]), fused=False)
    run(Stack(folder / "b", "mlx", change[1], exact=True), fused=True, **target)
    return tracediff.bisect(folder / "a", folder / "b")


def scaled(name: str, size: float) -> Change:
    def change(op: str, value: Array) -> Array:
        signs = np.where(np.random.default_rng(1).random(value.shape) < 0.5, -1, 1)
        return (value * (1 + size * signs)).astype(np.float32) if op == name else value

    return change


def once(change: Change) -> Change:
    """The first operation that it alters, and no other."""
    done: list[str] = []

    def first(op: str, value: Array) -> Array:
        altered = value if done else change(op, value)
        done.extend([op] if altered is not value else [])
        return altered

    return first


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
    told = console.export_text()
    assert ", layout: same" in told
    for text in (told, to_html(verdict)):
        assert "rsqrt" in text
        assert "rms_norm" in text
    span = json.loads(json.dumps(to_json(verdict)))["first"]["span"]
    assert [row["op"] for row in span["baseline"] if row["errs"]] == ["rsqrt"]
    assert span["target"][0]["shape"] == [16, 32]
    assert span["layout"] == "same"


def test_the_operation_comes_before_the_module_around_it(tmp_path: Path) -> None:
    first = bisected(tmp_path, (scaled("pow", 1e-1), same)).first
    assert first is not None
    assert first.site == "0/forward/norm@pow#0:out"
    assert first.path == "norm"


def experts(stack: Stack, seed: int, shape: tuple[int, ...]) -> None:
    """Products of rows that each stack sorts in its own way, and sorts back."""
    generator = np.random.default_rng(0)
    x = stack.leaf("root", generator.standard_normal((24, 16)).astype(np.float32))
    order = np.random.default_rng(seed).permutation(24)
    places = [stack.leaf("router", ids) for ids in (order.reshape(shape[:-1]), np.argsort(order))]
    w, v = (
        stack.leaf("experts", generator.standard_normal((16, 16)).astype(np.float32))
        for _ in range(2)
    )
    y = stack.op("sort@embedding", lambda table, ids: table[ids], x, places[0])
    y = stack.op("experts@matmul", lambda a, b: a @ b, y, w)
    args = {"shape": [24, 16]}
    y = stack.op("sort@reshape", lambda a: a.reshape(24, 16), y, args=args)
    z = stack.op("sort@embedding", lambda table, ids: table[ids], y, places[1])
    stack.finish(stack.op("root@matmul", lambda a, b: a @ b, z, v))


@pytest.mark.parametrize("shape", [(24, 16), (24, 1, 16)], ids=["of one shape", "of two shapes"])
@pytest.mark.parametrize("size", [1e-5, 0.0])
@pytest.mark.parametrize("side", [0, 1])
def test_rows_in_another_order_hide_no_small_error(
    tmp_path: Path, side: int, size: float, shape: tuple[int, ...]
) -> None:
    changes = [same, same]
    changes[side] = once(scaled("matmul", size))
    experts(Stack(tmp_path / "a", "pytorch", changes[0]), 1, (24, 16))
    experts(Stack(tmp_path / "b", "mlx", changes[1]), 2, shape)
    verdict = tracediff.bisect(tmp_path / "a", tmp_path / "b")
    if not size:
        assert verdict.outcome in ("identical", "equivalent")
        return
    first = verdict.first
    assert first is not None
    site = first.target_site if side else first.site
    assert site == "0/forward/experts@matmul#0:out"
    assert first.blame == ("baseline", "target")[side]


def root_of_rest(stack: Stack, known: bool) -> None:
    """The root of what is left of one, in operations that have formulas or in one that has none."""
    x = stack.leaf("root", np.random.default_rng(0).random((8, 8)).astype(np.float32))
    if known:
        half = stack.op("opt@mul", lambda a: a * 0.5, x, operands=[None, 0.5])
        rest = stack.op("opt@sub", lambda a: 1 - a, half, operands=[1.0, None])
        with np.errstate(invalid="ignore"):
            y = stack.op("opt@rsqrt", lambda a: 1 / np.sqrt(a), rest)
    else:
        y = stack.op("opt@fused", lambda a: 1 / np.sqrt(1 - a * 0.5), x)
    stack.finish(y)


@pytest.mark.parametrize("side", [0, 1])
def test_what_errs_is_named_before_what_makes_nan_of_it(tmp_path: Path, side: int) -> None:
    changes = [same, same]
    changes[side] = scaled("mul", 9.0)
    root_of_rest(Stack(tmp_path / "a", "pytorch", changes[0]), known=side == 0)
    root_of_rest(Stack(tmp_path / "b", "mlx", changes[1]), known=side == 1)
    first = tracediff.bisect(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    name = ("baseline", "target")[side]
    assert (first.kind, first.op[name], first.blame) == ("nonfinite", "mul", name)
    assert "rsqrt" in first.meaning


def update(stack: Stack, rounds: int) -> None:
    """A gradient, doubled and halved again on one side, and what an optimizer makes of it."""
    generator = np.random.default_rng(0)
    x, y = (
        stack.leaf("root", generator.standard_normal((16, 16)).astype(np.float32)) for _ in range(2)
    )
    grad = stack.op("proj@matmul", lambda a, b: a @ b, x, y, phase="backward")
    for factor in (2.0, 0.5)[:rounds]:
        name = "mul" if factor == 2.0 else "div"
        grad = stack.op(
            f"proj@{name}", lambda g, f=factor: g * f, grad, phase="backward", operands=[None, 2.0]
        )
    stack.gradient("proj.weight", grad)
    root = stack.op("proj.weight@abs", abs, grad, phase="optimizer")
    stack.finish(stack.op("proj.weight@sqrt", np.sqrt, root, phase="optimizer"))


@pytest.mark.parametrize("size", [1e-5, 1e-1, 0.0])
def test_a_gradient_that_only_the_optimizer_reads_is_of_the_backward_pass(
    tmp_path: Path, size: float
) -> None:
    """The other side has no such operation, and module level knows the gradient as well."""
    update(Stack(tmp_path / "a", "pytorch"), rounds=0)
    update(Stack(tmp_path / "b", "mlx", scaled("div", size)), rounds=2)
    verdict = tracediff.bisect(tmp_path / "a", tmp_path / "b")
    if not size:
        assert verdict.outcome in ("identical", "equivalent")
        return
    first = verdict.first
    assert first is not None
    assert first.op["target"] == "div"
    assert (first.stage, first.path, first.blame) == ("backward", "proj", "target")


@pytest.mark.parametrize("side", [0, 1])
def test_what_should_only_lay_out_anew_is_shown_against_the_value(
    tmp_path: Path, side: int
) -> None:
    """Not against all that an optimizer makes of it, by which alone it can be paired."""
    for name, stack, transposed in (("a", "pytorch", side == 0), ("b", "mlx", side == 1)):
        change = scaled("transpose", 1e-3) if transposed else same
        written = Stack(tmp_path / name, stack, change)
        x = written.leaf("root", np.random.default_rng(0).standard_normal((8, 16)))
        y = written.leaf("root", np.random.default_rng(1).standard_normal((16, 8)))
        grad = written.op("proj@matmul", lambda a, b: a @ b, x, y, phase="backward")
        if transposed:
            grad = written.op("proj@transpose", lambda g: g.T, grad, phase="backward")
        square = written.op("proj.weight@square", lambda g: g * g, grad, phase="optimizer")
        total = written.op("proj.weight@sum", lambda g: g.sum(), square, phase="optimizer")
        written.finish(written.op("root@sqrt", np.sqrt, total, phase="optimizer"))
    first = tracediff.bisect(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert first.span is not None
    sites = ["0/backward/proj@matmul#0:out"] * 2
    sites[side] = "0/backward/proj@transpose#0:out"
    assert [first.site, first.target_site] == sites
    shown = [[row.op for row in span] for span in (first.span.baseline, first.span.target)]
    assert shown[side] == ["transpose"]
    assert shown[1 - side] == []
    assert first.error.rel_l2 == pytest.approx(1e-3, rel=0.1)


def test_two_traces_are_what_bisect_takes(capsys: pytest.CaptureFixture[str]) -> None:
    from tracediff.cli.app import main

    assert main(["bisect", "a", "b", "c"]) == 2
    assert "--replay only" in capsys.readouterr().err
    assert main(["bisect", "--deepen", "--", "a.py", "b.py"]) == 2
    assert "--deepen takes two scripts" in capsys.readouterr().err


# ---- what leads to no pair ----------------------------------------------------------------------


def count(stack: Stack) -> None:
    """Two numbers of steps, of which Python makes factors, and an update that has no such edge."""
    for _ in range(2):
        number = stack.leaf("root", np.asarray(0, np.float32))
        stack.op("root@add", lambda a: a + 1, number, operands=[None, 1])
    grad = stack.leaf("root", np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32))
    stack.finish(stack.op("root@square", lambda a: a * a, grad))


@pytest.mark.parametrize("size", [1e-3, 0.0], ids=["perturbed", "clean"])
def test_an_operation_that_leads_to_nothing_is_held_to_its_formula(
    tmp_path: Path, size: float
) -> None:
    calls = iter((0.0, size))  # the first one keeps to its formula

    def wrong(name: str, value: Array) -> Array:
        return scaled("add", next(calls))(name, value) if name == "add" else value

    count(Stack(tmp_path / "a", "pytorch"))
    count(Stack(tmp_path / "b", "mlx", wrong))
    first = tracediff.bisect(tmp_path / "a", tmp_path / "b").first
    found = first and (first.op, first.blame, first.target_site)
    assert found == (({"target": "add"}, "target", "0/forward/root@add#1:out") if size else None)


def test_operations_are_listed_with_their_pass_and_their_layout(tmp_path: Path) -> None:
    """The second side multiplies the transpose, and norms in one operation."""
    x = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)
    for name, turned in (("a", False), ("b", True)):
        stack = Stack(tmp_path / name, "pytorch")
        given, weight = stack.leaf("root", x), stack.leaf("proj", w)
        if turned:
            y = stack.op("proj@matmul", lambda a, b: b @ a.T, given, weight)
        else:
            y = stack.op("proj@matmul", lambda a, b: a @ b.T, given, weight)
            stack.op("other@exp", np.exp, y)
        stack.finish(stack.op("mlp@silu", lambda a: (a if a.shape[0] == 16 else a.T) / 2, y))
    found = diff(tmp_path / "a", tmp_path / "b", operations=True)
    rows = {row.site: row for row in found}
    product = rows["0/forward/proj@matmul#0:out"]
    assert (product.target_site, product.layout) == (product.site, "transpose")
    assert product.mark == "equivalent"
    assert product.error.rel_l2 < 1e-6
    assert rows["0/forward/root@leaf#0:out"].mark == "identical"
    assert rows["0/forward/other@exp#0:out"].mark == "unmatched"


def test_a_list_of_operations_marks_the_one_that_errs_and_no_other(tmp_path: Path) -> None:
    bisected(tmp_path, (same, scaled("silu", 1e-2)))
    rows = diff(tmp_path / "a", tmp_path / "b", operations=True)
    assert [row.site for row in rows if row.mark == "diverged"] == ["0/forward/mlp@silu#0:out"]
    norm = [row for row in rows if row.site.startswith("0/forward/norm@")]
    assert {row.layout for row in norm} <= {"same", "part"}
    assert norm[-1].target_site == "0/forward/norm@rms_norm#0:out"


def test_operations_that_were_not_recorded_cannot_be_listed(tmp_path: Path) -> None:
    run(Stack(tmp_path / "a", "pytorch"), fused=False)
    toy.record(tmp_path / "b")
    with pytest.raises(UsageError, match="record both with --level op"):
        diff(tmp_path / "a", tmp_path / "b", operations=True)
