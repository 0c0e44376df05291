"""Where operations of PyTorch can be seen: on all threads, and in what checkpoints repeat."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
import torch.utils.dlpack
from torch.utils._python_dispatch import TorchDispatchMode

from tracediff.recorders.pytorch_state import State
from tracediff.recording import Patches

Run = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operation that reaches a kernel to a function."""

    supports_higher_order_operators = True

    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while recording: no need to see to it with every operation."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return self._run(func, args, kwargs or {})


def install_dispatch(run: Run, state: State, patches: Patches) -> None:
    """Hands operations to a function, which is to run them, until the patches are undone.

    While a checkpoint that is not reentrant computes again, `state.repeating` is set.
    """

    def wrap_thread(original: Callable[..., None]) -> Callable[..., None]:
        def run_thread(thread: threading.Thread) -> None:
            mode: Any = _Mode(run)  # modes are a thread's own
            with mode:
                original(thread)

        return run_thread

    def wrap_checkpoint(original: Callable[..., None]) -> Callable[..., None]:
        def init(frame: Any, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            def again(*inputs: Any) -> Any:
                with state.repeated():
                    return recompute(*inputs)

            original(frame, again, *args, **kwargs)

        return init

    mode: Any = _Mode(run)
    mode.__enter__()
    patches.on_undo(mode.__exit__, None, None, None)
    patches.replace(threading.Thread, "run", wrap_thread)
    patches.replace(torch.utils.checkpoint._CheckpointFrame, "__init__", wrap_checkpoint)


def watch_resizing(blank: Callable[[torch.UntypedStorage], None], patches: Patches) -> None:
    """Calls back with each storage that loses all its bytes, or has none and gets some: FSDP frees
    parameters that way, which is no operation."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def resize(storage: torch.UntypedStorage, size: Any) -> Any:
            if not (size and storage.nbytes()):
                blank(storage)
            return original(storage, size)

        return resize

    patches.replace(torch.UntypedStorage, "resize_", wrap)


def watch_sharing(shared: Callable[[torch.Tensor], None], patches: Patches) -> None:
    """Calls back with each tensor that is handed out as DLPack: others may then write to it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def share(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            shared(tensor)
            return original(tensor, *args, **kwargs)

        return share

    patches.replace(torch.Tensor, "__dlpack__", wrap)
    patches.replace(torch.utils.dlpack, "to_dlpack", wrap)
