"""`python -m benchmarks.comparing`: how long comparing two small traces takes, start-up included.

One forward and backward of the tiny Qwen3 of `benchmarks.overhead` on PyTorch, recorded at the
levels `digest` and `module`, as it is and three times more: again (every value equal), with the
formula of attention in place of its fused kernel (values apart by rounding), and with the output of
one block's MLP 1% too large (a fault: every value after it differs). Each command then runs in
fresh processes; the median counts, by the clock and in processor
time, which says more on a busy machine. `--keep DIR` keeps the traces.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.overhead import TINY, batches

BLOCK: Final = 2
FACTOR: Final = 1.01
LEVELS: Final = ("digest", "module")
TARGETS: Final = ("equal", "rounding", "fault")


def record(folder: Path) -> None:
    """The baseline and the three targets, at both levels."""
    import torch
    import transformers

    import tracediff

    torch.set_num_threads(1)
    ids = torch.tensor(batches("tiny")[0])
    for kind in ("baseline", *TARGETS):
        torch.manual_seed(0)
        model: Any = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                **TINY, attn_implementation="eager" if kind == "rounding" else "sdpa"
            )
        )
        if kind == "fault":
            mlp = model.model.layers[BLOCK].mlp
            mlp.register_forward_hook(lambda _module, _inputs, out: out * FACTOR)
        for level in LEVELS:
            model.zero_grad()
            path = folder / f"{kind}-{level}.zarr"
            with tracediff.record(path, stack="pytorch", level=level, overwrite=True):
                model(input_ids=ids, labels=ids).loss.backward()


def processor() -> float:
    """Processor time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def as_installed(folder: Path) -> dict[str, str]:
    """An environment in which modules are compiled once, as an installation does it, and not by
    every process, which adds a third of a second."""
    environment = dict(os.environ, PYTHONPYCACHEPREFIX=str(folder))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def seconds(arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """One command in a fresh process, by the clock and in processor time."""
    before, began = processor(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tracediff", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    elapsed = time.perf_counter() - began
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr}")
    return elapsed, processor() - before


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="processes for each figure")
    parser.add_argument("--keep", type=Path, help="keep the traces here; used if they are there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        if not (folder / f"{TARGETS[-1]}-{LEVELS[-1]}.zarr").exists():
            folder.mkdir(parents=True, exist_ok=True)
            record(folder)
        commands = {
            f"{command} {target}-{level}": [command, *traces(command, folder, target, level)]
            for level in LEVELS
            for target in TARGETS
            for command in ("bisect", "diff", "show")
            if command != "show" or target == "fault"
        }
        environment = as_installed(Path(temporary) / "compiled")
        for arguments in commands.values():
            seconds(arguments, environment)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(given.rounds):  # in turns, so that a busy moment hits all of them
            for name, arguments in commands.items():
                taken[name].append(seconds(arguments, environment))
    for name, times in taken.items():
        both = zip(*times, strict=True)
        told = [f"{statistics.median(of):.2f} s (least {min(of):.2f})" for of in both]
        print(f"{name:24} clock {told[0]}, processor {told[1]}")


def traces(command: str, folder: Path, target: str, level: str) -> list[str]:
    paths = [str(folder / f"{kind}-{level}.zarr") for kind in ("baseline", target)]
    return paths[1:] if command == "show" else paths


if __name__ == "__main__":
    main()
