"""Faults of the loss, the backward pass, the optimizer and the learning curve."""

from __future__ import annotations

from typing import Any

from benchmarks.faults.job import Batch
from benchmarks.faults.planted.common import L1, fault
from benchmarks.faults.plants import (
    add,
    after_step,
    both,
    gradient,
    input_gradient,
    output,
    put,
    stopped,
)

# ---- loss ---------------------------------------------------------------------------------------

fault(
    "labels not shifted",
    {"tt": "loss/loss.cross_entropy:in", "tm": "loss/loss*:*"},
    put("loss.shift", 0),
)
fault(
    "labels shifted by two",
    {"tt": "loss/loss.cross_entropy:in", "tm": "loss/loss*:*"},
    put("loss.shift", 2),
)
fault(
    "mean over all positions",
    "loss/loss:out",
    put("loss.denominator", "elements"),
    common=put("loss.fused", False),
    dtypes="float32 bfloat16",
    source="D01",
)
fault(
    "sum divided by rows",
    "loss/loss:out",
    put("loss.denominator", "rows"),
    common=put("loss.fused", False),
    source="E01",
)
fault(
    "label smoothing",
    "loss/loss.cross_entropy:out loss/loss:out",
    put("loss.smoothing", 0.1),
    pairs="tt tm mm",
)
fault(
    "loss divided by the world size twice",
    "loss/loss:out",
    put("loss.scale", 0.5),
    dtypes="float32 bfloat16",
    source="E05",
)
fault("loss times 1.0001", "loss/loss:out", put("loss.scale", 1.0001))

# ---- backward -----------------------------------------------------------------------------------

fault(
    "gradient through one mlp times 1.01",
    {
        "tt": f"backward/{L1}.mlp.*:grad_out backward/{L1}.post_attention_layernorm:grad_out",
        "tm": f"backward/{L1}.post_attention_layernorm:grad_out "
        f"backward/{L1}.post_attention_layernorm.weight:grad",
        "mm": f"backward/{L1}.post_attention_layernorm*:grad*",
    },
    input_gradient(f"{L1}.mlp", 1.01),
    pairs="tt tm mm",
)
fault(
    "gradient through a down projection times 1.01",
    {
        "tt": f"backward/{L1}.mlp.*:grad*",
        "tm": f"backward/{L1}.mlp.*:grad*",
        "mm": f"backward/{L1}.mlp.*:grad*",
    },
    input_gradient(f"{L1}.mlp.down_proj", 1.01),
    pairs="tt tm mm",
)
fault(
    "gradient through one mlp doubled",
    f"backward/{L1}.post_attention_layernorm*:grad*",
    input_gradient(f"{L1}.mlp", 2.0),
    dtypes="bfloat16",
)
fault(
    "values cut off from the backward pass",
    f"backward/{L1}.self_attn.v_proj*:grad*",
    output(f"{L1}.self_attn.v_proj", stopped),
    source="D16",
)
fault(
    "one gradient is zero",
    "optimizer/model.layers.0.mlp.up_proj.weight:grad backward/*layers.0.mlp.up_proj.weight:grad",
    gradient("layers.0.mlp.up_proj.weight", lambda g: g * 0),
    common=put("optimizer.clip", None),
    source="D16",
)
fault(
    "gradient of the head doubled",
    "optimizer/lm_head.weight:grad backward/lm_head.weight:grad",
    gradient("lm_head.weight", lambda g: g * 2),
    common=put("optimizer.clip", None),
)
fault(
    "gradients negated in the second step",
    "optimizer/model.norm.weight:grad backward/model.norm.weight:grad",
    gradient("model.norm.weight", lambda g: -g, step=1),
    common=put("optimizer.clip", None),
    step=1,
)

# ---- optimizer ----------------------------------------------------------------------------------


def _state_lost(runner: Any, step: int) -> None:
    if step == 0:
        runner.optimizer.state.clear()


def _moments_swapped(runner: Any, step: int) -> None:
    if step == 0:
        model = runner.model.model
        a, b = (runner.optimizer.state[m.self_attn.k_proj.weight] for m in model.layers[:2])
        a["exp_avg"], b["exp_avg"] = b["exp_avg"], a["exp_avg"]


