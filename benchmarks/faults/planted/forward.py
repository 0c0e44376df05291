"""Faults of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from transformers.models.llama import modeling_llama

from benchmarks.faults.job import Lora
from benchmarks.faults.planted.common import DROPOUT, L1, LORA, fault
from benchmarks.faults.plants import (
    add,
    attribute,
    find,
    one_element,
    output,
    put,
    replace_call,
    scaled,
)


def _without_mask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Attention that sees the future: mlx-lm passes (x, mask, cache), transformers keywords."""
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = torch.zeros_like(kwargs["attention_mask"])
        return original(*args, **kwargs)
    return original(args[0], None, *args[2:], **kwargs)


def _tiled(hidden: torch.Tensor, repeats: int) -> torch.Tensor:
    """Key-value heads as (0, 1, 0, 1) where (0, 0, 1, 1) is meant."""
    return hidden.repeat(1, repeats, 1, 1)


def _summed_in_bfloat16(module: Any, x: Any, y: Any) -> Any:
    """RMSNorm whose sum of squares runs in bfloat16."""
    torch_side = isinstance(x, torch.Tensor)
    low = torch.bfloat16 if torch_side else mx.bfloat16
    cast: Callable[[Any, Any], Any] = lambda a, d: a.to(d) if torch_side else a.astype(d)  # noqa: E731
    total = cast(x[..., 0] * 0, low)
    for i in range(x.shape[-1]):
        total = cast(total + cast(x[..., i] * x[..., i], low), low)
    wide = torch.float32 if torch_side else mx.float32
    mean = cast(total, wide) / x.shape[-1]
    eps = module.variance_epsilon if torch_side else module.eps
    normed = cast(x, wide) * ((mean + eps) ** -0.5)[..., None]
    return module.weight * cast(normed, x.dtype)


def _capped(module: Any, x: Any, y: Any) -> Any:
    return 30 * (torch.tanh(y / 30) if isinstance(y, torch.Tensor) else mx.tanh(y / 30))


def _later(module: Any, x: Any, y: Any) -> Any:
    """Wrong at the last position only."""
    bump = np.ones((1, y.shape[1], 1), np.float32)
    bump[:, -4:] = 1.02
    if isinstance(y, torch.Tensor):
        return y * torch.tensor(bump, dtype=y.dtype)
    return y * mx.array(bump).astype(y.dtype)


