"""Calls that a checkpoint repeats in the backward pass: they run on what they were given before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from tracediff.recorders.pytorch_modules import ModuleHooks
from tracediff.recorders.pytorch_state import State
from tracediff.recording import Frame, Patches


class RepeatHooks:
    """Tells a checkpoint that is not reentrant which calls it repeats.

    A recording need not know: what they compute is on the tape. A replay does, since gradients
    would otherwise be those of the values that it has replaced.
    """

    def __init__(self, state: State, patches: Patches, modules: ModuleHooks) -> None:
        self._state = state
        self._patches = patches
        self._modules = modules
        self._calls: list[Frame] = []
        self._step = -1

    def install(self) -> None:
        frame = torch.utils.checkpoint._CheckpointFrame
        self._patches.replace(frame, "__init__", self._wrap_init)
        self._patches.replace(self._modules, "begin", self._wrap_begin)

    def _wrap_begin(self, original: Callable[..., Frame | None]) -> Callable[..., Frame | None]:
        def begin(path: str, op: str) -> Frame | None:
            frame = original(path, op)
            if frame is not None:
                self._of_step().append(frame)
            return frame

        return begin

    def _wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(frame: Any, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            calls, caller = self._of_step(), self._state.open[-1:]
            first = len(calls)

            def again(*inputs: Any) -> Any:
                with self._modules.repeating(calls[first:], caller):
                    return recompute(*inputs)

            original(frame, again, *args, **kwargs)

        return init

    def _of_step(self) -> list[Frame]:
        """The calls of this step so far, in order, with those that were repeated."""
        if self._step != self._state.tape.step:
            self._step, self._calls = self._state.tape.step, []
        return self._calls
