"""Each tool around one step, or in place of it, leaving its record in a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from tracediff.session import record

RAN: Final = "ran"
"""What a recording yields if it has run the step itself."""

Recording = Callable[[Any, Any, Path], AbstractContextManager[Any]]


def tracediff(level: str) -> Recording:
    return lambda made, ids, folder: record(folder / "run.zarr", stack="pytorch", level=level)


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


def torchlens(gradients: bool) -> Recording:
    """It runs the forward pass itself, and the backward pass if its gradients are asked for."""

    @contextmanager
    def recording(made: Any, ids: Any, folder: Path) -> Iterator[str]:
        import torchlens as lens

        capture = lens.options.CaptureOptions(save_grads=True) if gradients else None
        trace = lens.trace(made, None, {"input_ids": ids, "labels": ids}, capture=capture)
        if gradients:
            trace.log_backward(trace[trace.output_layers[0]].out)  # the loss
            made.zero_grad()
        lens.save(trace, str(folder / "trace.tlspec"))
        yield RAN

    return recording


def msprobe(level: str, task: str, summary: str = "statistics") -> Recording:
    @contextmanager
    def recording(made: Any, ids: Any, folder: Path) -> Iterator[None]:
        os.environ.setdefault("MSPROBE_LOG_LEVEL", "3")  # errors alone: it logs to the output
        from msprobe.pytorch import PrecisionDebugger

        settings = {
            "task": task,
            "dump_path": str(folder),
            "level": level,
            "statistics": {"summary_mode": summary},
            "tensor": {},
        }
        config = folder / "config.json"
        config.write_text(json.dumps(settings), encoding="utf-8")
        # It is one per process, and this process records both runs: the dumps of separate
        # processes hold the same entries.
        PrecisionDebugger._instance = None
        PrecisionDebugger(config_path=str(config))
        PrecisionDebugger.start(made)
        yield
        PrecisionDebugger.stop()
        PrecisionDebugger.step()

    return recording
