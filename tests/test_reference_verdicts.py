"""One module, recorded twice: what bisection decides and blames by the float64 reference."""

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

from tests.formulas import OUT, REFERENCE, ROWS, WIDTH, Array, array, in_bfloat16, linear, replay
from tracediff.bisection import bisect
from tracediff.events import Run
from tracediff.recording import Policy, Tape
from tracediff.trace import TraceWriter
from tracediff.verdict import Divergence, Verdict


def record(
    path: Path,
    op: str,
    x: Array,
    out: Array,
    params: Mapping[str, Array] | None = None,
    settings: Mapping[str, Any] | None = None,
    stack: str = "pytorch",
) -> Path:
    """A trace of one call of one module inside a root module."""
    writer = TraceWriter(path, Run(stack=stack, level="module"))
    tape = Tape(writer, Policy())
    tape.emit_settings(
        {
            name if name.startswith("config.") else f"block.{name}": value
            for name, value in (settings or {}).items()
        }
    )
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
    tape.finish()
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


def turned(x: Array, interleaved: bool) -> Array:
    """Rotated pairs as complex numbers: RoFormer, equation 34, written another way."""
    length, width = x.shape[-2:]
    rate = 10000.0 ** (-2.0 * np.arange(width // 2) / width)
    turn = np.exp(1j * np.arange(length)[:, None] * rate)
    wide = x.astype(np.float64)
    if interleaved:
        pairs = (wide[..., ::2] + 1j * wide[..., 1::2]) * turn
        out = np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)
    else:
        pairs = (wide[..., : width // 2] + 1j * wide[..., width // 2 :]) * turn
        out = np.concatenate([pairs.real, pairs.imag], axis=-1)
    return out.astype(np.float32)


def rotating(x: Array, interleaved: bool, **configuration: Any) -> dict[str, Any]:
    settings = {f"config.{name}": value for name, value in configuration.items()}
    settings |= {"base": 10000.0, "traditional": interleaved}
    return {"op": "RoPE", "x": x, "out": turned(x, interleaved), "settings": settings}


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("named", [True, False])
def test_pairs_of_another_kind_of_model_are_the_fault_of_the_side_that_takes_them(
    tmp_path: Path, wrong: int, named: bool
) -> None:
    sides = [rotating(x, which == wrong, model_type="llama") for which, x in enumerate((X, NUDGED))]
    if not named:
        del sides[1 - wrong]["settings"]["traditional"]  # a stack that knows one kind of pairs
    first = divergence(judge(tmp_path, *sides))
    assert first.blame == ("baseline", "target")[wrong]
    assert "traditional True where llama has False" in first.meaning


@pytest.mark.parametrize(
    "configuration",
    [
        {},
        {"model_type": "cohere"},
        {"model_type": "llama", "rope_traditional": True},
    ],
)
def test_pairs_of_a_model_of_unknown_kind_make_neither_side_wrong(
    tmp_path: Path, configuration: dict[str, Any]
) -> None:
    sides = (rotating(X, False, **configuration), rotating(NUDGED, True, **configuration))
    assert divergence(judge(tmp_path, *sides)).blame == "undecided"


@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_of_one_kind_on_both_sides_are_silent(tmp_path: Path, interleaved: bool) -> None:
    sides = (rotating(x, interleaved, model_type="llama") for x in (X, NUDGED))
    assert judge(tmp_path, *sides).outcome == "equivalent"


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
