"""The planted faults: what is changed on one side, and the site that a verdict has to name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import torch
from transformers.models.llama import modeling_llama

from benchmarks.faults.case import Registry
from benchmarks.faults.job import IGNORED, TEMPLATE, Batch, Lora
from benchmarks.faults.plants import (
    add,
    after_step,
    attribute,
    both,
    element,
    find,
    gradient,
    input_gradient,
    noise_like,
    one_element,
    output,
    put,
    replace_call,
    scaled,
    stopped,
    weight,
)

REGISTRY = Registry()
fault = REGISTRY.fault

LORA = put("lora", Lora())
L1 = "model.layers.1"


# ---- rendering ----------------------------------------------------------------------------------

OWN_LABELS = put("own_labels", True)


def _every_batch(edit: Callable[[Batch], None]) -> Callable[[list[Batch]], None]:
    def change(batches: list[Batch]) -> None:
        for batch in batches:
            edit(batch)

    return change


def _mask_of_ones(batch: Batch) -> None:
    batch["attention_mask"][:] = 1


def _left_padded(batch: Batch) -> None:
    for name, array in batch.items():
        lengths = batch["attention_mask"].sum(1) if name != "attention_mask" else array.sum(1)
        for row, length in zip(array, lengths, strict=True):
            row[:] = np.roll(row, len(row) - int(length))


def _shifted_labels(batch: Batch) -> None:
    batch["labels"][:, :-1] = batch["labels"][:, 1:].copy()
    batch["labels"][:, -1] = IGNORED


def _pads_trained(batch: Batch) -> None:
    batch["labels"][batch["attention_mask"] == 0] = 0


def _swapped(batches: list[Batch]) -> None:
    batches[0], batches[1] = batches[1], batches[0]


def _row_twice(batches: list[Batch]) -> None:
    for array in batches[1].values():
        array[1] = array[0]


fault(
    "bos added twice",
    "rendering/sample[0].ids:out",
    put("rendering.add_special_tokens", True),
    pairs="tt tm mm",
    source="A01",
)
fault(
    "template without end of turn",
    "rendering/sample[0].template:out",
    put("rendering.template", TEMPLATE.replace(" <end>", "")),
    source="A04",
)
fault(
    "template drops the system message",
    "rendering/sample[0].template:out",
    put("rendering.template", TEMPLATE.replace("in messages", "in messages[1:]")),
    source="A06",
)
fault(
    "trailing space trimmed",
    "rendering/sample[0].text:out",
    add("rendering.changed", str.rstrip),
    source="A03",
)
fault(
    "last token of a sample lost",
    "rendering/batch.input_ids:out",
    add("rendering.encoded", lambda ids, index: ids[:-1] if index == 1 else ids),
)
fault(
    "one token replaced, third batch",
    "rendering/batch.input_ids:out",
    both(
        put("steps", 3),
        add("rendering.encoded", lambda ids, i: [*ids[:-3], 9, *ids[-2:]] if i == 5 else ids),
    ),
    common=put("steps", 3),
    step=2,
)
fault(
    "truncated too short",
    "rendering/batch.input_ids:out rendering/batch.labels:out",
    put("rendering.max_length", 10),
)
fault(
    "labels shifted twice",
    "rendering/batch.labels:out",
    add("rendering.collated", _every_batch(_shifted_labels)),
    common=OWN_LABELS,
    source="A",
)
fault(
    "prompt trained as well",
    "rendering/batch.labels:out",
    put("rendering.train_on_prompt", True),
    common=OWN_LABELS,
)
fault(
    "padding trained",
    "rendering/batch.labels:out",
    add("rendering.collated", _every_batch(_pads_trained)),
    common=OWN_LABELS,
)
fault(
    "prompt trained as well, labels seen by the loss only",
    {"tt": "loss/loss.cross_entropy:labels", "tm": "loss/loss:out rendering/batch.labels:out"},
    put("rendering.train_on_prompt", True),
)
fault(
    "padding attended to",
    "rendering/batch.attention_mask:out",
    add("rendering.collated", _every_batch(_mask_of_ones)),
    pairs="tt",
)
fault(
    "padded on the left",
    "rendering/batch.input_ids:out rendering/batch.attention_mask:out",
    add("rendering.collated", _every_batch(_left_padded)),
)
fault(
    "batches in another order",
    "rendering/batch.input_ids:out rendering/batch.inputs:out",
    add("rendering.collated", _swapped),
    pairs="tt tm mm",
    source="D14",
)
fault(
    "one sample twice in a batch",
    "rendering/batch.input_ids:out",
    add("rendering.collated", _row_twice),
    step=1,
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

DROPOUT = put("lora", Lora(dropout=0.2))

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

# ---- forward ------------------------------------------------------------------------------------


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
