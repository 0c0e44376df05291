"""One training step of the first layers of SmolLM2-135M, with its real weights, on either stack.

Its vocabulary is cut to the first rows, and the attention alone is trained: what is recorded is in
proportion to the weights. `examples/clinical_lora/prepare.py` fetches the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import torch
import torch.nn.functional as F
from mlx_lm.models import llama
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

MODEL: Final = Path(__file__).parents[1] / "examples/clinical_lora/build/model"
VOCABULARY: Final = 2048
TRAINED: Final = "self_attn"
OPTIMIZER: Final[dict[str, Any]] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
RATE: Final = 1e-3


def run(stack: str, layers: int, attention: str = "eager") -> None:
    """Trains for one step on two rows of 24 tokens."""
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "vocab_size": VOCABULARY}
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"]}  # where mlx-lm looks for it
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (2, 24))
    (_mlx if stack == "mlx" else _pytorch)(config, _weights(layers), ids, attention)


def _weights(layers: int) -> dict[str, Any]:
    """The first layers, by the names that both stacks give them."""
    with safe_open(MODEL / "model.safetensors", "numpy") as file:
        names = file.keys()
        own = [name for name in names if _layer(name) < layers and "lm_head" not in name]
        slices = {name: file.get_slice(name) for name in own}
        return {name: s[: min(VOCABULARY, s.get_shape()[0])] for name, s in slices.items()}


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def _pytorch(config: dict[str, Any], weights: dict[str, Any], ids: Any, attention: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation=attention))
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    model.load_state_dict(tensors, strict=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, **OPTIMIZER)
    tokens = torch.from_numpy(ids)
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1)).backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()


def _mlx(config: dict[str, Any], weights: dict[str, Any], ids: Any, attention: str) -> None:
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.load_weights([(name, mx.array(array)) for name, array in weights.items()])
    model.freeze()
    for layer in model.layers:
        layer.self_attn.unfreeze()
    optimizer = optim.AdamW(RATE, bias_correction=True, **OPTIMIZER)
    tokens = mx.array(ids)

    def loss(model: Any) -> mx.array:
        logits = model(tokens)[:, :-1]
        return nn.losses.cross_entropy(logits, tokens[:, 1:]).mean()

    _, grads = nn.value_and_grad(model, loss)(model)
    grads, _ = optim.clip_grad_norm(grads, 1.0)
    optimizer.update(model, grads)
    mx.eval(model.parameters(), optimizer.state)
