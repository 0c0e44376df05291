"""`python -m benchmarks.overhead`: what recording costs.

`--job tiny`: a tiny Qwen3 (hidden 256, four layers, 2.9 million parameters), a batch of 2 x 64
tokens, forward and backward: fixed costs rule. `--job llama`: a Llama (hidden 512, eight layers,
vocabulary 8192), a batch of 4 x 256 tokens, forward, backward and AdamW. `--job events`: a hundred
modules in a row on 16 numbers, so that nothing but the fixed cost of an event is left. On PyTorch,
with one thread unless `--threads` says more, or, with `--stack mlx`, the twin of each on MLX.

Every kind of recording is measured in turns with the bare job, in one process. A ratio is the
median of the ratios of the rounds, each to the bare job of its round, so that it holds where the
machine is not always as fast. Times are those of the processor (`times`), of all threads, until
the last step ends and until everything is written (`flushed`); `clock` is the same ratio by the
clock, which means something on an idle machine only.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

import tracediff
from tracediff.trace import Trace

Step = Callable[[], Any]

KINDS: Final[dict[str, dict[str, Any]]] = {
    "bare": {},
    "digest": {"level": "digest"},
    "module": {"level": "module"},
    "module, buffer": {"level": "module", "max_buffer": "1G"},
    "op-digest": {"level": "op-digest"},
    "op": {"level": "op"},
}

TINY: Final = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
LLAMA: Final = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
SHAPES: Final = {"tiny": (2, 64), "llama": (4, 256)}


def batches(name: str) -> Any:
    """Another batch each step: a value that was there the step before is not summarised again."""
    vocabulary = (TINY if name == "tiny" else LLAMA)["vocab_size"]
    return np.random.default_rng(0).integers(0, vocabulary, (64, *SHAPES[name]))


def pytorch_job(name: str, threads: int) -> Step:
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if name == "events":
        chain = torch.nn.Sequential(
            *(torch.nn.Softplus() for _ in range(100)), torch.nn.Linear(16, 1)
        )
        x = torch.linspace(-1, 1, 16, requires_grad=True)
        return lambda: chain(x).sum().backward()
    model: Any
    if name == "tiny":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if name == "llama" else None
    given = itertools.cycle(torch.tensor(batches(name)))

    def step() -> None:
        ids = next(given)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        if optimizer is not None:
            optimizer.step()

    return step


def mlx_job(name: str) -> Step:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx_lm.models import llama, qwen3

    mx.random.seed(0)
    model: Any
    if name == "events":
        model = nn.Sequential(*(nn.Softplus() for _ in range(100)), nn.Linear(16, 1))
        x = mx.linspace(-1, 1, 16)
        function = nn.value_and_grad(model, lambda model, x: model(x).sum())
        return lambda: mx.eval(function(model, x))
    if name == "tiny":
        rope = {"rope_theta": 1e4, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}
        model = qwen3.Model(qwen3.ModelArgs(model_type="qwen3", **TINY, **rope))
    else:
        model = llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, **LLAMA))
    optimizer = optim.AdamW(1e-4) if name == "llama" else None
    given = itertools.cycle(map(mx.array, batches(name)))
    gradient = nn.value_and_grad(
        model, lambda model, ids: nn.losses.cross_entropy(model(ids), ids, reduction="mean")
    )

    def step() -> None:
        loss, grads = gradient(model, next(given))
        if optimizer is not None:
            optimizer.update(model, grads)
            mx.eval(model.parameters(), optimizer.state)
        mx.eval(loss, grads)

    return step


@dataclass
class Cost:
    """Seconds per step, and what a step leaves behind."""

    processor: float
    flushed: float
    clock: float
    events: int = 0
    stored: int = 0
    values: int = 0
    peak: float = 0.0


def measure(step: Step, stack: str, options: dict[str, Any], warm: int, steps: int) -> Cost:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as recording:
        path = Path(folder) / "run.zarr"
        if options:
            recording.enter_context(tracediff.record(path, stack=stack, **options))
        for _ in range(warm if options else 1):  # the first steps also keep sketches
            step()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        began, clock = time.process_time(), time.perf_counter()
        for _ in range(steps):
            step()
        ended, clock = time.process_time(), time.perf_counter() - clock
        recording.close()
        flushed = time.process_time()
        cost = Cost((ended - began) / steps, (flushed - began) / steps, clock / steps)
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        cost.peak = int(status["VmHWM"].split()[0]) / 1024
        if options:
            with Trace(path) as trace:
                last = trace.steps[-2]
                cost.events = len(trace.events(last))
                cost.stored = trace.index(last).segment_bytes
                cost.values = sum(map(size_of, trace.events(last)))
        return cost


def size_of(event: Any) -> int:
    known = np.prod(event.shape) if event.dtype else 0
    return int(known) * (2 if "16" in event.dtype else 8 if "64" in event.dtype else 4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--job", choices=["tiny", "llama", "events"], default="tiny")
    parser.add_argument("--stack", choices=["pytorch", "mlx"], default="pytorch")
    parser.add_argument("--kinds", help=f"of {', '.join(KINDS)}; separated by semicolons")
    parser.add_argument("--steps", type=int, default=10, help="steps of each measurement")
    parser.add_argument("--warm", type=int, default=4, help="steps before it")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind")
    given = parser.parse_args()
    kinds = list(KINDS) if given.kinds is None else ["bare", *given.kinds.split(";")]
    on_mlx = given.stack == "mlx"
    step = mlx_job(given.job) if on_mlx else pytorch_job(given.job, given.threads)
    step()
    rounds: list[dict[str, Cost]] = []
    for _ in range(given.rounds):
        costs = {name: measure(step, given.stack, KINDS[name], given.warm, given.steps)
                 for name in kinds}  # fmt: skip
        rounds.append(costs)
    print("| recorded | ms a step | times | flushed | clock | events | us an event "
          "| MB a step | stored | peak MB |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in kinds:
        print("|", " | ".join(row(name, [(r[name], r["bare"]) for r in rounds])), "|", flush=True)


def row(name: str, rounds: list[tuple[Cost, Cost]]) -> list[str]:
    """A line of the table, from the costs and those of the bare job in each round."""
    cost = rounds[-1][0]
    times = [median(c.processor / bare.processor for c, bare in rounds),
             median(c.flushed / bare.processor for c, bare in rounds),
             median(c.clock / bare.clock for c, bare in rounds)]  # fmt: skip
    found = [name, f"{median(c.processor for c, _ in rounds) * 1e3:.0f}"]
    found += [f"{ratio:.2f}" for ratio in times]
    if cost.events:
        extra = median(c.flushed - bare.processor for c, bare in rounds) / cost.events
        found += [str(cost.events), f"{extra * 1e6:.0f}", f"{cost.stored / 1e6:.2f}"]
        found += [f"{cost.stored / cost.values:.3f}" if cost.values else ""]
    else:
        found += [""] * 4
    return [*found, f"{cost.peak:.0f}"]


if __name__ == "__main__":
    main()
