"""The job that every tool records: a tiny Llama, and its rewrite with a fault."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
import transformers

BLOCK: Final = 2
FACTOR: Final = 1.01


def model(faulty: bool) -> Any:
    """The tiny Llama, as it is or as rewritten with the fault."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        attn_implementation="sdpa" if faulty else "eager",
    )
    made = transformers.LlamaForCausalLM(config)
    if faulty:
        # In the forward itself: what a hook changes is not seen by tools whose hooks run earlier.
        mlp = made.model.layers[BLOCK].mlp
        forward = mlp.forward
        mlp.forward = lambda hidden: forward(hidden) * FACTOR
    return made


def batch() -> Any:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 512, (2, 64)))


def step(made: Any, ids: Any) -> None:
    loss = made(input_ids=ids, labels=ids).loss
    if loss.requires_grad:  # transformers' context records the forward pass alone
        loss.backward()
    made.zero_grad()
