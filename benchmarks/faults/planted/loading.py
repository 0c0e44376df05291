"""Faults of the weights as loaded, and of the random generators."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import torch

from benchmarks.faults.planted.common import DROPOUT, L1, LORA, fault
from benchmarks.faults.plants import (
    add,
    both,
    element,
    find,
    noise_like,
    output,
    put,
    scaled,
    weight,
)

# ---- loading ------------------------------------------------------------------------------------


def _layers_swapped(weights: dict[str, Any]) -> None:
    for name in [key for key in weights if ".layers.0." in key]:
        other = name.replace(".layers.0.", ".layers.1.")
        weights[name], weights[other] = weights[other], weights[name]


def _interleaved(array: Any) -> Any:
    """Rows of each head from half-split to pair order, as a converter that forgot to undo it."""
    heads = array.reshape(-1, 2, 4, array.shape[1])
    return heads.transpose(0, 2, 1, 3).reshape(array.shape)


def _bfloat16(array: Any) -> Any:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def _rounded_frequencies(model: Any) -> None:
    rotary = find(model, "model.rotary_emb")
    rotary.inv_freq.copy_(rotary.inv_freq.to(torch.bfloat16).float())


fault(
    "square matrix transposed",
    f"loading/{L1}.self_attn.q_proj.weight:param",
    weight("layers.1.self_attn.q_proj.weight", np.transpose),
    dtypes="float32 bfloat16",
    source="B11",
)
fault(
    "square Conv1D transposed",
    {
        "tt": "loading/transformer.h.0.attn.c_proj.weight:param",
        "tm": "loading/transformer.h.0.attn.c_proj.weight:param",
    },
    weight("h.0.attn.c_proj.weight", np.transpose),
    families="gpt2",
    source="B11",
)
fault(
    "key rows permuted",
    f"loading/{L1}.self_attn.k_proj.weight:param",
    weight("layers.1.self_attn.k_proj.weight", _interleaved),
    families="llama mistral",
    source="B02",
)
fault(
    "one weight of one matrix off by 0.05",
    f"loading/{L1}.mlp.down_proj.weight:param",
    weight("layers.1.mlp.down_proj.weight", element((3, 5), 0.05)),
    families="llama qwen3",
    dtypes="float32 bfloat16",
)
fault(
    "output head not loaded",
    "loading/lm_head.weight:param",
    weight("lm_head.weight", noise_like),
    source="B04",
)
fault("layers swapped", "loading/model.layers.0.*:param", add("weights", _layers_swapped))
fault(
    "norm weights left at one",
    "loading/model.norm.weight:param",
    weight("model.norm.weight", np.ones_like),
    source="B05",
)
fault(
    "norm weights plus one",
    "loading/model.layers.0.input_layernorm.weight:param",
    weight("layers.0.input_layernorm.weight", lambda a: a + 1),
    source="C01",
)
fault(
    "weights rounded to bfloat16 on the way",
    "loading/model.embed_tokens.weight:param",
    weight("weight", _bfloat16),
    source="B17",
)
fault(
    "scale of a quantised matrix lost",
    f"loading/{L1}.self_attn.v_proj.weight:param",
    weight("layers.1.self_attn.v_proj.weight", lambda a: a * 1.375),
    dtypes="float32 bfloat16",
    source="B18",
)
fault(
    "row of an unused token zero",
    "loading/model.embed_tokens.weight:param",
    weight("embed_tokens.weight", lambda a: np.where(np.arange(200)[:, None] == 7, 0, a)),
)
fault(
    "bias not loaded",
    "loading/transformer.h.1.attn.c_attn.bias:param",
    weight("h.1.attn.c_attn.bias", np.zeros_like),
    families="gpt2",
)
fault(
    "experts in another order",
    {
        "tt": "loading/model.layers.0.mlp.experts.*:param",
        "tm": "loading/model.layers.0.mlp.*:param",
    },
    both(
        weight("layers.0.mlp.experts.gate_up_proj", lambda a: a[[1, 0, 2, 3]]),
        weight("layers.0.mlp.experts.down_proj", lambda a: a[[1, 0, 2, 3]]),
    ),
    families="qwen3_moe",
)
fault(
    "one expert not loaded",
    {
        "tt": "loading/model.layers.1.mlp.experts.down_proj:param",
        "tm": "loading/model.layers.1.mlp.*:param",
    },
    weight("layers.1.mlp.experts.down_proj", lambda a: np.concatenate([a[:3], 0 * a[3:]])),
    families="qwen3_moe",
)
fault(
    "layer missing",
    "loading/model.layers.1.*:param",
    put("config.num_hidden_layers", 1),
    source="B10",
)
fault(
    "inverse frequencies rounded to bfloat16",
    {"tt": "loading/model.rotary_emb.inv_freq:buffer", "tm": "forward/model.*rope:out"},
    add("built", _rounded_frequencies),
    pairs="tt",
    source="B08",
)
fault(
    "inverse frequencies rounded to bfloat16",
    "forward/model.layers.0.self_attn.rope:out",
    add("built", _rounded_frequencies),
    pairs="tm",
    side="baseline",
    source="B08",
)
fault(
    "head untied",
    "loading/lm_head.weight:param",
    put("config.tie_word_embeddings", False),
    pairs="tt",
    families="qwen3",
    source="B04",
)
fault(
    "adapter B left at zero",
    "loading/*layers.0.self_attn.q_proj.lora_B*:param",
    add(
        "built",
        lambda model: [
            array.zero_() if isinstance(array, torch.Tensor) else None
            for name, array in _lora_b(model)
        ],
    ),
    pairs="tt",
    common=LORA,
    source="B16",
)


def _lora_b(model: Any) -> list[tuple[str, Any]]:
    return [(name, p.data) for name, p in model.named_parameters() if "lora_B" in name]


# ---- rng ----------------------------------------------------------------------------------------

fault(
    "another seed, dropout active",
    "rng/*:state",
    put("seed", 1),
    pairs="tt mm",
    common=DROPOUT,
    source="F12",
)
fault(
    "one more draw before training",
    "rng/*:state",
    add("built", lambda model: torch.rand(1)),
    pairs="tt",
    common=DROPOUT,
    source="D11",
)
fault(
    "one more draw before training",
    "rng/mlx:state",
    add("built", lambda model: mx.eval(mx.random.uniform())),
    pairs="mm",
    common=DROPOUT,
    source="D11",
)
fault(
    "generator reseeded after a step",
    "rng/*:state",
    add("stepped", lambda runner, step: torch.manual_seed(0)),
    pairs="tt",
    common=DROPOUT,
    step=1,
    source="D11",
)

fault(
    "mlp output times 1.01, other state of an idle generator",
    f"forward/{L1}.mlp:out",
    both(put("seed", 1), output(f"{L1}.mlp", scaled(1.01))),
    pairs="tt mm",
)
fault(
    "learning rate times 1.1, other state of an idle generator",
    "optimizer/*:hyper",
    both(put("seed", 1), put("optimizer.lr", 1.1e-3)),
    pairs="tt",
)
