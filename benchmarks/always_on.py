"""The size of an always-on trace of a Llama of 8 layers, and a fault between two sparse steps.

    python -m benchmarks.always_on [--steps 1000] [--width 512] [--rows 4] [--length 256]
        [--fault 642] [--folder DIR]

Trains at level `digest`, with all settings at their defaults, and prints what a step takes. With
`--fault`, trains twice more with one module that is 1% off in that step only: once bit-equal until
there, once with attention by other kernels, so that all values differ by rounding. Prints which
step `bisect` names.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import tracediff
from benchmarks.overhead import LLAMA
from tracediff.bisection import bisect
from tracediff.trace import Trace

SPARSE = 100
"""Every so many steps all events keep a sketch."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.always_on", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--width", type=int, default=512, help="of the model")
    parser.add_argument("--rows", type=int, default=4, help="of a batch")
    parser.add_argument("--length", type=int, default=256, help="of a sequence")
    parser.add_argument("--fault", type=int, help="step of the fault; by default there is none")
    parser.add_argument("--folder", type=Path, help="where to write the traces")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        first = Path(folder) / "a.zarr"
        train(first, given)
        tell_size(first)
        if given.fault is None:
            return
        named = [
            find(first, Path(folder) / f"{eager}.zarr", given, eager) for eager in (False, True)
        ]
    sys.exit(named != [given.fault] * 2)


def find(first: Path, second: Path, given: Any, eager: bool) -> int | None:
    """Records a run with the fault; returns the step that is named."""
    train(second, given, fault=given.fault, eager=eager)
    started = time.process_time()
    verdict = bisect(first, second)
    seconds, cost = time.process_time() - started, verdict.cost
    print(f"\n{'other kernels' if eager else 'the same kernels'}: {verdict.reason}")
    print(
        f"{cost.bytes_read / 1e6:.2f} MB of {cost.bytes_stored / 1e6:.1f} MB read, in "
        f"{seconds:.1f} s of processor time",
        flush=True,
    )
    shutil.rmtree(second)
    return verdict.first.step if verdict.first else None


def train(path: Path, given: Any, fault: int = -1, *, eager: bool = False) -> None:
    """Records the training of a Llama, one of whose modules is 1% off at a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    scale = given.width / LLAMA["hidden_size"]
    sizes = {name: int(LLAMA[name] * scale) for name in ("hidden_size", "intermediate_size")}
    config = transformers.LlamaConfig(
        **LLAMA | sizes, attn_implementation="eager" if eager else "sdpa"
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    factor = [1.0]
    layer = model.model.layers[3].mlp
    layer.register_forward_hook(lambda module, given, output: output * factor[0])
    batches = torch.Generator().manual_seed(1)
    with tracediff.record(path, stack="pytorch", level="digest", sketch_every=SPARSE):
        for step in range(given.steps):
            factor[0] = 1.01 if step == fault else 1.0
            shape = given.rows, given.length
            ids = torch.randint(0, LLAMA["vocab_size"], shape, generator=batches)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def tell_size(path: Path) -> None:
    """Prints the mean size of a step and its index, and of the two kinds of steps."""
    with Trace(path) as trace:
        steps = trace.steps
    sizes = dict.fromkeys(steps, 0)
    index = 0
    for part, file in _files(path):
        size = file.stat().st_size
        sizes[int(file.stem)] += size
        index += size * (part == "index")
    whole = [sizes[s] for s in steps if s < 3 or s % SPARSE == 0]
    others = [sizes[s] for s in steps if s and not (s < 3 or s % SPARSE == 0)]
    print(
        f"{len(steps):,} steps, {sum(sizes.values()) / len(steps) / 1e3:.1f} KB each, "
        f"{index / len(steps) / 1e3:.1f} of them the index; {_mean(whole):.0f} KB with all "
        f"sketches ({len(whole)} steps), {_mean(others):.1f} KB others",
        flush=True,
    )


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    for part in ("segments", "index"):
        for file in (path / part / "0").iterdir():
            yield part, file


def _mean(sizes: list[int]) -> float:
    return sum(sizes) / max(1, len(sizes)) / 1e3


if __name__ == "__main__":
    main()
