"""Tiny models with random weights, the same on both stacks: transformers and mlx-lm classes."""

from __future__ import annotations

import hashlib
import importlib
import json
import tempfile
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx.utils import tree_flatten
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import load_file

Weights = dict[str, NDArray[Any]]

VOCABULARY = 200

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"rms_norm_eps": 1e-5},
    "mistral": _COMMON | {"rms_norm_eps": 1e-5, "head_dim": 8, "sliding_window": None},
    "qwen3": _COMMON | {"rms_norm_eps": 1e-6, "head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": _COMMON
    | {
        "rms_norm_eps": 1e-6,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_ctx": 64,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "num_key_value_heads": 4,
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gpt2": "GPT2",
}
_MLX_MODULES = {"mistral": "llama"}  # as mlx-lm maps it


def _resolved(family: str, config: dict[str, Any], **extra: Any) -> Any:
    settings = {key: value for key, value in config.items() if key != "rope_theta"}
    if "rope_theta" in config:
        settings["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": config["rope_theta"],
        }
    return getattr(transformers, f"{_CLASSES[family]}Config")(**settings, **extra)


def build_pytorch(family: str, config: dict[str, Any], attention: str = "eager") -> Any:
    """A transformers model with its own random weights, in float32."""
    name = _CLASSES[family]
    resolved = _resolved(family, config, attn_implementation=attention)
    suffix = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    return getattr(transformers, name + suffix)(resolved)


def build_mlx(family: str, config: dict[str, Any]) -> Any:
    """An mlx-lm model with its own random weights, in float32."""
    module = importlib.import_module(f"mlx_lm.models.{_MLX_MODULES.get(family, family)}")
    settings = {key: value for key, value in config.items() if value is not None}
    return module.Model(module.ModelArgs.from_dict({"model_type": family} | settings))


@lru_cache(maxsize=32)
def _initial(family: str, config: tuple[tuple[str, Any], ...]) -> Weights:
    generator = np.random.default_rng(7)
    settings = {k: list(v) if k == "mlp_only_layers" else v for k, v in config}
    with torch.random.fork_rng():  # a run must not notice whether these were cached
        model = build_pytorch(family, settings)
    weights = {}
    for name, parameter in model.named_parameters():
        noise = generator.standard_normal(tuple(parameter.shape))
        if parameter.ndim == 1:
            values = noise * 0.1 + (1.0 if name.endswith("weight") else 0.0)
        elif "embed" in name or "wte" in name:
            values = noise * 0.5
        else:
            values = noise * 0.2
        weights[name] = values.astype(np.float32)
    return weights


def initial_weights(family: str, config: dict[str, Any]) -> Weights:
    """Random float32 weights by their transformers names: every norm, bias and matrix non-trivial.

    Large enough that attention is far from uniform and each fault shows.
    """
    key = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in config.items())
    return {name: array.copy() for name, array in _initial(family, key).items()}


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Of the checkpoints that all runs of this process load from."""
    return tempfile.TemporaryDirectory(prefix="tracediff-faults-")


def checkpoint(family: str, config: dict[str, Any]) -> Path:
    """A folder with `model.safetensors` and `config.json`, as a model is published."""
    settings = json.dumps(config, sort_keys=True)
    name = f"{family}-{hashlib.sha1(settings.encode()).hexdigest()[:12]}"
    folder = Path(_folder().name) / name
    if not folder.exists():
        folder.mkdir()
        arrays = _separate_experts(initial_weights(family, config))
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, _weights_of(folder))
        _resolved(family, config).save_pretrained(folder)
    return folder


def _weights_of(folder: Path) -> Path:
    return folder / "model.safetensors"


def load_checkpoint(folder: Path, stack: str) -> Weights:
    """The weights of a checkpoint by their transformers names, read as a script of the stack would
    read them, for a run to edit."""
    path = str(_weights_of(folder))
    loaded: dict[str, Any] = load_file(path) if stack == "pytorch" else mx.load(path)
    return _fused_experts({name: np.array(array) for name, array in loaded.items()})


def adapter(arrays: Weights, stack: str) -> dict[str, Any]:
    """The weights of an adapter, written to a file of their own and read again by the stack."""
    key = hashlib.sha1(repr([(n, a.shape) for n, a in arrays.items()]).encode()).hexdigest()[:12]
    path = Path(_folder().name) / f"adapter-{key}.safetensors"
    save_file(arrays, path)
    loaded: dict[str, Any] = load_file(path) if stack == "pytorch" else mx.load(str(path))
    return loaded


def load_pytorch(model: Any, weights: Weights, dtype: str) -> None:
    """Copies weights into a transformers model, cast to `dtype` as a loader would."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, array in weights.items():
            if name in parameters:
                parameters[name].copy_(torch.from_numpy(np.array(array)))
    if dtype != "float32":
        for parameter in parameters.values():
            parameter.data = parameter.data.to(getattr(torch, dtype))


def load_mlx(model: Any, weights: Weights, dtype: str, family: str) -> None:
    """Copies weights into an mlx-lm model through its own `sanitize`."""
    if family == "gpt2":
        weights = {name.removeprefix("transformer."): array for name, array in weights.items()}
    weights = _separate_experts(weights)
    arrays = {name: mx.array(np.ascontiguousarray(array)) for name, array in weights.items()}
    arrays = {name: array.astype(getattr(mx, dtype)) for name, array in arrays.items()}
    known = {name for name, _ in tree_flatten(model.parameters())}
    found = [(k, v) for k, v in model.sanitize(arrays).items() if k in known]
    model.load_weights(found, strict=False)
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())


def _separate_experts(weights: Weights) -> Weights:
    """The fused experts of transformers under the names of the checkpoint, which mlx-lm reads."""
    separate: Weights = {}
    for name, array in weights.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            half = array.shape[1] // 2
            for index, expert in enumerate(array):
                separate[f"{stem}.{index}.gate_proj.weight"] = expert[:half]
                separate[f"{stem}.{index}.up_proj.weight"] = expert[half:]
        elif last == "down_proj" and stem.endswith("experts"):
            for index, expert in enumerate(array):
                separate[f"{stem}.{index}.down_proj.weight"] = expert
        else:
            separate[name] = array
    return separate


def _fused_experts(weights: Weights) -> Weights:
    """The experts of a checkpoint as transformers' modules hold them."""
    fused: Weights = {}
    experts: dict[str, dict[str, list[NDArray[Any]]]] = defaultdict(lambda: defaultdict(list))
    for name, array in sorted(weights.items()):  # fewer than ten experts
        stem, _, rest = name.partition(".experts.")
        if not rest:
            fused[name] = array
            continue
        experts[f"{stem}.experts"][rest.split(".")[1]].append(array)
    for stem, parts in experts.items():
        pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        gate_up = [np.concatenate(pair) for pair in pairs]
        fused[f"{stem}.gate_up_proj"] = np.stack(gate_up)
        fused[f"{stem}.down_proj"] = np.stack(parts["down_proj"])
    return fused
