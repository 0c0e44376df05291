"""The float64 reference: its formulas, its spreads, and what bisection decides and blames by it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import toy
from numpy.typing import NDArray

from tracediff import stacks
from tracediff.bisection import bisect
from tracediff.errors import StackError
from tracediff.events import Run
from tracediff.recording import Policy, Tape
from tracediff.replaying import Call, Replayed
from tracediff.trace import TraceWriter
from tracediff.verdict import Divergence, Verdict

Array = NDArray[Any]

REFERENCE = stacks.load_replayer("reference")()
WIDTH, OUT, ROWS = 64, 48, (2, 12)


def array(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def in_bfloat16(x: Array) -> Array:
    """To bfloat16 and back."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def replay(
    op: str,
    x: Array,
    params: Mapping[str, Array] | None = None,
    dtype: str = "float32",
    **settings: Any,
) -> Replayed:
    call = Call(op=op, inputs={"in": x}, params=params or {}, settings=settings, dtype=dtype)
    found = REFERENCE.replay(call)
    assert found is not None
    return found


# ---- formulas, against values worked by hand or by other means -----------------------------------


def test_products_by_hand() -> None:
    x = np.array([[1, 2]], np.float32)
    weight = np.array([[1, 0], [0, 3], [1, 1]], np.float32)
    bias = np.array([0, 0, 10], np.float32)
    assert replay("Linear", x, {"weight": weight, "bias": bias}).value.tolist() == [[1, 6, 13]]
    assert replay("Conv1D", x, {"weight": weight.T, "bias": bias}).value.tolist() == [[1, 6, 13]]
    ids = np.array([2, 0])
    assert replay("Embedding", ids, {"weight": weight}).value.tolist() == [[1, 1], [1, 0]]


def test_both_layouts_of_lora_by_hand() -> None:
    x = np.array([[1, 2]], np.float32)
    base, down, up = np.eye(2, dtype=np.float32), np.array([[1, 1]]), np.array([[1], [2]])
    down, up = down.astype(np.float32), up.astype(np.float32)
    peft = {"base_layer.weight": base, "lora_A.default.weight": down, "lora_B.default.weight": up}
    mlx = {"linear.weight": base, "lora_a": down.T, "lora_b": up.T}
    for params, op in ((peft, "Linear"), (mlx, "LoRALinear")):  # x + 2 (1 + 2) (1, 2)
        assert replay(op, x, params, scale=2.0).value.tolist() == [[7, 14]]
    dropped = Call(
        op="LoRALinear", inputs={"in": x}, params=mlx, settings={"scale": 2.0, "dropout.p": 0.1}
    )
    assert REFERENCE.replay(dropped) is None


def test_norms_by_hand() -> None:
    x = np.array([[3, 4]], np.float32)
    weight = np.array([1, 2], np.float32)
    root = math.sqrt(12.5 + 0.5)
    plain = replay("LlamaRMSNorm", x, {"weight": weight}, eps=0.5).value
    np.testing.assert_allclose(plain, [[3 / root, 8 / root]], rtol=1e-15)
    settings = REFERENCE.resolve("GemmaRMSNorm", {"eps": 0.5})
    offset = replay("GemmaRMSNorm", x, {"weight": weight}, **settings).value
    np.testing.assert_allclose(offset, [[6 / root, 12 / root]], rtol=1e-15)
    params = {"weight": weight, "bias": np.array([10, 0], np.float32)}
    layer = replay("LayerNorm", x, params, eps=0.75).value  # mean 3.5, variance 0.25 + eps
    np.testing.assert_allclose(layer, [[9.5, 1.0]], rtol=1e-15)


def test_what_is_exactly_zero_has_no_rounding_to_hide_a_fault_behind() -> None:
    x = np.array([0.0, 0.5, 3.0], np.float32)
    found = replay("SiLU", x, dtype="bfloat16")
    np.testing.assert_allclose(found.value, x / (1 + np.exp(-x)), rtol=1e-6)
    assert found.reach is not None
    assert found.reach[0] < 1e-30
    # bfloat16 has 8 significant bits: half of their spacing at 0.31 and at 2.9.
    assert found.reach[1] >= 2.0**-10
    assert found.reach[2] >= 2.0**-7