FIRST = "optimizer/model.embed_tokens.weight"

fault(
    "learning rate times 1.1",
    f"{FIRST}:hyper optimizer/*:hyper",
    put("optimizer.lr", 1.1e-3),
    pairs="tt tm mm",
    dtypes="float32 bfloat16",
)
fault("epsilon of Adam 1e-5", "optimizer/*:hyper", put("optimizer.eps", 1e-5))
fault("second beta 0.95", "optimizer/*:hyper", put("optimizer.betas", (0.9, 0.95)))
fault("weight decay off", "optimizer/*:hyper", put("optimizer.weight_decay", 0.0))
fault(
    "bias correction off",
    "optimizer/*:hyper",
    put("optimizer.bias_correction", False),
    pairs="tm mm",
    source="D",
)
fault(
    "Adam with coupled weight decay",
    "optimizer/*:hyper optimizer/*:state.exp_avg optimizer/*:update",
    put("optimizer.kind", "Adam"),
    pairs="tt",
    common=put("optimizer.weight_decay", 0.1),
)
fault(
    "schedule one step early",
    "optimizer/*:hyper",
    put("optimizer.schedule", lambda step: 1 / (step + 2)),
    common=put("optimizer.schedule", lambda step: 1 / (step + 1)),
)
fault(
    "schedule wrong from the second step on",
    "optimizer/*:hyper",
    put("optimizer.schedule", lambda step: 0.5 if step else 1.0),
    step=1,
)
fault(
    "no clipping",
    "optimizer/clip_grad_norm:out optimizer/*:grad",
    put("optimizer.clip", None),
    common=put("optimizer.clip", 0.1),
)
fault(
    "clipped to another norm",
    "optimizer/clip_grad_norm:out optimizer/*:grad",
    put("optimizer.clip", 0.2),
    common=put("optimizer.clip", 0.1),
)
fault(
    "each gradient clipped by itself",
    "optimizer/clip_grad_norm:out",
    put("optimizer.clip_each", True),
    pairs="tt",
    common=put("optimizer.clip", 0.1),
)
fault(
    "one parameter is not updated",
    "optimizer/clip_grad_norm:out optimizer/*v_proj.weight:*",
    put("optimizer.frozen", ("layers.0.self_attn.v_proj",)),
    pairs="tt",
)
fault(
    "norms without weight decay",
    "optimizer/*norm.weight:hyper",
    put("optimizer.no_decay", lambda name: "norm" in name),
    pairs="tt",
    source="D05",
)
fault(
    "gradients not zeroed",
    "optimizer/*:grad optimizer/clip_grad_norm:out",
    put("optimizer.zero_grad", False),
    pairs="tt",
    step=1,
)
fault(
    "optimizer state lost after a step",
    "optimizer/*:hyper optimizer/*:state.exp_avg",
    add("stepped", _state_lost),
    pairs="tt",
    step=1,
)
fault(
    "first moments of two parameters swapped",
    "optimizer/model.layers.0.self_attn.k_proj.weight:state.exp_avg",
    add("stepped", _moments_swapped),
    pairs="tt",
    step=1,
    source="D12",
)
fault(
    "weight changed behind the optimizer",
    f"forward/{L1}.mlp.down_proj:out",
    after_step(f"{L1}.mlp.down_proj.weight", 1.01),
    step=1,
)
fault(
    "SGD without momentum",
    "optimizer/*:hyper optimizer/*:state.momentum_buffer optimizer/*:update",
    put("optimizer.momentum", 0.0),
    common=both(put("optimizer.kind", "SGD"), put("optimizer.momentum", 0.9)),
    step=0,
)

# ---- trajectory ---------------------------------------------------------------------------------


def _other_heldout(batches: list[Batch]) -> None:
    batches[3] = batches[2]


# The evaluation after the last update is part of step 2 in both runs.
fault(
    "one step more",
    "trajectory/step:out forward/root:in rendering/batch.input_ids:out",
    put("steps", 3),
    step=2,
)
fault(
    "other held-out batch",
    "rendering/eval_batch.input_ids:out trajectory/*:*",
    add("rendering.collated", _other_heldout),
    step=2,
)
