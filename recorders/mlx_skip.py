"""Skipped steps of a rerun on MLX: the script's loop runs, and nothing is computed.

MLX is lazy, so a training step may be built as ever: what is never asked for is never computed. The
loss is replaced by the recorded number and the gradients by zeros, and an update changes nothing.
Nothing is saved to disk, as the weights are not those of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_map

from tracediff.recorders.mlx_snapshot import from_numpy
from tracediff.recorders.mlx_state import State
from tracediff.recording import Patches
from tracediff.rerun import Rerun

_SAVING: Final = ("save", "savez", "savez_compressed", "save_safetensors", "save_gguf")


class SkipHooks:
    """What takes the place of a training step's computation while the tape is skipping."""

    def __init__(self, state: State, patches: Patches, rerun: Rerun) -> None:
        self._state = state
        self._patches = patches
        self._rerun = rerun
        self._step = -1
        self._gradients = 0

    def install(self) -> None:
        self._state.skipped = self._gradient
        for name in _SAVING:
            self._patches.replace(mx, name, self._wrap_save)

    def _gradient(self, result: Any, has_value: bool) -> Any:
        """The value and the gradients of a transformation that is not to be computed."""
        value, grads = result if has_value else (None, result)
        step = self._state.tape.step
        if step != self._step:
            self._step, self._gradients = step, 0
        event = self._rerun.event(step, "loss", "loss", self._gradients)
        self._gradients += 1
        known = self._rerun.scalar(event)
        if known is not None and value is not None:
            loss = from_numpy(known)
            several = isinstance(value, tuple | list)
            value = type(value)((loss, *value[1:])) if several else loss
        grads = tree_map(mx.zeros_like, grads)
        return (value, grads) if has_value else grads

    def _wrap_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if not (self._state.recording and self._state.tape.skipping):
                return original(*args, **kwargs)
            self._state.tape.note("the script saved nothing while steps were skipped")
            return None

        return save