@pytest.mark.parametrize("traditional", [False, True])
def test_rope_is_a_rotation_of_complex_numbers(traditional: bool) -> None:
    x = array(2, 3, 7, 8)
    pairs = (x[..., 0::2], x[..., 1::2]) if traditional else (x[..., :4], x[..., 4:])
    numbers = pairs[0].astype(np.float64) + 1j * pairs[1]
    turned = np.stack(
        [
            numbers[..., position, :] * np.exp(1j * position * 100.0 ** (-np.arange(4) / 4))
            for position in range(7)
        ],
        axis=-2,
    )
    got = replay("RoPE", x, base=100.0, traditional=traditional).value
    halves = (got[..., 0::2], got[..., 1::2]) if traditional else (got[..., :4], got[..., 4:])
    np.testing.assert_allclose(halves[0] + 1j * halves[1], turned, atol=1e-14)


def test_positions_may_count_from_an_offset() -> None:
    x = array(1, 1, 9, 8)
    whole = replay("RoPE", x, base=100.0).value
    rest = replay("RoPE", x[..., 5:, :], base=100.0, offset=5).value
    np.testing.assert_allclose(rest, whole[..., 5:, :], atol=1e-14)


@pytest.mark.parametrize(
    ("op", "points"),
    [
        ("SiLU", {0.0: 0.0, 1.0: 0.7310585786300049, -20.0: -4.122307235558548e-08}),
        ("GELUActivation", {1.0: 0.8413447460685429, -1.0: -0.15865525393145707}),
        ("NewGELUActivation", {1.0: 0.8411919906082768, -1.0: -0.15880800939172324}),
        ("ReLU", {-2.0: 0.0, 2.0: 2.0}),
        ("Tanh", {0.5: 0.46211715726000973}),
    ],
)
def test_activations_at_known_points(op: str, points: Mapping[float, float]) -> None:
    x = np.array(list(points), np.float32)
    got = replay(op, x, **REFERENCE.resolve(op, {})).value
    np.testing.assert_allclose(got, list(points.values()), rtol=1e-8)


def test_cross_entropy_by_hand_leaves_ignored_labels_out() -> None:
    logits = np.log(np.array([[1, 3], [1, 1], [9, 1]], np.float64)).astype(np.float32)
    labels = np.array([0, -100, 0])
    settings = {"reduction": "mean", "ignore_index": -100}
    call = Call(op="cross_entropy", inputs={"in": logits, "labels": labels}, settings=settings)
    found = REFERENCE.replay(call)
    assert found is not None
    assert float(found.value) == pytest.approx((math.log(4) + math.log(10 / 9)) / 2, rel=1e-6)


def test_formulas_agree_with_torch_in_float64() -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    x, weight, bias = array(3, 5, 16), array(8, 16, seed=1), array(8, seed=2)
    gain, shift = array(16, seed=3), array(16, seed=4)
    t = {k: torch.tensor(v).double() for k, v in locals().items() if isinstance(v, np.ndarray)}
    cases = [
        (replay("Linear", x, {"weight": weight, "bias": bias}),
         functional.linear(t["x"], t["weight"], t["bias"])),
        (replay("RMSNorm", x, {"weight": gain}, eps=1e-3),
         functional.rms_norm(t["x"], (16,), t["gain"], 1e-3)),
        (replay("LayerNorm", x, {"weight": gain, "bias": shift}, eps=1e-3),
         functional.layer_norm(t["x"], (16,), t["gain"], t["shift"], 1e-3)),
        (replay("SiLU", x), functional.silu(t["x"])),
        (replay("GELU", x), functional.gelu(t["x"])),
        (replay("GELU", x, approximate="tanh"), functional.gelu(t["x"], approximate="tanh")),
        (replay("QuickGELUActivation", x), t["x"] * torch.sigmoid(1.702 * t["x"])),
    ]  # fmt: skip
    for found, right in cases:
        np.testing.assert_allclose(found.value, right.numpy(), rtol=1e-12, atol=1e-14)


