"""Sparse mixtures of experts: the formula, against other implementations, and verdicts by it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.models import qwen3_moe as mlx_qwen3_moe
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.formulas import REFERENCE, Array, array, replay
from tests.test_reference_verdicts import divergence, judge
from tracediff.bisection.memory import Memory
from tracediff.bisection.trial import side
from tracediff.events import Event, Site, View
from tracediff.replaying import Call

OP = "Qwen3MoeSparseMoeBlock"
HIDDEN, WIDTH, EXPERTS, CHOSEN = 32, 24, 8, 3
SHAPE = (2, 12, HIDDEN)
X = array(*SHAPE)
NUDGED = X * (1 + 2e-7 * array(*SHAPE, seed=9))


def weights(seed: int = 1) -> dict[str, Array]:
    """Of the router and of all experts, as transformers names them."""
    return {
        "gate.weight": array(EXPERTS, HIDDEN, seed=seed, scale=0.3),
        "experts.gate_up_proj": array(EXPERTS, 2 * WIDTH, HIDDEN, seed=seed + 1, scale=0.3),
        "experts.down_proj": array(EXPERTS, HIDDEN, WIDTH, seed=seed + 2, scale=0.3),
    }


def as_in_mlx(params: Mapping[str, Array]) -> dict[str, Array]:
    joined = params["experts.gate_up_proj"]
    return {
        "gate.weight": params["gate.weight"],
        "switch_mlp.gate_proj.weight": joined[:, :WIDTH],
        "switch_mlp.up_proj.weight": joined[:, WIDTH:],
        "switch_mlp.down_proj.weight": params["experts.down_proj"],
    }


def taken_apart(params: Mapping[str, Array]) -> dict[str, Array]:
    """As an alignment with another stack has it."""
    joined = params["experts.gate_up_proj"]
    parts = {"gate_proj": joined[:, :WIDTH], "up_proj": joined[:, WIDTH:]}
    return {**params, **{f"experts.gate_up_proj[{n}]": part for n, part in parts.items()}}


def configuration(normalised: bool = True, count: int = CHOSEN) -> dict[str, Any]:
    return {"config.num_experts_per_tok": count, "config.norm_topk_prob": normalised}


def in_torch(x: Array, params: Mapping[str, Array], normalised: bool, dtype: Any) -> Array:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=normalised,
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config).to(dtype)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            parameter.copy_(torch.from_numpy(params[name]))
        out = block(torch.from_numpy(x).to(dtype))
    return np.asarray(out.to(torch.float64 if dtype == torch.float64 else torch.float32).numpy())


def in_mlx(x: Array, params: Mapping[str, Array], normalised: bool) -> Array:
    names = mlx_qwen3_moe.ModelArgs.__dataclass_fields__
    known: dict[str, Any] = dict.fromkeys(names, 1) | {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "norm_topk_prob": normalised,
    }
    block = mlx_qwen3_moe.Qwen3MoeSparseMoeBlock(mlx_qwen3_moe.ModelArgs(**known))
    block.load_weights([(n, mx.array(np.ascontiguousarray(a))) for n, a in params.items()])
    return np.array(block(mx.array(x)))


NORMALISED = pytest.mark.parametrize("normalised", [True, False])


# ---- the formula --------------------------------------------------------------------------------


@NORMALISED
@pytest.mark.parametrize("named", [dict, as_in_mlx, taken_apart])
def test_the_formula_agrees_with_transformers_in_float64(named: Any, normalised: bool) -> None:
    params = weights()
    found = replay(OP, X, named(params), **configuration(normalised))
    exact = in_torch(X, params, normalised, torch.float64)
    np.testing.assert_allclose(found.value, exact, atol=1e-6)  # its softmax is in float32
    assert np.linalg.norm(found.value - exact) <= 1e-7 * np.linalg.norm(exact)


@NORMALISED
@pytest.mark.parametrize("seed", [1, 11, 21])
@pytest.mark.parametrize(
    ("stack", "narrow"),
    [("pytorch", False), ("pytorch", True), ("mlx", False)],  # MLX's CPU knows no narrow experts
)
def test_what_stacks_compute_is_within_rounding(
    stack: str, narrow: bool, seed: int, normalised: bool
) -> None:
    params, x = weights(seed), array(4, 64, HIDDEN, seed=seed + 5)
    if narrow:
        cut = lambda a: a.astype(ml_dtypes.bfloat16).astype(np.float32)  # noqa: E731
        params, x = {name: cut(a) for name, a in params.items()}, cut(x)
    if stack == "pytorch":
        out = in_torch(x, params, normalised, torch.bfloat16 if narrow else torch.float32)
    else:
        out = in_mlx(x, as_in_mlx(params), normalised)
    dtype_name = "bfloat16" if narrow else "float32"
    found = replay(OP, x, params, dtype_name, **configuration(normalised))
    assert side(out, found).excess < 0.8
    wrong = out * np.float32(1.05 if narrow else 1.0001)
    assert not side(wrong, found).holds


def test_a_choice_that_rounding_may_turn_is_left_open() -> None:
    """Two experts of one logit: either may be chosen, and no other one."""
    params = weights()
    params["gate.weight"][1] = params["gate.weight"][0]
    row = params["gate.weight"][0] * 4  # both are the likeliest, and only one is chosen
    x = np.repeat(row[None, None], 3, axis=1)
    found = replay(OP, x, params, **configuration(count=1))
    outputs = []
    for expert in range(EXPERTS):
        gate, up = np.split(params["experts.gate_up_proj"][expert].astype(np.float64) @ row, 2)
        hidden = gate / (1 + np.exp(-gate)) * up
        outputs.append(params["experts.down_proj"][expert] @ hidden)
    holding = [side(np.broadcast_to(out, x.shape), found).holds for out in outputs]
    assert holding == [True, True] + [False] * (EXPERTS - 2)


@pytest.mark.parametrize(
    ("params", "settings"),
    [
        ({"shared_expert.up_proj.weight": array(WIDTH, HIDDEN)}, {}),
        ({"experts.gate_up_proj[gate_proj]": array(EXPERTS, WIDTH, HIDDEN)}, {}),
        ({"experts.down_proj": array(EXPERTS, HIDDEN, WIDTH + 1)}, {}),
        ({}, {"config.hidden_act": "gelu"}),
        ({}, {"config.num_experts_per_tok": None}),
        ({}, {"config.norm_topk_prob": None}),
    ],
)
def test_what_is_not_known_is_not_recomputed(
    params: dict[str, Array], settings: dict[str, Any]
) -> None:
    call = Call(
        op=OP,
        inputs={"in": X},
        params=weights() | params,
        settings=configuration() | settings,
    )
    assert REFERENCE.replay(call) is None


# ---- verdicts -----------------------------------------------------------------------------------


def sides(x: Array, params: Mapping[str, Array], out: Array, **settings: Any) -> dict[str, Any]:
    configured = configuration() | settings
    return {"op": OP, "x": x, "params": params, "settings": configured, "out": out}


@pytest.mark.parametrize("factor", [None, 1.0001, 1.01])
@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("other", [dict, as_in_mlx])
def test_a_factor_is_named_with_its_side(
    tmp_path: Path, factor: float | None, wrong: int, other: Any
) -> None:
    params = weights()
    outs = [in_torch(X, params, True, torch.float32)]
    if other is dict:
        outs.append(in_torch(NUDGED, params, True, torch.float32))
    else:
        outs.append(in_mlx(NUDGED, other(params), True))
    stack = "pytorch" if other is dict else "mlx"
    if factor is not None:
        outs[wrong] = outs[wrong] * np.float32(factor)
    target = sides(NUDGED, other(params), outs[1]) | {"stack": stack}
    verdict = judge(tmp_path, sides(X, params, outs[0]), target)
    if factor is None:
        assert verdict.outcome == "equivalent"
    else:
        assert divergence(verdict).blame == ("baseline", "target")[wrong]


def test_experts_of_another_count_are_each_sides_own(tmp_path: Path) -> None:
    params = weights()
    x = array(*SHAPE, seed=3)
    outs = [
        replay(OP, x, params, **configuration(count=count)).value.astype(np.float32)
        for count in (CHOSEN, CHOSEN - 1)
    ]
    counts = ({}, {"config.num_experts_per_tok": CHOSEN - 1})
    given = [sides(x, params, out, **count) for out, count in zip(outs, counts, strict=True)]
    assert divergence(judge(tmp_path, *given)).blame == "undecided"


# ---- parameters that an alignment takes apart ---------------------------------------------------


def test_a_parameter_whose_parts_were_updated_is_no_longer_known_whole() -> None:
    def event(phase: str, path: str, view: View | None = None) -> Event:
        site = Site(step=0, phase=phase, path=path, call=0, port="param")
        return Event(order=0, site=site, kind="tensor", view=view)

    name = "mlp.experts.gate_up_proj"
    whole = event("loading", name)
    parts = [event("loading", f"{name}[{part}]", View(whole, np.asarray)) for part in "ab"]
    memory = Memory()
    memory.begin([whole, *parts])
    assert set(memory.params("mlp.experts")) == {f"gate_up_proj{p}" for p in ("", "[a]", "[b]")}
    updated = event("optimizer", name)
    parts = [event("optimizer", f"{name}[{part}]", View(updated, np.asarray)) for part in "ab"]
    memory.finish(parts)
    assert set(memory.params("mlp.experts")) == {"gate_up_proj[a]", "gate_up_proj[b]"}
    assert memory.params("mlp.experts")["gate_up_proj[a]"] is parts[0]