fault(
    "attention scale times 1.05",
    f"forward/{L1}.self_attn.o_proj:in forward/{L1}.self_attn:out",
    attribute(f"{L1}.self_attn", "scaling|scale", lambda s: s * 1.05),
    families="llama qwen3",
    dtypes="float32 bfloat16",
)
fault(
    "attention scale times 1.05",
    "forward/transformer.h.1.attn.c_proj:in forward/transformer.h.1.attn:out*",
    attribute("transformer.h.1.attn", "scaling", lambda s: s * 1.05),
    pairs="tt",
    families="gpt2",
)
fault(
    "attention scale not applied",
    "forward/model.layers.0.self_attn.o_proj:in",
    attribute("model.layers.0.self_attn", "scaling|scale", lambda s: 1.0),
    families="mistral",
    dtypes="float32 bfloat16",
)
fault(
    "epsilon of the norms 1e-3",
    "forward/model.layers.0.input_layernorm:out",
    put("config.rms_norm_eps", 1e-3),
    pairs="tt tm mm",
)
fault(
    "epsilon of the layer norms 1e-3",
    "forward/transformer.h.0.ln_1:out",
    put("config.layer_norm_epsilon", 1e-3),
    families="gpt2",
)
fault(
    "rotary base 500000",
    {
        "tt": "loading/model.rotary_emb.inv_freq:buffer",
        "tm": "forward/model.layers.0.self_attn.rope:out",
        "mm": "forward/model.layers.0.self_attn.rope:out",
    },
    put("config.rope_theta", 500000.0),
    pairs="tt tm mm",
    dtypes="float32 bfloat16",
    source="B01",
)
fault(
    "rotary pairs interleaved",
    "forward/model.layers.0.self_attn.rope:out",
    add(
        "built",
        lambda model: [
            setattr(layer.self_attn.rope, "traditional", True) for layer in model.layers
        ],
    ),
    pairs="tm mm",
    families="llama qwen3",
    source="B03",
)
fault(
    "other activation",
    {"tt": "forward/model.layers.0.mlp.act_fn:out"},
    put("config.hidden_act", "gelu"),
    pairs="tt",
)
fault(
    "gelu with erf instead of tanh",
    "forward/transformer.h.0.mlp.act:out",
    put("config.activation_function", "gelu"),
    pairs="tt",
    families="gpt2",
    dtypes="float32 bfloat16",
    source="C04",
)
fault(
    "gelu with erf instead of tanh",
    "forward/transformer.h.0.mlp.c_proj:in",
    put("config.activation_function", "gelu"),
    pairs="tm",
    side="baseline",
    families="gpt2",
    source="C04",
)
fault(
    "mlp output times 1.01",
    f"forward/{L1}.mlp:out",
    output(f"{L1}.mlp", scaled(1.01)),
    families="llama qwen3_moe",
)
fault(
    "mlp output times 1.05",
    f"forward/{L1}.mlp:out",
    output(f"{L1}.mlp", scaled(1.05)),
    dtypes="bfloat16",
)
fault(
    "block output times 0.99",
    "forward/model.layers.0:out",
    output("model.layers.0", scaled(0.99)),
)
fault(
    "causal mask missing",
    "forward/model.layers.0.self_attn.o_proj:in",
    add(
        "built", lambda model: replace_call(find(model, "model.layers.0.self_attn"), _without_mask)
    ),
    dtypes="float32 bfloat16",
    source="C05",
)
fault(
    "sliding window on one side",
    "forward/model.layers.0*:in.attention_mask forward/model.layers.0.self_attn.o_proj:in",
    put("config.sliding_window", 4),
    pairs="tt",
    families="mistral",
)
fault(
    "sum of squares of one norm in bfloat16",
    f"forward/{L1}.input_layernorm:out",
    output(f"{L1}.input_layernorm", _summed_in_bfloat16),
    dtypes="float32 bfloat16",
    source="C03",
)
fault(
    "sum of squares of one norm of 24 layers in bfloat16",
    "forward/model.layers.12.input_layernorm:out",
    output("model.layers.12.input_layernorm", _summed_in_bfloat16),
    pairs="tm",
    dtypes="bfloat16",
    common=put("config.num_hidden_layers", 24),
    source="C03",
)
fault(
    "embeddings scaled",
    "forward/model.embed_tokens:out",
    output("model.embed_tokens", scaled(32**0.5)),
)
fault("logits capped", "forward/lm_head:out", output("lm_head", _capped), source="B21")
fault(
    "query norm left out",
    "forward/model.layers.0.self_attn.q_norm:out",
    output("model.layers.0.self_attn.q_norm", lambda module, x, y: x),
    families="qwen3 qwen3_moe",
)
fault(
    "final norm applied twice",
    "forward/model.norm:out",
    output("model.norm", lambda module, x, y: y * module.weight),
)
fault(
    "key-value heads tiled instead of repeated",
    "forward/model.layers.0.self_attn.o_proj:in",
    lambda job: job.patches.append((modeling_llama, "repeat_kv", _tiled)),
    pairs="tt",
)
fault(
    "one element of an activation off",
    f"forward/{L1}.mlp.down_proj:out",
    output(f"{L1}.mlp.down_proj", one_element((0, 2, 3), 0.05)),
)
fault(
    "value projection times 1.001",
    "forward/model.layers.0.self_attn.v_proj:out",
    output("model.layers.0.self_attn.v_proj", scaled(1.001)),
)
fault(
    "later positions of a projection times 1.02",
    f"forward/{L1}.self_attn.o_proj:out",
    output(f"{L1}.self_attn.o_proj", _later),
)
fault(
    "mlp wrong from the second step on",
    f"forward/{L1}.mlp.up_proj:out",
    output(f"{L1}.mlp.up_proj", scaled(1.01), from_step=1),
    step=1,
)
fault(
    "routing weights not normalised",
    {"tt": "forward/model.layers.0.mlp.gate:out*", "tm": "forward/model.layers.0.mlp:out"},
    put("config.norm_topk_prob", False),
    families="qwen3_moe",
)
fault(
    "one expert per token",
    {"tt": "forward/model.layers.0.mlp.gate:out*", "tm": "forward/model.layers.0.mlp:out"},
    put("config.num_experts_per_tok", 1),
    families="qwen3_moe",
)
fault(
    "adapter scaled by alpha",
    "forward/*layers.0.self_attn.q_proj:out",
    put("lora", Lora(alpha=32.0)),
    common=LORA,
    dtypes="float32 bfloat16",
    source="B12",
)
fault(
    "rank-stabilised adapter",
    "forward/*layers.0.self_attn.q_proj:out",
    put("lora", Lora(rslora=True)),
    common=LORA,
    source="B13",
)
fault(
    "dropout rate 0.3",
    "forward/*layers.0.self_attn.q_proj.lora_dropout*:out",
    put("lora", Lora(dropout=0.3)),
    pairs="tt",
    common=DROPOUT,
)
fault(
    "dropout off",
    {
        "tt": "forward/*layers.0.self_attn.q_proj.lora_dropout*:out",
        "mm": "forward/*layers.0.self_attn.q_proj.dropout:out",
    },
    put("lora", Lora(dropout=0.0)),
    pairs="tt mm",
    common=DROPOUT,
    source="D15",
)
