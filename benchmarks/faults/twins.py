"""The clean twins: two runs of one job that differ in ways that must stay silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.faults.case import Registry
from benchmarks.faults.job import Batch, Job, Lora
from benchmarks.faults.plants import add, both, find, output, put, replace_call

REGISTRY = Registry()
twin = REGISTRY.twin

ALL = "llama mistral qwen3 qwen3_moe gpt2"
BOTH = "float32 bfloat16"


def _other_pads(batches: list[Batch]) -> None:
    for batch in batches:
        batch["input_ids"][batch["attention_mask"] == 0] = 7


def _rms_norm(module: Any, x: Any, y: Any) -> Any:
    """As fused kernels have it: one scale for each element, from a sum of squares."""
    wide = x.float()
    squares = torch.einsum("...i,...i->...", wide, wide)[..., None] / x.shape[-1]
    scale = module.weight.float() / torch.sqrt(squares + module.variance_epsilon)
    return (wide * scale).to(x.dtype)


def _one_matrix(original: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    """Gate and up projection in one matrix product."""
    mlp = getattr(original, "__self__", None)
    assert mlp is not None
    joined = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    gate, up = F.linear(x, joined).chunk(2, -1)
    result: torch.Tensor = mlp.down_proj(mlp.act_fn(gate) * up)
    return result


def _split_product(module: Any, x: Any, y: Any) -> Any:
    """A projection summed in two halves of its input."""
    half = x.shape[-1] // 2
    w = module.weight
    return F.linear(x[..., :half], w[:, :half]) + F.linear(x[..., half:], w[:, half:])


def _kv_heads_swapped(weights: dict[str, Any]) -> None:
    """Both key-value heads of layer 1 and their queries change places, everywhere alike."""
    stem = "model.layers.1.self_attn."
    for name, size in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)):
        array = weights[f"{stem}{name}.weight"]
        weights[f"{stem}{name}.weight"] = array.reshape(2, size, -1)[::-1].reshape(array.shape)
    array = weights[f"{stem}o_proj.weight"]
    weights[f"{stem}o_proj.weight"] = array.reshape(-1, 2, 16)[:, ::-1].reshape(array.shape)


def _positions_shifted(model: Any) -> None:
    """Positions from 5 on: rotary scores depend on differences of positions only."""

    def run(original: Callable[..., Any], x: Any, position_ids: Any) -> Any:
        return original(x, position_ids + 5)

    replace_call(find(model, "model.rotary_emb"), run)


def _interleaved(job: Job) -> None:
    """Queries and keys as a rotary embedding of neighbouring elements wants them, and that one."""

    def weights(weights: dict[str, Any]) -> None:
        for name, array in weights.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                halves = array.reshape(-1, 2, 4, array.shape[-1])
                weights[name] = halves.swapaxes(1, 2).reshape(array.shape)

    def model(model: Any) -> None:
        for layer in model.layers:
            layer.self_attn.rope.traditional = True

    job.weights.append(weights)
    job.built.append(model)


def _units_reordered(weights: dict[str, Any]) -> None:
    """The hidden units of one MLP in another order, in all three of its matrices."""
    stem = "model.layers.0.mlp."
    order = np.random.default_rng(6).permutation(48)
    for name in ("gate_proj", "up_proj"):
        weights[f"{stem}{name}.weight"] = weights[f"{stem}{name}.weight"][order]
    weights[f"{stem}down_proj.weight"] = weights[f"{stem}down_proj.weight"][:, order].copy()


def _left_padded(batches: list[Batch]) -> None:
    for batch in batches:
        for row, mask in enumerate(batch["attention_mask"].copy()):
            for name in batch:
                batch[name][row] = np.roll(batch[name][row], int((mask == 0).sum()))


def _reversed_rows(batches: list[Batch]) -> None:
    for batch in batches:
        for name in batch:
            batch[name] = batch[name][::-1].copy()


def _strided(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.T.contiguous().T


def _built(edit: Callable[[Any], Any]) -> Any:
    return add("built", edit)


twin("recorded twice", pairs="tt mm", families="llama qwen3 gpt2", dtypes=BOTH, same=True)
twin("recorded twice", families="qwen3_moe mistral", same=True)
twin("eager against SDPA", put("attention", "sdpa"), families=ALL, dtypes=BOTH)
twin("PyTorch against MLX", pairs="tm", families=ALL, dtypes=BOTH)
twin("MLX against PyTorch", pairs="mt", families="llama gpt2", dtypes=BOTH)
twin("PyTorch with SDPA against MLX", pairs="mt", families="llama", common=put("attention", "sdpa"))
twin("one thread against two", put("threads", 1), families="gpt2", common=put("threads", 2))
twin("one thread against two", put("threads", 1), common=put("threads", 2), same=True)
twin("torch.compile", put("compiled", True), families="llama gpt2", same=True)
twin("gradient checkpointing", put("checkpointed", True), same=True)
twin(
    "Adam fused",
    put("optimizer.implementation", {"fused": True}),
    dtypes=BOTH,
)
twin(
    "Adam parameter by parameter",
    put("optimizer.implementation", {"foreach": False}),
    common=put("optimizer.implementation", {"foreach": True}),
    dtypes=BOTH,
    same=True,
)
twin("loss by hand", put("loss.fused", False), dtypes=BOTH)
twin("loss in bfloat16 on MLX", pairs="tm", dtypes="bfloat16", common=put("loss.upcast", False))
twin("other padding token", add("rendering.collated", _other_pads), pairs="tt tm")
twin("padded further", put("rendering.pad_to", 24), pairs="tt tm mm", dtypes=BOTH)
twin("padded further", put("rendering.pad_to", 24), pairs="tt", families="gpt2 qwen3_moe")
twin(
    "padded further, on the left",
    put("rendering.pad_to", 24),
    common=add("rendering.collated", _left_padded),
)
twin("another seed, nothing drawn", put("seed", 1), pairs="tt mm")
twin("NumPy's generator drawn from", add("seeded", lambda: __import__("numpy").random.rand(3)))
twin("fused RMSNorm", output("model.layers.0.input_layernorm", _rms_norm), dtypes=BOTH)
twin(
    "projection summed in halves", output("model.layers.0.mlp.up_proj", _split_product), dtypes=BOTH
)
twin(
    "gate and up in one product",
    _built(lambda m: replace_call(find(m, "model.layers.0.mlp"), _one_matrix)),
)
twin("interleaved rotary embedding", _interleaved, pairs="tm mm")
twin("hidden units relabelled", add("weights", _units_reordered), pairs="tt tm", dtypes=BOTH)
twin("key-value heads relabelled", add("weights", _kv_heads_swapped), pairs="tt tm")
twin("positions shifted alike", _built(_positions_shifted), dtypes=BOTH)
twin("rows in another order", add("rendering.collated", _reversed_rows), pairs="tt tm mm")
twin(
    "weights in another memory layout",
    _built(_strided),
    dtypes=BOTH,
    common=both(put("config.hidden_size", 128), put("config.intermediate_size", 200)),
)
twin("adapter", pairs="tm", common=put("lora", Lora()), dtypes=BOTH)
twin("adapter, eager against SDPA", put("attention", "sdpa"), common=put("lora", Lora()))
twin("micro-batches", pairs="tm", common=put("accumulate", 2), dtypes=BOTH)
twin(
    "micro-batches averaged after their sum",
    put("averaged_late", True),
    pairs="tt tm",
    common=put("accumulate", 2),
)
twin(
    "loss summed in another order",
    put("loss.reversed_sum", True),
    common=put("loss.fused", False),
    dtypes=BOTH,
)
twin(
    "SGD with momentum",
    pairs="tm",
    common=both(put("optimizer.kind", "SGD"), put("optimizer.momentum", 0.9)),
)
twin(
    "Adam without weight decay",
    pairs="tm",
    common=both(put("optimizer.kind", "Adam"), put("optimizer.weight_decay", 0.0)),
)
twin("twelve steps", pairs="tm", common=put("steps", 12))
twin(
    "deep, eager against SDPA",
    put("attention", "sdpa"),
    common=put("config.num_hidden_layers", 24),
    dtypes="bfloat16",
)
twin("deep", pairs="tm", common=put("config.num_hidden_layers", 24), dtypes="bfloat16")