def test_what_the_trace_does_not_hold_is_not_guessed() -> None:
    x = array(4, WIDTH)
    assert REFERENCE.replay(Call(op="Linear", inputs={"in": x})) is None
    norm = Call(op="RMSNorm", inputs={"in": x}, params={"weight": array(WIDTH)})
    assert REFERENCE.replay(norm) is None  # no eps
    assert REFERENCE.replay(Call(op="Dropout", inputs={"in": x}, settings={"p": 0.1})) is None
    assert not REFERENCE.supports("LlamaAttention")
    scaled = REFERENCE.resolve(
        "RoPE", {"config.rope_theta": 1e4, "config.rope_parameters.rope_type": "llama3"}
    )
    assert REFERENCE.replay(Call(op="RoPE", inputs={"in": x}, settings=scaled)) is None
    with pytest.raises(StackError, match="replayer 'abacus' is unknown"):
        stacks.load_replayer("abacus")


# ---- spreads ------------------------------------------------------------------------------------


def linear(x: Array, weight: Array) -> Array:
    """One product after the other, each partial sum rounded to float32."""
    total = np.zeros((*x.shape[:-1], len(weight)), np.float32)
    for k in range(x.shape[-1]):
        total += x[..., k, None] * weight[:, k]
    return total


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_spread_of_a_product_is_the_size_of_its_errors(outlier: float, offset: float) -> None:
    x, weight = array(64, 512) + np.float32(offset), array(128, 512, seed=1) + np.float32(offset)
    x[:, 3] *= outlier  # a massive activation
    found = replay("Linear", x, {"weight": weight})
    error = (linear(x, weight) - found.value) / found.spread
    assert np.abs(error).max() < 6
    assert 0.3 < np.sqrt(np.mean(error**2)) < 2


@pytest.mark.parametrize("parts", [1, 2])
def test_16_bit_products_may_store_their_result_and_their_partial_sums(parts: int) -> None:
    x = in_bfloat16(array(64, WIDTH))
    weight = in_bfloat16(array(OUT, WIDTH, seed=1))
    found = replay("Linear", x, {"weight": weight}, dtype="bfloat16")
    sums = [
        in_bfloat16(a @ b.T)
        for a, b in zip(np.split(x, parts, 1), np.split(weight, parts, 1), strict=True)
    ]
    error = (in_bfloat16(sum(sums)) - found.value) / found.spread
    assert np.abs(error).max() < 4
    assert 0.4 < np.sqrt(np.mean(error**2)) < 1.05


# ---- one module, recorded twice -----------------------------------------------------------------


