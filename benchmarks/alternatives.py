"""`python -m benchmarks.alternatives`: what a user might pick instead, at the same work.

One forward and backward of a tiny Llama on PyTorch is recorded twice and the two are compared. The
second is a valid rewrite (fused attention in place of its formula, so every value after it differs
by rounding) with one fault: the output of one block's MLP is 1% too large. Each tool's cost is
told as a multiple of the bare step, in processor time, in turns within one process; its comparison
as the processor time of a fresh process, start-up included, where there is a command or files.

TorchLens is measured if it can be imported.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

from tracediff.session import record

BLOCK: Final = 2
FACTOR: Final = 1.01
REPEATS: Final = 3

Recording = Callable[[Any, Any, Path], AbstractContextManager[Any]]


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
        made.model.layers[BLOCK].mlp.register_forward_hook(lambda _m, _i, out: out * FACTOR)
    return made


def step(made: Any, ids: Any) -> None:
    loss = made(input_ids=ids, labels=ids).loss
    if loss.requires_grad:  # transformers' context records the forward pass alone
        loss.backward()
    made.zero_grad()


# ---- recording -------------------------------------------------------------------------------


@contextmanager
def debug_mode(made: Any, ids: Any, folder: Path) -> Iterator[None]:
    from torch.utils._debug_mode import DebugMode

    with DebugMode(record_nn_module=True) as mode, DebugMode.log_tensor_hashes():
        yield
    rows = [
        (str(getattr(call, "op", type(call).__name__)), (call.log or {}).get("hash"))
        for call in mode.logs
    ]
    (folder / "hashes.json").write_text(json.dumps(rows, default=str), encoding="utf-8")


@contextmanager
def debugger_context(made: Any, ids: Any, folder: Path) -> Iterator[None]:
    from transformers.model_debugging_utils import model_addition_debugger_context

    with model_addition_debugger_context(
        made, debug_path=str(folder), do_prune_layers=False, use_repr=False
    ):
        yield


@contextmanager
def hooks(made: Any, ids: Any, folder: Path) -> Iterator[None]:
    """What is written by hand: outputs and their gradients, saved with `torch.save`."""
    kept: dict[str, Any] = {}
    handles = []

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, out: Any) -> None:
            if isinstance(out, torch.Tensor):
                kept[name] = out.detach().clone()
                if out.requires_grad:
                    out.register_hook(lambda grad: kept.update({f"{name}.grad": grad.clone()}))

        return hook

    for name, module in made.named_modules():
        handles.append(module.register_forward_hook(keep(name or "model")))
    yield
    for handle in handles:
        handle.remove()
    torch.save(kept, folder / "values.pt")


@contextmanager
def torchlens(made: Any, ids: Any, folder: Path) -> Iterator[None]:
    """The forward pass alone, which it runs itself."""
    import torchlens as lens

    trace = lens.trace(made, None, {"input_ids": ids, "labels": ids})
    lens.save(trace, str(folder / "trace.tlspec"))
    yield


def tracediff(level: str) -> Recording:
    return lambda made, ids, folder: record(folder / "run.zarr", stack="pytorch", level=level)


# ---- comparing -------------------------------------------------------------------------------

_HASHES: Final = """
import json, sys
a, b = (json.load(open(f"{folder}/hashes.json")) for folder in sys.argv[1:])
if [name for name, _ in a] != [name for name, _ in b]:
    print(f"nothing: the operations are not the same ({len(a)} and {len(b)})")
else:
    print("first", next((x[0] for x, y in zip(a, b) if x[1] != y[1]), "none"))
"""
_VALUES: Final = """
import sys, numpy, torch
a, b = (torch.load(f"{folder}/values.pt") for folder in sys.argv[1:])
for rtol in (1e-7, 1e-5, 1e-3):
    wrong = []
    for name in a:
        try:
            numpy.testing.assert_allclose(a[name].numpy(), b[name].numpy(), rtol=rtol, atol=rtol)
        except AssertionError:
            wrong.append(name)
    found = wrong[0] if wrong else "none"
    print(f"rtol {rtol:g}: first {found}, {len(wrong)} of {len(a)}", end="; ")
