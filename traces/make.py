"""Makes the two golden traces: the same tiny fine-tune on PyTorch and, drifted, on MLX.

The model is a two-layer Llama with random weights. The MLX side is built with the rotary base that
mlx-lm takes when a configuration does not have it at the top level, 10000 instead of 100000.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import torch
from mlx_lm.models.llama import Model, ModelArgs
from transformers import LlamaConfig, LlamaForCausalLM

import tracediff

HERE = Path(__file__).resolve().parent
STEPS = 2
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def batches() -> list[np.ndarray]:
    """One batch (2, 12) of token IDs per step."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, SIZES["vocab_size"], size=(2, 12)) for _ in range(STEPS)]


def train_pytorch(trace: Path) -> dict[str, np.ndarray]:
    """Trains and records the baseline; returns the weights that it started from."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 100000.0})
    model = LlamaForCausalLM(config)
    weights = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **ADAM)
    with tracediff.record(trace, stack="pytorch", overwrite=True, argv=["make.py"]):
        for ids in batches():
            input_ids = torch.tensor(ids)
            model(input_ids=input_ids, labels=input_ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights


def train_mlx(trace: Path, weights: dict[str, np.ndarray]) -> None:
    """Trains and records the target from the same weights."""
    model = Model(ModelArgs(model_type="llama", **SIZES))
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    optimizer = optim.AdamW(1e-3, bias_correction=True, **ADAM)

    def loss_fn(model: nn.Module, input_ids: mx.array) -> mx.array:
        logits = model(input_ids)[:, :-1]
        return nn.losses.cross_entropy(logits, input_ids[:, 1:], reduction="mean")

    step = nn.value_and_grad(model, loss_fn)
    with tracediff.record(trace, stack="mlx", overwrite=True, argv=["make.py"]):
        for ids in batches():
            _, grads = step(model, mx.array(ids))
            optimizer.update(model, grads)
            mx.eval(model.parameters(), optimizer.state)


if __name__ == "__main__":
    train_mlx(HERE / "drifted.zarr", train_pytorch(HERE / "clean.zarr"))
