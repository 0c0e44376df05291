"""Rotary embeddings of transformers, which are a function there and a module in other stacks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tracediff.kernels import pack
from tracediff.recorders.pytorch_modules import ModuleHooks
from tracediff.recorders.pytorch_shards import local_part
from tracediff.recorders.pytorch_state import State
from tracediff.recorders.pytorch_tensors import has_values, to_numpy
from tracediff.recording import Patches

_FUNCTION: Final = "apply_rotary_pos_emb"
_KEPT: Final = 2
"""Copies whose memory is kept: one each of queries and keys."""
_DIMS: Final = ("batch", "heads", "sequence", "head_dim")


class RopeHooks:
    """Records `apply_rotary_pos_emb` as a module `<attention>.rope`: call 0 is q, call 1 is k."""

    def __init__(self, state: State, patches: Patches, modules: ModuleHooks) -> None:
        self._state = state
        self._patches = patches
        self._modules = modules
        self._seen: set[str] = set()
        self._free: list[NDArray[Any]] = []

    def install(self) -> None:
        self._modules.on_call.append(self._watch)

    def _watch(self, module: nn.Module) -> None:
        """Wraps the function in the Python module that the class of a module comes from."""
        name = type(module).__module__
        if name not in self._seen:
            self._seen.add(name)
            if name in sys.modules:
                self._patches.replace(sys.modules[name], _FUNCTION, self._wrap)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply(*args: Any, **kwargs: Any) -> Any:
            if not self._state.open or self._modules.unrecorded():
                return original(*args, **kwargs)
            given = [*args, *(kwargs[name] for name in ("q", "k") if name in kwargs)][:2]
            # Copies: nothing says that the function leaves its arguments as they are.
            before = [self._copy(value) for value in given]
            result = original(*args, **kwargs)
            rotated = result if isinstance(result, tuple) else (result,)
            for array, tensor in zip(before, rotated, strict=False):
                self._record(array, tensor)
            self._free.extend(array for array in before if array is not None)
            del self._free[:-_KEPT]
            return result

        return apply

    def _copy(self, value: Any) -> Any:
        """A copy in C order, in memory of a call that is over: new memory costs as much."""
        array = to_numpy(value) if isinstance(value, torch.Tensor) else None
        if array is None:
            return None
        for index, free in enumerate(self._free):
            if (free.dtype, free.shape) == (array.dtype, array.shape):
                copy = self._free.pop(index)
                break
        else:
            copy = np.empty(array.shape, array.dtype)
        pack(array, copy)
        return copy

    def _record(self, before: Any, rotated: Any) -> None:
        parent = self._state.open[-1]
        if parent is None or before is None or not isinstance(rotated, torch.Tensor):
            return
        dims = _DIMS if rotated.ndim == len(_DIMS) else ()
        modules, tape = self._modules, self._state.tape
        is_new, frame = modules.is_new, modules.begin(f"{parent.path}.rope", "RoPE")
        try:
            array = to_numpy(rotated)
            if is_new and frame is not None and array is not None:
                tape.emit_in(frame, "in", before, dims)
                tape.emit_out(frame, "out", array, dims, twin=self._state.twin(rotated))
            if frame is not None and has_values(local_part(rotated)):
                modules.hook(frame, "out", rotated, dims)
        finally:
            modules.end(frame, is_new)
