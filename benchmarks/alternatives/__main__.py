"""`python -m benchmarks.alternatives [TOOL...]`: what a user might pick instead, at the same work.

One forward and backward of a tiny Llama on PyTorch is recorded twice and the two are compared. The
second is a valid rewrite (fused attention in place of its formula, so every value after it differs
by rounding) with one fault: the output of one block's MLP is 1% too large. Each tool's cost is
told as a multiple of the bare step, in processor time, in turns within one process, another for
each tool (some leave PyTorch wrapped); its comparison as the processor time of a fresh process,
start-up included, where there is a command or files.

TorchLens (`torchlens`) and msprobe (`mindstudio-probe`) are measured if they can be imported.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Final, NamedTuple

import torch

from benchmarks.alternatives import comparing, recording
from benchmarks.alternatives.job import batch, model, step

REPEATS: Final = 3


class Tool(NamedTuple):
    record: recording.Recording
    compare: comparing.Comparison
    needs: str = "torch"


def _torchlens(gradients: bool) -> Tool:
    compare = comparing.compare_by(comparing.TORCHLENS)
    return Tool(recording.torchlens(gradients), compare, "torchlens")


def _msprobe(level: str, task: str, summary: str = "statistics") -> Tool:
    return Tool(recording.msprobe(level, task, summary), comparing.msprobe, "msprobe")


TOOLS: Final = {
    "tracediff, `digest`": Tool(recording.tracediff("digest"), comparing.tracediff),
    "tracediff, `module`": Tool(recording.tracediff("module"), comparing.tracediff),
    "tracediff, `op`": Tool(recording.tracediff("op"), comparing.tracediff),
    "PyTorch DebugMode, tensor hashes": Tool(
        recording.debug_mode, comparing.compare_by(comparing.HASHES)
    ),
    "transformers debugger context (forward)": Tool(
        recording.debugger_context, comparing.compare_by(comparing.SUMMARIES)
    ),
    "hooks, `torch.save`, `assert_allclose`": Tool(
        recording.hooks, comparing.compare_by(comparing.VALUES)
    ),
    "TorchLens (forward)": _torchlens(gradients=False),
    "TorchLens, gradients": _torchlens(gradients=True),
    "msprobe L0, statistics": _msprobe("L0", "statistics"),
    "msprobe L0, md5": _msprobe("L0", "statistics", "md5"),
    "msprobe L0, tensor": _msprobe("L0", "tensor"),
    "msprobe mix, statistics": _msprobe("mix", "statistics"),
    "msprobe mix, md5": _msprobe("mix", "statistics", "md5"),
    "msprobe mix, tensor": _msprobe("mix", "tensor"),
}


def measure(record: recording.Recording, folder: Path) -> float:
    """How many times the bare step a recorded one takes, the median of pairs; makes two records."""
    ratios = []
    ids = batch()
    for repeat in range(REPEATS):
        made = model(faulty=repeat % 2 == 1)
        step(made, ids)
        seconds = []
        for context in (nullcontext(), record(made, ids, _side(folder, repeat))):
            gc.collect()
            started = time.process_time()
            with context as ran:
                if ran is not recording.RAN:
                    step(made, ids)
            seconds.append(time.process_time() - started)
        ratios.append(seconds[1] / seconds[0])
    return sorted(ratios)[REPEATS // 2]


def _side(folder: Path, repeat: int) -> Path:
    side = folder / (("a", "b")[repeat] if repeat < 2 else f"more{repeat}")
    side.mkdir()
    return side


def row(name: str) -> str:
    """One tool's line of the table."""
    tool = TOOLS[name]
    if importlib.util.find_spec(tool.needs) is None:
        return f"| {name} | not installed | | | |"
    temporary = tempfile.TemporaryDirectory()
    atexit.register(temporary.cleanup)  # msprobe writes to it once more at exit, before this
    folder = Path(temporary.name)
    ratio = measure(tool.record, folder)
    size = sum(f.stat().st_size for f in (folder / "a").rglob("*") if f.is_file())
    seconds, found = tool.compare(folder / "a", folder / "b")
    return f"| {name} | {ratio:.1f} | {size / 1e6:.2f} | {seconds:.2f} | {found} |"


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        print(row(sys.argv[1]), flush=True)
        return
    print("| tool | times the step | MB | comparison, s | names |")
    print("|---|---:|---:|---:|---|", flush=True)
    for name in sys.argv[1:] or TOOLS:
        subprocess.run([sys.executable, "-m", "benchmarks.alternatives", name], check=False)


if __name__ == "__main__":
    main()
