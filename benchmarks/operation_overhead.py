"""`python -m benchmarks.operation_overhead`: what recording every operation costs.

A LoRA fine-tune of a Llama of SmolLM2's widths (random weights, four layers), on both stacks:
without a recorder, at level `module`, at level `op`, and at level `op` inside one module only.
Times are those of the processor, so that other processes on the machine count little.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import numpy as np

from tracediff.session import record
from tracediff.trace import Trace

STEPS: Final = 3
BATCH, SEQUENCE = 2, 64
SHAPE: Final = {
    "vocab_size": 8192,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
ONLY: Final = {
    "pytorch": "base_model.model.model.layers.2.mlp",
    "mlx": "model.layers.2.mlp",
}

Step = Callable[[], Any]


def pytorch_step() -> Step:
    """A function that makes one training step on PyTorch."""
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.tensor(_ids())

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def mlx_step() -> Step:
    """A function that makes one training step on MLX."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx_lm.models.llama import Model, ModelArgs
    from mlx_lm.tuner.utils import linear_to_lora_layers

    mx.random.seed(0)
    model: Any = Model(ModelArgs(model_type="llama", rms_norm_eps=1e-5, **SHAPE))
    model.freeze()
    config = {"rank": 8, "scale": 1.0, "dropout": 0.0}
    linear_to_lora_layers(model, 4, config | {"keys": ["self_attn.q_proj", "self_attn.v_proj"]})
    optimizer = optim.AdamW(1e-3)
    ids = mx.array(_ids())

    def loss(model: Any, ids: Any) -> Any:
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="mean")

    gradient = nn.value_and_grad(model, loss)

    def step() -> None:
        _, grads = gradient(model, ids)
        optimizer.update(model, grads)
        mx.eval(model.trainable_parameters(), optimizer.state)

    return step


def _ids() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (BATCH, SEQUENCE))


def measure(stack: str, step: Step, options: dict[str, Any] | None) -> tuple[float, float, float]:
    """Processor seconds, events and megabytes per step; the first step is left out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.zarr"
        with record(path, stack=stack, **options) if options is not None else nullcontext():
            step()
            started = time.process_time()
            for _ in range(STEPS):
                step()
            seconds = (time.process_time() - started) / STEPS
        if options is None:
            return seconds, 0.0, 0.0
        with Trace(path) as trace:
            steps = trace.steps[1 : 1 + STEPS]
            events = sum(len(trace.events(number)) for number in steps) / STEPS
            return seconds, events, trace.bytes_stored / len(trace.steps) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stack", choices=["pytorch", "mlx"], action="append")
    stacks = parser.parse_args().stack or ["pytorch", "mlx"]
    print("| stack | recorder | CPU s/step | times | events/step | MB/step |")
    print("|---|---|---|---|---|---|")
    for stack in stacks:
        step = pytorch_step() if stack == "pytorch" else mlx_step()
        step()
        plain = min(measure(stack, step, None)[0] for _ in range(2))
        print(f"| {stack} | none | {plain:.2f} | 1.0 | | |", flush=True)
        for name, options in {
            "`module`": {"level": "module"},
            "`op`": {"level": "op"},
            "`op`, one module": {"level": "op", "only": ONLY[stack]},
            "`op`, one module, other step": {"level": "op", "only": ONLY[stack], "steps": "99"},
        }.items():
            seconds, events, size = measure(stack, step, options)
            times = seconds / plain
            print(
                f"| {stack} | {name} | {seconds:.2f} | {times:.1f} | {events:.0f} | {size:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
