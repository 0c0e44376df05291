"""`python -m benchmarks.overhead`: what recording costs where fixed costs rule.

A tiny Qwen3 (hidden 256, four layers, 2.6 million parameters), a batch of 2 x 64 tokens, forward
and backward on PyTorch with one thread. Processor time per step, bare and recorded in turns within
one process, so that the ratios hold on a busy machine; the least of the rounds counts.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import tracediff
from tracediff.trace import Trace


def job() -> Callable[[], None]:
    """One step of training without an optimizer."""
    torch.manual_seed(0)
    config: Any = Qwen3Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    # Another batch each step: a value that was there in the step before is not summarised again.
    batches = itertools.cycle(torch.randint(0, 1024, (64, 2, 64)))

    def step() -> None:
        ids = next(batches)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    return step


def seconds(step: Callable[[], None], steps: int) -> float:
    """Processor time per step."""
    began = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    step = job()
    seconds(step, 5)
    best: dict[str, float] = {}
    sizes: dict[str, str] = {"bare": ""}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            best["bare"] = min(best.get("bare", 1e9), seconds(step, given.steps))
            for level in ("digest", "module"):
                path = Path(folder) / f"{level}{number}.zarr"
                with tracediff.record(path, stack="pytorch", level=level):
                    seconds(step, 4)  # the first steps also keep sketches
                    best[level] = min(best.get(level, 1e9), seconds(step, given.steps))
                with Trace(path) as trace:
                    last = trace.steps[-2]
                    size = trace.index(last).segment_bytes
                    sizes[level] = f"{len(trace.events(last))} events, {size / 1e6:.2f} MB a step"
    for name, cost in best.items():
        print(f"{name:8s} {cost * 1e3:8.1f} ms  {cost / best['bare']:6.2f}  {sizes[name]}")


if __name__ == "__main__":
    main()
