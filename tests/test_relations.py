"""What models compute between their modules: found in the data flow, recomputed, and blamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tracediff import stacks
from tracediff.bisection import bisect
from tracediff.events import Run
from tracediff.recording import Policy, Tape
from tracediff.replaying import Call, Replayed
from tracediff.trace import TraceWriter
from tracediff.verdict import Verdict

Array = NDArray[Any]
Fault = Callable[[str, Array], Array]

REFERENCE = stacks.load_replayer("reference")()
BATCH, LENGTH, HEADS, KEY_HEADS, SIZE = 2, 10, 4, 2, 8
WIDTH = HEADS * SIZE


def drawn(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def unchanged(name: str, value: Array) -> Array:
    return value


class Block:
    """A transformer block in NumPy on the tape, in one of two orders of arithmetic.

    `wide` computes everything in float64 and rounds the results once; otherwise scores, weights
    and activations are stored in the block's dtype as well, as an eager implementation does.

    Args:
        fault: Given the name of a value and the value, returns what it is on this side.
        scale, causal: Of the attention.
    """

    def __init__(
        self,
        path: Path,
        dtype: Any,
        *,
        wide: bool = False,
        fault: Fault = unchanged,
        scale: float = SIZE**-0.5,
        causal: bool = True,
        recorded: bool = False,
    ) -> None:
        self.dtype, self.wide, self.fault = dtype, wide, fault
        self.scale, self.causal = scale, causal
        writer = TraceWriter(path, Run(stack="pytorch"))
        self.tape = Tape(writer, Policy())
        self.tape.emit_settings({"config.num_attention_heads": HEADS})
        self.mask = np.tril(np.ones((1, 1, LENGTH, LENGTH), bool))
        self.recorded = recorded
        self.run(self.stored(drawn(BATCH, LENGTH, WIDTH, seed=0)))
        self.tape.advance()
        self.tape.finish()
        self.path = path

    def stored(self, value: Array) -> Array:
        return np.asarray(value, np.float32).astype(self.dtype)

    def rounded(self, value: Array) -> Array:
        """An intermediate result, which only a narrow implementation stores."""
        return value if self.wide else self.stored(value).astype(np.float64)

    def linear(self, name: str, x: Array, outputs: int, seed: int) -> Array:
        weight = self.stored(drawn(outputs, x.shape[-1], seed=seed) / x.shape[-1] ** 0.5)
        frame = self.tape.enter(name, "Linear")
        self.tape.emit("loading", f"{name}.weight", "param", weight)
        self.tape.emit_in(frame, "in", x)
        exact = x.astype(np.float64) @ weight.astype(np.float64).T
        out = self.fault(name, self.stored(exact if self.wide else self.noisy(exact)))
        self.tape.emit_out(frame, "out", out)
        self.tape.exit(frame)
        return out

    def noisy(self, exact: Array) -> Array:
        """As another order of a float32 sum has it."""
        return exact * (1 + 2.0**-25 * drawn(*exact.shape, seed=7))

    def attention(self, query: Array, key: Array, value: Array) -> Array:
        q, k, v = (
            a.astype(np.float64).reshape(BATCH, LENGTH, -1, SIZE).swapaxes(1, 2)
            for a in (query, key, value)
        )
        k, v = (np.repeat(a, HEADS // a.shape[1], axis=1) for a in (k, v))
        scores = self.rounded(self.rounded(q @ k.swapaxes(-1, -2)) * self.scale)
        if self.causal:
            scores = np.where(self.mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = self.rounded(weights / weights.sum(-1, keepdims=True))
        joined = self.stored((weights @ v).swapaxes(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return self.fault("attention", joined)

    def run(self, x: Array) -> None:
        tape = self.tape
        root = tape.enter("root", "Model")
        tape.emit_in(root, "in", x)
        if self.recorded:
            tape.emit_in(root, "in.attention_mask", self.mask, kind="mask")
        query = self.linear("q_proj", x, WIDTH, 1)
        key = self.linear("k_proj", x, KEY_HEADS * SIZE, 2)
        value = self.linear("v_proj", x, KEY_HEADS * SIZE, 3)
        attended = self.linear("o_proj", self.attention(query, key, value), WIDTH, 4)
        hidden = self.fault("sum", self.stored(x.astype(np.float64) + attended))
        mlp = tape.enter("mlp", "MLP")
        tape.emit_in(mlp, "in", hidden)
        gate, up = (self.linear(f"mlp.{n}", hidden, 24, s) for n, s in (("gate", 5), ("up", 6)))
        active = self.rounded(gate / (1 + np.exp(-gate.astype(np.float64))))
        gated = self.fault("gated", self.stored(active * up.astype(np.float64)))
        down = self.linear("mlp.down", gated, WIDTH, 8)
        out = self.fault("mlp", down)
        tape.emit_out(mlp, "out", out)
        tape.exit(mlp)
        tape.emit_out(root, "out", self.stored(hidden.astype(np.float64) + out))
        tape.exit(root)


class Joined(Block):
    """Attention whose queries, keys and values are one product, and whose mask is added to the
    scores and recorded where they are computed: nothing recorded is split into heads but the mask.
    """

    def run(self, x: Array) -> None:
        tape = self.tape
        root = tape.enter("root", "Model")
        tape.emit_in(root, "in", x)
        hidden = np.where(self.mask, 0.0, np.finfo(np.float32).min).astype(np.float32)
        tape.emit_in(root, "in.attention_mask", np.repeat(hidden, BATCH, axis=0))
        joined = self.linear("c_attn", x, 3 * WIDTH, 1)
        query, key, value = np.split(joined, 3, axis=-1)
        out = self.linear("o_proj", self.attention(query, key, value), WIDTH, 4)
        tape.emit_out(root, "out", out)
        tape.exit(root)


def times(name: str, factor: float) -> Fault:
    def fault(of: str, value: Array) -> Array:
        changed = value.astype(np.float32) * np.float32(factor)
        return changed.astype(value.dtype) if of == name else value

    return fault


def judged(tmp_path: Path, dtype: Any, baseline: dict[str, Any], target: dict[str, Any]) -> Verdict:
    a = Block(tmp_path / "a.zarr", dtype, **baseline)
    b = Block(tmp_path / "b.zarr", dtype, wide=True, **target)
    return bisect(a.path, b.path)


DTYPES = pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
SITES = {
    "attention": "0/forward/o_proj#0:in",
    "sum": "0/forward/mlp#0:in",
    "gated": "0/forward/mlp.down#0:in",
    "mlp": "0/forward/mlp#0:out",
}


@DTYPES
@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("wrong", ["baseline", "target"])
def test_whoever_breaks_a_relation_is_named(
    tmp_path: Path, dtype: Any, name: str, wrong: str
) -> None:
    sides: dict[str, dict[str, Any]] = {"baseline": {}, "target": {}}
    sides[wrong] = {"fault": times(name, 1.05)}
    first = judged(tmp_path, dtype, sides["baseline"], sides["target"]).first
    assert first is not None
    assert (first.site, first.blame, first.origin) == (SITES[name], wrong, "introduced")


@DTYPES
def test_an_attention_scale_that_belongs_to_no_module(tmp_path: Path, dtype: Any) -> None:
    first = judged(tmp_path, dtype, {}, {"scale": 1.05 * SIZE**-0.5}).first
    assert first is not None
    assert (first.site, first.blame) == (SITES["attention"], "target")


@DTYPES
@pytest.mark.parametrize("recorded", [True, False])
def test_attention_without_its_mask(tmp_path: Path, dtype: Any, recorded: bool) -> None:
    sides = {"recorded": recorded}
    first = judged(tmp_path, dtype, sides, sides | {"causal": False}).first
    assert first is not None
    assert (first.site, first.blame) == (SITES["attention"], "target")


@DTYPES
@pytest.mark.parametrize("wrong", [None, "baseline", "target"])
def test_attention_of_one_product_with_a_mask_that_is_added(
    tmp_path: Path, dtype: Any, wrong: str | None
) -> None:
    sides: dict[str, dict[str, Any]] = {"baseline": {}, "target": {"wide": True}}
    if wrong:
        sides[wrong]["scale"] = 1.05 * SIZE**-0.5
    verdict = bisect(*(Joined(tmp_path / f"{n}.zarr", dtype, **s).path for n, s in sides.items()))
    if wrong is None:
        assert verdict.outcome == "equivalent"
        return
    assert verdict.first is not None
    assert (verdict.first.site, verdict.first.blame) == (SITES["attention"], wrong)


@DTYPES
def test_both_orders_of_arithmetic_are_silent(tmp_path: Path, dtype: Any) -> None:
    assert judged(tmp_path, dtype, {}, {}).outcome == "equivalent"


@DTYPES
def test_attention_to_everything_on_both_sides_is_silent(tmp_path: Path, dtype: Any) -> None:
    sides = {"causal": False}
    assert judged(tmp_path, dtype, sides, sides).outcome == "equivalent"


def test_a_formula_of_ones_own_on_both_sides_is_silent(tmp_path: Path) -> None:
    """A block that doubles its residual, alike on both sides: no relation holds, none is broken."""
    sides = {"fault": times("sum", 2.0)}
    assert judged(tmp_path, np.float32, sides, sides).outcome == "equivalent"


# ---- formulas -----------------------------------------------------------------------------------


def replay(op: str, inputs: dict[str, Array], dtype: str = "float32", **settings: Any) -> Replayed:
    given = {"operand_roundoff": 0.0, **settings}
    found = REFERENCE.replay(Call(op=op, inputs=inputs, settings=given, dtype=dtype))
    assert found is not None
    return found


def test_sums_and_gates_by_hand() -> None:
    a, b = np.array([1.0, -2.0], np.float32), np.array([3.0, 4.0], np.float32)
    assert replay("copy", {"in": a}).value.tolist() == [1, -2]
    assert replay("add", {"in": a, "other": b}).value.tolist() == [4, 2]
    assert replay("multiply", {"in": a, "other": b}).value.tolist() == [3, -8]
    gated = replay("gated SiLU", {"in": a, "other": b}).value
    np.testing.assert_allclose(gated, [3 * 0.7310585786300049, 4 * -0.2384058440442351], rtol=1e-9)


@pytest.mark.parametrize("additive", [False, True])
def test_attention_agrees_with_torch_in_float64(additive: bool) -> None:
    torch = pytest.importorskip("torch")
    query, key, value = (
        drawn(BATCH, heads, LENGTH, SIZE, seed=s).astype(np.float32)
        for s, heads in ((1, HEADS), (2, KEY_HEADS), (3, KEY_HEADS))
    )
    mask = np.tril(np.ones((1, 1, LENGTH, LENGTH), bool))
    given = np.where(mask, 0.3, np.finfo(np.float32).min).astype(np.float32) if additive else mask
    inputs = {"in": query, "key": key, "value": value, "mask": given}
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(torch.tensor(a).double() for a in (query, key, value)),
        attn_mask=torch.tensor(mask),  # what is added to all scores of a row changes nothing
        scale=0.3,
        enable_gqa=True,
    )
    joined = exact.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
    np.testing.assert_allclose(replay("attention", inputs, scale=0.3).value, joined, atol=1e-12)


def test_an_error_of_a_score_spreads_as_its_derivative_says() -> None:
    """The spread in bfloat16 against what storing scores and weights really does."""
    query, key, value = (
        drawn(1, 1, 64, SIZE, seed=s).astype(np.float32).astype(ml_dtypes.bfloat16)
        for s in (1, 2, 3)
    )
    mask = np.ones((1, 1, 64, 64), bool)
    inputs = {"in": query, "key": key, "value": value, "mask": mask}
    found = replay("attention", inputs, "bfloat16", scale=1.0)

    def stored(array: Array) -> Array:
        return array.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)

    q, k, v = (a.astype(np.float64)[0, 0] for a in (query, key, value))
    weights = np.exp(stored(q @ k.T))
    out = stored(stored(weights / weights.sum(-1, keepdims=True)) @ v)
    error = (out - found.value[0]) / found.spread[0]
    assert 0.3 < np.sqrt(np.mean(error**2)) < 1
    assert np.abs(error).max() < 6


# ---- norms in 16 bits ---------------------------------------------------------------------------


def norm_out(x: Array, weight: Array, *, early: bool, error: float = 0.0) -> Array:
    """RMSNorm in float32 that stores the normalised value before the weight, or does not; each row
    off by up to `error`."""
    wide = x.astype(np.float32)
    normed = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + np.float32(1e-5))
    normed *= 1 + np.float32(error) * np.linspace(-1, 1, len(x), dtype=np.float32)[:, None]
    if early:
        normed = normed.astype(ml_dtypes.bfloat16).astype(np.float32)
    return (normed * weight.astype(np.float32)).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("early", [True, False])
def test_every_rounding_of_a_norm_is_within_its_reach(early: bool) -> None:
    x = drawn(64, 512, seed=1).astype(np.float32).astype(ml_dtypes.bfloat16)
    weight = (1 + drawn(512, seed=2) / 10).astype(np.float32).astype(ml_dtypes.bfloat16)
    call = Call(
        op="LlamaRMSNorm",
        inputs={"in": x},
        params={"weight": weight},
        settings={"eps": 1e-5, "operand_roundoff": 0.0},
        dtype="bfloat16",
    )
    found = REFERENCE.replay(call)
    assert found is not None
    assert found.reach is not None
    good = np.abs(norm_out(x, weight, early=early).astype(np.float64) - found.value)
    assert (good <= found.reach).all()
    bad = norm_out(x, weight, early=early, error=0.01).astype(np.float64)
    assert (np.abs(bad - found.value) > found.reach).any()
