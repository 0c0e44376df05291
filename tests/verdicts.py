"""Verdicts with something in every field, and a hostile one; shared by the tests."""

from __future__ import annotations

from dataclasses import replace

from tracediff.verdict import (
    Bound,
    Cost,
    Deviation,
    Divergence,
    ErrorFigures,
    Neighbour,
    StageResult,
    Unmatched,
    Verdict,
)

ATTENTION = "0/forward/model.layers.0.self_attn#0:out"
LONG_SITE = "0/forward/" + ".".join(f"block_{i}" for i in range(40)) + ".q_proj#0:out"
HOSTILE = "[bold red]x[/]\x1b[2J\x07\r\n<script>alert(1)</script>\u202e&amp;\ud800"

FIRST = Divergence(
    stage="forward",
    step=0,
    site=ATTENTION,
    path="model.layers.0.self_attn",
    port="out",
    op={"baseline": "LlamaAttention", "target": "Attention"},
    kind="value",
    pattern="scaled",
    detail={"factor": 4.0},
    meaning="The rotary embedding turns at another speed.",
    blame="target",
    error=ErrorFigures(max_abs=1.25, rel_l2=0.125, max_rel=3.5, max_ulp=1234, differing=0.5),
    bound=Bound(rel_l2=2.5e-6, derivation="matmul K=512 float32"),
    where={"baseline": "train.py:41", "target": "train_mlx.py:38"},
    shapes={"baseline": (1, 9, 64), "target": (1, 9, 64)},
    deviations=(Deviation(index=(0, 7, 3), baseline=1.5, target=-2.25),),
    settings=(("model.rope_theta", 100000.0, 10000.0),),
)

DIVERGED = Verdict(
    outcome="diverged",
    reason="model.rope_theta is 100000 on one side and 10000 on the other.",
    baseline="runs/pytorch.zarr",
    target="runs/mlx.zarr",
    first=FIRST,
    last_agreeing="0/forward/model.layers.0.input_layernorm#0:out",
    stages=(
        StageResult(stage="environment", outcome="equivalent", compared=31, differing=7),
        StageResult(stage="rendering", outcome="identical", compared=12),
        StageResult(stage="rng", outcome="not exercised", reason="no generator was used"),
        StageResult(
            stage="forward",
            outcome="diverged",
            compared=1412,
            differing=300,
            diverged=1,
            unmatched=(5, 3),
            worst=0.125,
        ),
        StageResult(stage="loss", outcome="incomparable", reason="nothing to compare"),
    ),
    coverage=0.987,
    matched_by={"name": 400, "alias": 12},
    unmatched=(Unmatched(side="baseline", example="0/x#0:out", count=5, reason="no module"),),
    neighbours=(
        Neighbour(
            site="0/forward/norm#0:out", op="RMSNorm", mark="equivalent", error=1e-7, bound=1e-6
        ),
        Neighbour(site=ATTENTION, op="LlamaAttention", mark="diverged", error=0.125, bound=2.5e-6),
        Neighbour(site="0/forward/mlp#0:out", op="MLP", mark="diverged", error=0.2, bound=2.5e-6),
    ),
    environment=tuple((f"version.package{i}", "1.0", "2.0") for i in range(9)),
    trajectory=tuple((step, "loss", 2.5, 2.75) for step in range(20)),
    warnings=("the target was cut off at step 3",),
    next_command="tracediff show runs/pytorch.zarr " + ATTENTION,
    cost=Cost(bytes_read=10, events=400, seconds=1.25),
)

TEXT = replace(
    FIRST,
    stage="rendering",
    site="0/rendering/sample[17].text",
    path="sample[17].text",
    kind="text",
    pattern="newline",
    bound=None,
    settings=(),
    deviations=(),
    detail={
        "index": 16,
        "baseline_context": "Take 5 mg daily.\n\nUser: what dose of\u00a0ibuprofen?",
        "target_context": "Take 5 mg daily.\nUser: what dose of\u00a0ibuprofen?",
    },
)


def hostile_verdict() -> Verdict:
    first = replace(
        FIRST,
        site=HOSTILE,
        target_site=HOSTILE + "!",
        meaning=HOSTILE,
        pattern=HOSTILE,
        op={"baseline": HOSTILE, "target": HOSTILE},
        where={"baseline": HOSTILE, "target": "x"},
        detail={HOSTILE: HOSTILE, "baseline_context": HOSTILE, "target_context": HOSTILE + "\x1b"},
        settings=((HOSTILE, HOSTILE, [HOSTILE]),),
        bound=Bound(rel_l2=1e-6, derivation=HOSTILE),
        deviations=(Deviation(index=(0,), baseline=HOSTILE, target=float("nan")),),
    )
    return replace(
        DIVERGED,
        reason=HOSTILE,
        baseline=HOSTILE,
        target=HOSTILE,
        first=first,
        also=(first,),
        stages=(StageResult(stage=HOSTILE, outcome=HOSTILE, compared=1, reason=HOSTILE),),
        neighbours=(Neighbour(site=HOSTILE, op=HOSTILE, mark="diverged", error=1.0, bound=1.0),),
        environment=((HOSTILE, HOSTILE, {HOSTILE: HOSTILE}),),
        trajectory=((0, HOSTILE, 1.0, float("inf")),),
        unmatched=(Unmatched(side=HOSTILE, example=HOSTILE, count=1, reason=HOSTILE),),
        matched_by={HOSTILE: 1},
        warnings=(HOSTILE,),
        next_command=HOSTILE,
    )
