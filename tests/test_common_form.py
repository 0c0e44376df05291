"""What differs in form alone is compared for what it holds; what differs in substance is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracediff.align import align
from tracediff.bisection import bisect, diff
from tracediff.bisection.batches import same_rows
from tracediff.bisection.relayouts import relayout
from tracediff.cli import main
from tracediff.events import Event, Site
from tracediff.testing import build_trace
from tracediff.verdict import Verdict

Array = np.ndarray[Any, Any]
Run = list[tuple[str, Any]]

PAD = 9


def scalar(value: Any) -> Array:
    return np.array(value, np.float32)


def compared(
    tmp_path: Path, a: Run, b: Run, stacks: tuple[str, str] = ("pytorch", "pytorch")
) -> Verdict:
    paths = [
        build_trace(tmp_path / f"{name}.zarr", run, stack=stack)
        for name, run, stack in zip("ab", (a, b), stacks, strict=True)
    ]
    return bisect(*paths)


# ---- batches -------------------------------------------------------------------------------------

ROWS = ([3, 1, 4, 1], [5, 9, 2])


def padded(
    rows: tuple[list[int], ...] = ROWS, to: int = 5, left: bool = False
) -> tuple[Array, Array]:
    """Token IDs and mask, (batch, `to`) each."""
    ids, mask = np.full((len(rows), to), PAD), np.zeros((len(rows), to), np.int64)
    for i, row in enumerate(rows):
        place = slice(to - len(row), to) if left else slice(len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("masks", ["both", "narrow", "wide", "none"])
def test_rows_padded_further_are_the_same(left: bool, masks: str) -> None:
    a, b = padded(left=left), padded(to=8, left=left)
    known = {
        "both": (a[1], b[1]),
        "narrow": (a[1], None),
        "wide": (None, b[1]),
        "none": (None, None),
    }[masks]
    found = same_rows((a[0], b[0]), known)
    assert found is not None
    assert [(side.length, side.common, side.left) for side in found] == [
        (5, 5, left),
        (8, 5, left),
    ]
    assert all(side.is_ordered for side in found)


def test_rows_in_another_order_are_the_same() -> None:
    a, b = padded(), padded(ROWS[::-1], to=6)
    found = same_rows((a[0], b[0]), (a[1], None))
    assert found is not None
    assert found[1].order.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        (([3, 1, 4], [5, 9, 2]), False),  # truncated
        (([3, 1, 1], [5, 9, 2]), False),  # a token lost
        (([3, 1, 4, 2], [5, 9, 2]), False),  # another token
        (ROWS, True),  # padding on the other side moves every token
    ],
)
@pytest.mark.parametrize("masked", [True, False])
def test_other_rows_are_not(rows: tuple[list[int], ...], left: bool, masked: bool) -> None:
    a, b = padded(), padded(rows, to=8, left=left)
    assert same_rows((a[0], b[0]), (a[1], b[1] if masked else None)) is None


def test_padding_that_is_trained_on_is_no_padding() -> None:
    a, b = padded(), padded(to=8)
    labels = np.where(b[1], b[0], -100)
    assert same_rows((a[0], b[0]), (a[1], None), (None, labels)) is not None
    labels[0, 6] = PAD
    assert same_rows((a[0], b[0]), (a[1], None), (None, labels)) is None


def test_batches_held_alike_need_no_view() -> None:
    a = padded()
    assert same_rows((a[0], a[0]), (a[1], a[1])) is None


WIDTH = 3


def model_run(
    rows: tuple[list[int], ...] = ROWS,
    to: int = 5,
    garbage: float = 0.0,
    change: Callable[[Array], Array] = lambda y: y,
    masked: bool = True,
) -> Run:
    """An embedding, a module over flattened tokens, attention scores and a shifted loss.

    Padded positions hold `garbage`; `change` is applied to the output of `tokens`.
    """
    ids, mask = padded(rows, to)
    table = np.random.default_rng(5).standard_normal((10, WIDTH)).astype(np.float32)
    hidden = np.where(mask[..., None], table[ids], np.float32(garbage)).astype(np.float32)
    seen = np.einsum("bik,bjk->bij", hidden, hidden) * mask[:, None]
    scores = seen.astype(np.float32)[:, None]
    flat = change(np.tanh(hidden)).reshape(-1, WIDTH)
    terms = hidden.sum(-1)[:, :-1]
    labels = np.where(mask, ids, -100)[:, 1:]
    loss = scalar(terms[labels != -100].mean())
    run: Run = [
        ("0/rendering/batch.input_ids", (ids, {"kind": "ids"})),
        ("0/rendering/batch.attention_mask", (mask, {"kind": "mask"})),
        ("0/forward/root#0:in", ids),
        ("0/forward/embed#0:out", hidden),
        ("0/forward/scores#0:out", scores),
        ("0/forward/tokens#0:out", flat),
        ("0/forward/cache_position#0:out", np.arange(to)),
        ("0/loss/loss.cross_entropy#0:labels", (labels.reshape(-1), {"kind": "labels"})),
        ("0/loss/loss#0:out", loss),
    ]
    return run if masked else [event for event in run if "attention_mask" not in event[0]]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("rows", [ROWS, ROWS[::-1]])
def test_a_batch_padded_further_or_reordered_agrees(
    tmp_path: Path, rows: tuple[list[int], ...], masked: bool
) -> None:
    found = compared(tmp_path, model_run(), model_run(rows, 8, garbage=7.0, masked=masked))
    assert found.outcome == "equivalent" or not masked
    if masked:  # without a mask of its own, one event is missing on this side
        assert next(s for s in found.stages if s.stage == "forward").compared == 5
        assert any("5 columns in the baseline and 8 in the target" in w for w in found.warnings)
        reordered = any("another order" in w for w in found.warnings)
        assert reordered == (rows is not ROWS)


def test_a_fault_in_a_batch_padded_further_is_named(tmp_path: Path) -> None:
    def one_token(y: Array) -> Array:
        y = y.copy()
        y[0, 2] *= np.float32(1.01)
        return y

    found = compared(tmp_path, model_run(), model_run(ROWS[::-1], 8, 7.0))
    assert found.outcome == "equivalent"
    (tmp_path / "second").mkdir()
    found = compared(tmp_path / "second", model_run(), model_run(ROWS, 8, 7.0, one_token))
    assert found.first is not None
    assert found.first.site == "0/forward/tokens#0:out"


def test_a_truncated_row_is_a_difference_of_the_batch(tmp_path: Path) -> None:
    found = compared(tmp_path, model_run(), model_run((ROWS[0][:3], ROWS[1]), 8))
    assert found.first is not None
    assert (found.first.site, found.first.kind) == ("0/rendering/batch.input_ids", "shape")


# ---- layouts of weights --------------------------------------------------------------------------


def block_run(order: Array, inconsistent: bool = False, update: float = 1.0) -> Run:
    """`down(relu(up(x)))` with its hidden units numbered otherwise, and one optimizer step."""
    rng = np.random.default_rng(2)
    up, down = (rng.standard_normal(s).astype(np.float32) for s in ((6, 4), (4, 6)))
    x = rng.standard_normal((2, 3, 4)).astype(np.float32)
    grad = rng.standard_normal((6, 4)).astype(np.float32)
    up, grad = up[order], grad[order]
    down = down if inconsistent else down[:, order]
    between = np.maximum(np.einsum("bsi,oi->bso", x, up), 0)
    out = np.einsum("bso,io->bsi", between.astype(np.float64), down).astype(np.float32)
    return [
        ("0/loading/block.up.weight:param", up),
        ("0/loading/block.down.weight:param", down),
        ("0/forward/block#0:in", x),
        ("0/forward/block.up#0:out", (between, {"op": "Up", "inputs": (2,)})),
        ("0/forward/block.down#0:in", (between, {"inputs": (3,)})),
        ("0/forward/block.down#0:out", (out, {"op": "Down", "inputs": (4,)})),
        ("0/forward/block#0:out", (out, {"inputs": (5,)})),
        ("0/backward/block.up.weight#0:grad", grad),
        ("0/optimizer/block.up.weight:grad", grad * np.float32(update)),
    ]


PLAIN = np.arange(6)
OTHER = np.array([4, 2, 0, 5, 1, 3])


def test_a_consistent_relayout_of_weights_is_healed(tmp_path: Path) -> None:
    found = compared(tmp_path, block_run(PLAIN), block_run(OTHER))
    assert found.outcome == "equivalent", found.reason
    assert [w for w in found.warnings if "healed" in w and "block.up.weight" in w]
    optimizer = next(s for s in found.stages if s.stage == "optimizer")
    assert (optimizer.compared, optimizer.diverged) == (1, 0)


def test_diff_tells_where_each_divergence_comes_from(tmp_path: Path) -> None:
    compared(tmp_path, block_run(PLAIN), block_run(OTHER))
    healed = {row.site: row.origin for row in diff(tmp_path / "a.zarr", tmp_path / "b.zarr")}
    assert healed["0/loading/block.up.weight:param"] == "healed"
    assert healed["0/forward/block#0:out"] == ""
    assert main(["diff", *(str(tmp_path / f"{side}.zarr") for side in "ab")]) == 0
    (tmp_path / "wrong").mkdir()
    compared(tmp_path / "wrong", block_run(PLAIN), block_run(OTHER, inconsistent=True))
    rows = diff(tmp_path / "wrong" / "a.zarr", tmp_path / "wrong" / "b.zarr")
    assert {row.site: row.origin for row in rows}["0/loading/block.up.weight:param"] == "introduced"
    assert main(["diff", *(str(tmp_path / "wrong" / f"{side}.zarr") for side in "ab")]) == 1


def test_an_inconsistent_relayout_is_found_at_loading(tmp_path: Path) -> None:
    found = compared(tmp_path, block_run(PLAIN), block_run(OTHER, inconsistent=True))
    assert found.first is not None
    assert (found.first.site, found.first.pattern) == (
        "0/loading/block.up.weight:param",
        "permuted",
    )


def test_a_fault_behind_a_relayout_is_found_in_its_own_place(tmp_path: Path) -> None:
    found = compared(tmp_path, block_run(PLAIN), block_run(OTHER, update=1.01))
    assert found.first is not None
    assert found.first.site == "0/optimizer/block.up.weight:grad"


def test_a_layout_is_exact_equality_of_slices() -> None:
    a = np.random.default_rng(0).standard_normal((5, 5)).astype(np.float32)
    order = [3, 0, 4, 1, 2]
    for axis, other in ((0, a[order]), (1, a[:, order])):
        found = relayout(a, other)
        assert found is not None
        assert (found.axis, np.array_equal(found.take(other), a)) == (axis, True)
        assert found.of_outputs == (axis == 0)
    transposed = relayout(a, a.T)
    assert transposed is not None
    assert transposed.axis is None
    changed = a[order]
    changed[2, 2] += 1e-6
    assert relayout(a, changed) is None


# ---- micro-batches -------------------------------------------------------------------------------


def accumulated(factor: float, summed: float, clipped: bool = False) -> Run:
    """Two micro-batches whose losses and gradients are `factor` times those of a plain run."""
    rng = np.random.default_rng(8)
    run: Run = []
    for call in (0, 1):
        loss, grad = rng.random(), rng.standard_normal(5).astype(np.float32)
        run += [
            (f"0/forward/root#{call}:out", rng.standard_normal(4).astype(np.float32)),
            (f"0/loss/loss#{call}:out", scalar(factor * loss)),
            (f"0/trajectory/loss#{call}:out", scalar(factor * loss)),
            (f"0/backward/w#{call}:grad", np.float32(factor) * grad),
        ]
    total = np.float32(summed) * rng.standard_normal(5).astype(np.float32)
    norm = scalar(np.sqrt(np.einsum("i,i->", total, total)))
    if clipped:
        run.append(("0/optimizer/clip_grad_norm:out", norm))
        total = total / norm
    return [*run, ("0/optimizer/w:grad", total)]


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize("clipped", [False, True])
def test_a_factor_of_the_number_of_micro_batches_that_is_undone_is_healed(
    tmp_path: Path, factor: float, clipped: bool
) -> None:
    found = compared(tmp_path, accumulated(1, 1, clipped), accumulated(factor, 1, clipped))
    assert found.outcome == "equivalent", found.reason
    assert any("micro-batches" in warning for warning in found.warnings)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(("factor", "summed"), [(2.0, 2.0), (3.0, 1.0)])
def test_a_factor_that_is_not_undone_or_not_their_number_stays(
    tmp_path: Path, factor: float, summed: float, clipped: bool
) -> None:
    found = compared(tmp_path, accumulated(1, 1, clipped), accumulated(factor, summed, clipped))
    assert found.first is not None
    assert found.first.site == "0/loss/loss#0:out"


# ---- losses by hand ------------------------------------------------------------------------------


def losses(by_hand: bool, wrong: float = 0.0, labels: Mapping[int, int] | None = None) -> Run:
    terms = np.linspace(0.5, 3.0, 6).astype(np.float32)
    terms[1] += np.float32(wrong)
    targets = np.array([-100, 4, 2, -100, 7, 1])
    mean = scalar(terms[targets != -100].astype(np.float64).mean())
    out = terms if by_hand else mean
    settings = {"reduction": "none" if by_hand else "mean", "ignore_index": -100}
    if by_hand:
        targets = np.where(targets == -100, 0, targets)
    for place, label in (labels or {}).items():
        targets[place] = label
    return [
        ("0/forward/root#0:out", np.ones((6, 9), np.float32)),
        ("0/loss/loss.cross_entropy#0:labels", (targets, {"kind": "labels", "inputs": (0,)})),
        (
            "0/loss/loss.cross_entropy#0:out",
            (out, {"op": "cross_entropy", "attributes": settings, "inputs": (1,)}),
        ),
        ("0/loss/loss#0:out", (mean, {"inputs": (2,)})),
    ]


def test_terms_of_a_loss_are_reduced_as_the_other_side_does_it(tmp_path: Path) -> None:
    found = compared(tmp_path, losses(False), losses(True))
    assert found.outcome == "equivalent", found.reason
    assert next(s for s in found.stages if s.stage == "loss").compared == 3


def test_a_wrong_term_of_a_loss_by_hand_is_found(tmp_path: Path) -> None:
    found = compared(tmp_path, losses(False), losses(True, wrong=0.5))
    assert found.first is not None
    assert found.first.site == "0/loss/loss.cross_entropy#0:out"


def test_a_wrong_label_of_a_loss_by_hand_is_found(tmp_path: Path) -> None:
    found = compared(tmp_path, losses(False), losses(True, wrong=0.5, labels={2: 3}))
    assert found.first is not None
    assert (found.first.site, found.first.kind) == ("0/loss/loss.cross_entropy#0:labels", "labels")


# ---- parts and flattened tokens ------------------------------------------------------------------


def fused_run(fused: bool, change: float = 0.0) -> Run:
    """A fused projection of GPT-2 (in, out), or three of (out, in), with gradient and output."""
    rng = np.random.default_rng(4)
    weight, grad = (rng.standard_normal((4, 12)).astype(np.float32) for _ in range(2))
    out = rng.standard_normal((2, 3, 12)).astype(np.float32)
    if fused:
        dims = {"dims": ("in", "out"), "op": "Conv1D"}
        return [
            ("0/loading/h.attn.c_attn.weight:param", (weight, dims)),
            ("0/forward/h.attn.c_attn#0:out", (out, {"op": "Conv"})),
            ("0/backward/h.attn.c_attn.weight#0:grad", (grad, dims)),
        ]
    parts = ("q_proj", "k_proj", "v_proj")
    third = {part: slice(4 * i, 4 * i + 4) for i, part in enumerate(parts)}
    grad[:, 5] += np.float32(change)
    return [
        *((f"0/loading/h.attn.{p}.weight:param", weight[:, third[p]].T.copy()) for p in parts),
        *((f"0/forward/h.attn.{p}#0:out", out[..., third[p]].copy()) for p in parts),
        *((f"0/backward/h.attn.{p}.weight#0:grad", grad[:, third[p]].T.copy()) for p in parts),
    ]


def test_a_fused_projection_is_compared_with_its_parts(tmp_path: Path) -> None:
    found = compared(tmp_path, fused_run(True), fused_run(False))
    assert found.outcome == "equivalent", found.reason
    assert found.matched_by == {"parts": 9}
    assert found.coverage == 1.0


def test_a_fault_in_one_part_is_named_by_it(tmp_path: Path) -> None:
    found = compared(tmp_path, fused_run(True), fused_run(False, change=0.5))
    assert found.first is not None
    assert found.first.path == "h.attn.c_attn[k_proj].weight"
    (tmp_path / "reverse").mkdir()
    found = compared(tmp_path / "reverse", fused_run(False, change=0.5), fused_run(True))
    assert found.first is not None
    assert found.first.path == "h.attn.k_proj.weight"


def test_parts_are_not_paired_where_one_is_missing() -> None:
    def event(order: int, name: str, rows: int) -> Event:
        site = Site(0, "loading", f"mlp.{name}.weight", port="param")
        return Event(site=site, order=order, shape=(rows, 4), dtype="float32")

    fused = [event(0, "gate_up_proj", 8)]
    parts = [event(0, "gate_proj", 4), event(1, "up_proj", 4)]
    both = align(fused, parts, ("pytorch", "mlx"))
    assert [pair.matched_by for pair in both.pairs] == ["parts", "parts"]
    assert not align(fused, parts[:1], ("pytorch", "mlx")).pairs
    longer = [parts[0], event(1, "up_proj", 5)]
    assert not align(fused, longer, ("pytorch", "mlx")).pairs


def test_parts_without_a_payload_are_not_compared(tmp_path: Path) -> None:
    from tracediff.events import Run as Manifest
    from tracediff.testing import build_event
    from tracediff.trace import TraceWriter

    for name, run in (("a", fused_run(True)), ("b", fused_run(False))):
        with TraceWriter(tmp_path / name, Manifest(stack="pytorch")) as writer:
            for order, (site, given) in enumerate(run):
                value, fields = given if isinstance(given, tuple) else (given, {})
                writer.add(build_event(site, value, order, **fields), None)
            writer.commit_step()
            writer.finish("finished", None)
    found = bisect(tmp_path / "a", tmp_path / "b")
    assert found.outcome == "incomparable"
    assert any("no payload was kept" in group.reason for group in found.unmatched)


@pytest.mark.parametrize("wrong", [False, True])
def test_flattened_tokens_are_those_of_the_batch(tmp_path: Path, wrong: bool) -> None:
    gate = np.random.default_rng(1).standard_normal((2, 5, 4)).astype(np.float32)
    ids = ("0/rendering/batch.input_ids", (padded()[0], {"kind": "ids"}))
    other = gate.reshape(10, 4).copy()
    other[3, 1] += np.float32(wrong)
    runs = [[ids, ("0/forward/gate#0:out", value)] for value in (gate, other)]
    found = compared(tmp_path, *runs, stacks=("pytorch", "mlx"))
    assert found.outcome == ("diverged" if wrong else "equivalent")
    assert not found.unmatched


def test_labels_masked_by_hand_may_be_anything_at_padding(tmp_path: Path) -> None:
    """Terms are masked after the loss function, so what stands there as a label says nothing."""

    def by_hand(to: int) -> Run:
        ids, mask = padded(to=to)
        labels = np.where(mask, ids, 0)[:, 1:]
        terms = np.where(mask[:, 1:], ids[:, 1:], 0.0).astype(np.float32)
        settings = {"attributes": {"reduction": "none"}}
        return [
            ("0/rendering/batch.input_ids", (ids, {"kind": "ids"})),
            ("0/loss/loss.cross_entropy#0:labels", (labels, {"kind": "labels"})),
            ("0/loss/loss.cross_entropy#0:out", (terms, settings)),
        ]

    found = compared(tmp_path, by_hand(5), by_hand(8), ("mlx", "mlx"))
    assert found.outcome == "equivalent", found.reason