"""
_SUMMARIES: Final = """
import glob, json, sys, safetensors.numpy as st, os, numpy
first = {}
for side, folder in enumerate(sys.argv[1:]):
    pattern = f"{folder}/**/*outputs*.safetensors"
    files = sorted(glob.glob(pattern, recursive=True), key=os.path.getmtime)
    for file in files:
        name = os.path.basename(file)
        first.setdefault(name, [None, None])[side] = st.load_file(file)
wrong = [
    name for name, (a, b) in first.items()
    if a and b and any(not numpy.allclose(a[k], b[k], rtol=1e-5, atol=1e-5) for k in a)
]
print(f"rtol 1e-05: first {wrong[0] if wrong else 'none'}, {len(wrong)} of {len(first)}")
"""


def compare_by(program: str) -> Callable[[Path, Path], tuple[float, str]]:
    return lambda a, b: _timed([sys.executable, "-c", program, str(a), str(b)])


def bisect(a: Path, b: Path) -> tuple[float, str]:
    command = [sys.executable, "-m", "tracediff", "bisect", str(a / "run.zarr"), "--json", "-"]
    seconds, out = _timed([*command, str(b / "run.zarr")])
    first = json.loads(out)["first"] or {}
    wanted = ("site", "pattern", "detail", "blame")
    return seconds, ", ".join(f"{key} {first.get(key)}" for key in wanted)


def _timed(command: list[str]) -> tuple[float, str]:
    """Processor seconds of a fresh process, the least of three, and what it prints."""
    least, out = float("inf"), ""
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        least = min(least, sum(after[:2]) - sum(before[:2]))
    return least, out.strip()


TOOLS: Final[dict[str, tuple[Recording, Callable[[Path, Path], tuple[float, str]] | None]]] = {
    "tracediff, `digest`": (tracediff("digest"), bisect),
    "tracediff, `module`": (tracediff("module"), bisect),
    "tracediff, `op`": (tracediff("op"), bisect),
    "PyTorch DebugMode, tensor hashes": (debug_mode, compare_by(_HASHES)),
    "transformers debugger context": (debugger_context, compare_by(_SUMMARIES)),
    "hooks, `torch.save`, `assert_allclose`": (hooks, compare_by(_VALUES)),
    "TorchLens": (torchlens, None),
}


def measure(recording: Recording, folder: Path) -> float:
    """How many times the bare step a recorded one takes, the median of pairs; makes two records."""
    ratios = []
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 512, (2, 64)))
    for repeat in range(REPEATS):
        made = model(faulty=repeat % 2 == 1)
        step(made, ids)
        seconds = []
        for context in (nullcontext(), recording(made, ids, _side(folder, repeat))):
            gc.collect()
            started = time.process_time()
            with context:
                step(made, ids)
            seconds.append(time.process_time() - started)
        ratios.append(seconds[1] / seconds[0])
    return sorted(ratios)[REPEATS // 2]


def _side(folder: Path, repeat: int) -> Path:
    side = folder / (("a", "b")[repeat] if repeat < 2 else f"more{repeat}")
    side.mkdir()
    return side


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(TOOLS)
    print("| tool | times the step | MB | comparison, s | names |")
    print("|---|---:|---:|---:|---|")
    for name, (recording, compare) in ((name, TOOLS[name]) for name in chosen):
        if name == "TorchLens" and importlib.util.find_spec("torchlens") is None:
            print("| TorchLens | not installed | | | |")
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            ratio = measure(recording, folder)
            size = sum(f.stat().st_size for f in (folder / "a").rglob("*") if f.is_file())
            seconds, found = compare(folder / "a", folder / "b") if compare else (None, "")
        cost = f"{seconds:.2f}" if seconds is not None else "none given"
        print(f"| {name} | {ratio:.1f} | {size / 1e6:.2f} | {cost} | {found} |", flush=True)


if __name__ == "__main__":
    main()