def record(
    path: Path,
    op: str,
    x: Array,
    out: Array,
    params: Mapping[str, Array] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """A trace of one call of one module inside a root module."""
    writer = TraceWriter(path, Run(stack="pytorch", level="module"))
    tape = Tape(writer, Policy())
    tape.emit_settings({f"block.{name}": value for name, value in (settings or {}).items()})
    for name, value in (params or {}).items():
        tape.emit("loading", f"block.{name}", "param", value)
    root = tape.enter("root", "Model")
    tape.emit_in(root, "in", x)
    frame = tape.enter("block", op)
    tape.emit_in(frame, "in", x)
    tape.emit_out(frame, "out", out)
    tape.exit(frame)
    tape.emit_out(root, "out", out)
    tape.exit(root)
    tape.advance()
    writer.finish("finished")
    return path


def judge(tmp_path: Path, baseline: Mapping[str, Any], target: Mapping[str, Any]) -> Verdict:
    return bisect(
        record(tmp_path / "baseline.zarr", **baseline), record(tmp_path / "target.zarr", **target)
    )


def divergence(verdict: Verdict) -> Divergence:
    assert verdict.outcome == "diverged", verdict.reason
    assert verdict.first is not None
    assert verdict.first.site == "0/forward/block#0:out"
    assert verdict.first.origin == "introduced"
    return verdict.first


X = array(*ROWS, WIDTH)
NUDGED = X * (1 + 2e-7 * array(*ROWS, WIDTH, seed=9))  # as far apart as rounding brings two runs
WEIGHT = array(OUT, WIDTH, seed=1, scale=0.1)
GAIN = 1 + array(WIDTH, seed=2, scale=0.1)


def rounded(op: str, x: Array, params: Mapping[str, Array] | None = None, **settings: Any) -> Array:
    """What a correct implementation stores: the exact output, rounded once."""
    return replay(op, x, params, **settings).value.astype(x.dtype)


def one_weight() -> Array:
    changed = WEIGHT.copy()
    changed[5, 7] += np.float32(0.05)
    return changed


def eps_outside(x: Array) -> Array:
    root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    return (GAIN * x / (root + np.float32(1e-5))).astype(np.float32)


Make = Callable[[Array], Array]
FAULTS: dict[str, tuple[str, dict[str, Array], dict[str, Any], Make]] = {
    "one weight changed by 0.05": (
        "Linear", {"weight": WEIGHT}, {}, lambda x: rounded("Linear", x, {"weight": one_weight()})
    ),
    "output times 1.00001": (
        "Linear",
        {"weight": WEIGHT},
        {},
        lambda x: rounded("Linear", x, {"weight": WEIGHT}) * np.float32(1.00001),
    ),
    "norm without its + 1": (
        "GemmaRMSNorm",
        {"weight": GAIN},
        {"eps": 1e-5},
        lambda x: rounded("RMSNorm", x, {"weight": GAIN}, eps=1e-5),
    ),
    "eps outside the root": (
        "RMSNorm",
        {"weight": GAIN},
        {"eps": 1e-5},
        eps_outside,
    ),
    "tanh formula where erf is meant": (
        "GELUActivation", {}, {}, lambda x: rounded("GELU", x, approximate="tanh")
    ),
    "rotary base 10010 for 10000": (
        "RoPE", {}, {"base": 10000.0}, lambda x: rounded("RoPE", x, base=10010.0)
    ),
}  # fmt: skip


def right(op: str, params: Mapping[str, Array], settings: Mapping[str, Any], x: Array) -> Array:
    return rounded(op, x, params, **REFERENCE.resolve(op, settings))


@pytest.mark.parametrize("wrong", ["baseline", "target"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_tiny_fault_is_named_and_the_right_side_blamed(
    tmp_path: Path, name: str, wrong: str
) -> None:
    op, params, settings, fault = FAULTS[name]
    common = {"op": op, "params": params, "settings": settings}
    sides = {
        side: common
        | {"x": x, "out": fault(x) if side == wrong else right(op, params, settings, x)}
        for side, x in (("baseline", X), ("target", NUDGED))
    }
    first = divergence(judge(tmp_path, sides["baseline"], sides["target"]))
    assert first.blame == wrong
    other = {"baseline": "target", "target": "baseline"}[wrong]
    assert first.detail[f"distance_{wrong}"] > 3 * first.detail[f"distance_{other}"]
    assert first.bound is not None
    assert first.error.rel_l2 > first.bound.rel_l2


@pytest.mark.parametrize("wrong", [None, "baseline", "target"])
def test_a_dropout_is_judged_given_what_it_dropped(tmp_path: Path, wrong: str | None) -> None:
    """Inverted dropout without its 1/(1 - p) on one side, from the same random numbers."""
    kept = np.random.default_rng(3).random(X.shape) >= 0.25
    sides = {
        side: {
            "op": "Dropout",
            "settings": {"p": 0.25},
            "x": x,
            "out": (x * kept * (1.0 if side == wrong else 4 / 3)).astype(np.float32),
        }
        for side, x in (("baseline", X), ("target", NUDGED))
    }
    verdict = judge(tmp_path, sides["baseline"], sides["target"])
    if wrong is None:
        assert verdict.outcome == "equivalent", verdict.reason
    else:
        assert divergence(verdict).blame == wrong


def test_dropouts_that_dropped_other_elements_are_not_excused(tmp_path: Path) -> None:
    common = {"op": "Dropout", "settings": {"p": 0.25}, "x": X}
    masks = (np.random.default_rng(seed).random(X.shape) >= 0.25 for seed in (3, 4))
    outs = [common | {"out": (X * mask * (4 / 3)).astype(np.float32)} for mask in masks]
    divergence(judge(tmp_path, *outs))


def test_two_different_faults_blame_both(tmp_path: Path) -> None:
    exact = rounded("Linear", X, {"weight": WEIGHT})
    common = {"op": "Linear", "params": {"weight": WEIGHT}, "x": X}
    outs = [common | {"out": exact * np.float32(factor)} for factor in (1.001, 0.999)]
    assert divergence(judge(tmp_path, *outs)).blame == "both"


def test_a_lora_scale_of_1_05_on_one_side(tmp_path: Path) -> None:
    params = {
        "base_layer.weight": WEIGHT,
        "lora_A.default.weight": array(4, WIDTH, seed=3, scale=0.1),
        "lora_B.default.weight": array(OUT, 4, seed=4, scale=1e-4),
    }
    common = {"op": "Linear", "params": params, "settings": {"scale": 2.0}}
    sides = [
        common | {"x": x, "out": rounded("Linear", x, params, scale=scale)}
        for x, scale in ((X, 2.0), (NUDGED, 2.1))
    ]
    first = divergence(judge(tmp_path, *sides))
    assert first.blame == "target"
    assert first.error.rel_l2 < 1e-4


@pytest.mark.parametrize(
    ("op", "params", "setting", "values"),
    [
        ("LlamaRMSNorm", {"weight": GAIN}, "eps", (1e-5, 1e-3)),
        ("RoPE", {}, "base", (100000.0, 10000.0)),
    ],
)
def test_a_setting_that_differs_makes_neither_side_wrong(
    tmp_path: Path,
    op: str,
    params: dict[str, Array],
    setting: str,
    values: tuple[float, float],
) -> None:
    sides = [
        {
            "op": op,
            "params": params,
            "settings": {setting: value},
            "x": X,
            "out": rounded(op, X, params, **{setting: value}),
        }
        for value in values
    ]
    first = divergence(judge(tmp_path, *sides))
    assert first.blame == "undecided"
    assert "each side follows its own setting" in first.meaning
    assert f"{setting} {values[0]!r} against {values[1]!r}" in first.meaning


# ---- clean twins --------------------------------------------------------------------------------


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_another_order_of_accumulation_is_silent(tmp_path: Path, outlier: float) -> None:
    x, nudged = X.copy(), NUDGED.copy()
    for side in (x, nudged):
        side[..., 3] *= outlier
    common = {"op": "Linear", "params": {"weight": WEIGHT}}
    verdict = judge(
        tmp_path,
        common | {"x": x, "out": linear(x, WEIGHT)},
        common | {"x": nudged, "out": rounded("Linear", nudged, {"weight": WEIGHT})},
    )
    assert verdict.outcome == "equivalent", verdict.reason


def test_a_setting_shows_in_the_bits_below_what_16_bits_allow_for(tmp_path: Path) -> None:
    """erf against tanh, apart by less than half the spacing of bfloat16, one composed of operations
    that each store their result."""
    x = in_bfloat16(3 * X).astype(ml_dtypes.bfloat16)
    erf = replay("GELU", x, dtype="bfloat16").value
    wide = x.astype(np.float32)
    inner = in_bfloat16(wide + in_bfloat16(0.044715 * in_bfloat16(wide**3)))
    inner = in_bfloat16(np.tanh(in_bfloat16(math.sqrt(2 / math.pi) * inner)))
    composed = in_bfloat16(0.5 * wide) * in_bfloat16(1 + inner)
    sides = [
        {"op": op, "x": x, "out": out.astype(np.float32).astype(ml_dtypes.bfloat16)}
        for op, out in (("NewGELUActivation", composed), ("GELUActivation", erf))
    ]
    first = divergence(judge(tmp_path, *sides))
    assert first.blame == "undecided"
    assert "approximate 'tanh' against 'none'" in first.meaning
    assert judge(tmp_path / "same", sides[1], sides[1]).exit_code == 0


@pytest.mark.parametrize("op", ["Linear", "RMSNorm", "SiLU"])
def test_16_bit_storage_is_silent(tmp_path: Path, op: str) -> None:
    """Outputs that are rounded to bfloat16 once, from inputs that differ by one rounding."""
    params = {"Linear": {"weight": WEIGHT}, "RMSNorm": {"weight": GAIN}, "SiLU": {}}[op]
    half = {name: value.astype(ml_dtypes.bfloat16) for name, value in params.items()}
    settings = {"eps": 1e-5} if op == "RMSNorm" else {}
    x = X.astype(ml_dtypes.bfloat16)
    nudged = np.where(np.random.default_rng(5).random(X.shape) < 0.1, X * 1.004, X)
    sides = []
    for given in (x, nudged.astype(np.float32).astype(ml_dtypes.bfloat16)):
        exact = replay(op, given, half, dtype="bfloat16", **settings).value
        out = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
        sides.append({"op": op, "params": half, "settings": settings, "x": given, "out": out})
    verdict = judge(tmp_path, *sides)
    assert verdict.outcome == "equivalent", verdict.reason


def test_a_product_may_be_laid_out_either_way(tmp_path: Path) -> None:
    """GPT-2's Conv1D against a Linear with the square weight transposed."""
    weight = array(WIDTH, WIDTH, seed=6, scale=0.1)
    sides = [
        {"op": op, "params": {"weight": w}, "x": x, "out": rounded(op, x, {"weight": w})}
        for op, w, x in (("Conv1D", weight, X), ("Linear", weight.T.copy(), NUDGED))
    ]
    baseline = record(tmp_path / "a.zarr", **sides[0])
    target = record(tmp_path / "b.zarr", **sides[1])
    rules = tmp_path / "rules.toml"
    rules.write_text('[[transposed]]\npattern = "^block.weight$"\n')
    assert bisect(baseline, target, rules=rules).outcome == "equivalent"


def test_a_formula_that_describes_neither_side_decides_nothing(tmp_path: Path) -> None:
    """A class of this name that computes something else, alike on both sides: no false alarm."""
    sides = [
        {"op": "RMSNorm", "params": {"weight": GAIN}, "settings": {"eps": 1e-5}, "x": x}
        | {"out": (np.sign(x) * np.sqrt(np.abs(x))).astype(np.float32)}
        for x in (X, NUDGED)
    ]
    assert judge(tmp_path, *sides).outcome == "equivalent"


def test_parameters_that_differ_after_an_update_are_each_sides_own(tmp_path: Path) -> None:
    """The second step is judged with the weights that each side's first update left."""
    baseline = toy.record(tmp_path / "a.zarr", steps=3)
    target = toy.record(tmp_path / "b.zarr", steps=3, exact=True)
    assert bisect(baseline, target).outcome == "equivalent"


def test_bisection_by_the_reference_needs_no_framework(tmp_path: Path) -> None:
    op, params, settings, fault = FAULTS["one weight changed by 0.05"]
    common = {"op": op, "params": params, "settings": settings, "x": X}
    record(tmp_path / "a.zarr", **common, out=right(op, params, settings, X))
    record(tmp_path / "b.zarr", **common, out=fault(X))
    program = (
        "import sys\n"
        "frameworks = ('torch', 'mlx', 'mlx_lm', 'transformers', 'peft')\n"
        "sys.modules.update(dict.fromkeys(frameworks))\n"  # importing one of them raises
        "from tracediff.bisection import bisect\n"
        f"first = bisect({str(tmp_path / 'a.zarr')!r}, {str(tmp_path / 'b.zarr')!r}).first\n"
        "print(first.site, first.blame)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0/forward/block#0:out", "target"]
