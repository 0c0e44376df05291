"""Replay with whole stages of another run on PyTorch: its batches, labels, weights and masks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from tracediff.events import Site
from tracediff.recorders.pytorch_modules import Call
from tracediff.recorders.pytorch_recorder import Recorder
from tracediff.recorders.pytorch_tensors import from_numpy, is_integer, map_tensors, out_of_sight
from tracediff.recording import Frame, Given, Tape
from tracediff.replayers.pytorch_checkpoints import RepeatHooks

_DROPOUTS: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class StageSubstituter(Recorder):
    """Records a run whose batches and weights are replaced before the model sees them."""

    def __init__(self, tape: Tape, given: Given) -> None:
        super().__init__(tape)
        self._given = given
        self._loaded: set[int] = set()
        self._losses: Counter[int] = Counter()
        self._inside = False

    def attach(self) -> None:
        super().attach()
        # Around the recorder's own wrappers: it is to see what the run is given.
        self.patches.replace(nn.Module, "__call__", self._wrap_call)
        self.patches.replace(F, "cross_entropy", self._wrap_loss)
        self.modules.replace = self._with_mask
        RepeatHooks(self._state, self.patches, self.modules).install()

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            state = self._state
            outermost = not state.open and not state.repeating
            if outermost and not self.modules.unrecorded() and self._is_root(module):
                self._load(module)
                if not state.evaluating:
                    args, kwargs = self._with_batch(Call(module, args, kwargs, original))
            return original(module, *args, **kwargs)

        return call

    def _is_root(self, module: nn.Module) -> bool:
        return self._state.roots.would_be_root(module)

    def _load(self, module: nn.Module) -> None:
        """Puts the given weights into a model, before they are recorded as loaded."""
        if id(module) in self._loaded:
            return
        self._loaded.add(id(module))
        named: list[tuple[str, torch.Tensor, str]] = [
            *((name, tensor, "param") for name, tensor in module.named_parameters()),
            *((name, tensor, "buffer") for name, tensor in module.named_buffers()),
        ]
        with out_of_sight(), torch.no_grad():
            for name, tensor, port in named:
                value = self._given(Site(self.tape.step, "loading", name, port=port))
                if value is not None:
                    tensor.copy_(from_numpy(value, tensor.device))

    def _with_batch(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a model, with the given batch in place of the script's."""
        tape = self.tape
        next_step = tape.root_calls and not self._state.optimizer_seen
        step, index = (tape.step + 1, 0) if next_step else (tape.step, tape.root_calls)
        ports = call.inputs()
        new = {}
        for name, (_, tensor) in zip(ports.names, ports.tensors, strict=True):
            value = self._given(Site(step, "rendering", f"batch.{name}", index))
            if value is not None and is_integer(tensor):
                new[id(tensor)] = _like(tensor, value)

        def swap(tensor: torch.Tensor) -> torch.Tensor:
            return new.get(id(tensor), tensor)

        return map_tensors(call.args, swap), dict(map_tensors(call.kwargs, swap))

    def _with_mask(self, frame: Frame, call: Call, orders: Mapping[str, int]) -> Call:
        """A dropout with the given mask. It draws all the same: the generators go on as they do."""
        module = call.module
        if not isinstance(module, _DROPOUTS) or not module.training or module.p == 1:
            return call
        kept = self._given(Site(frame.step, "forward", frame.path, frame.call, "mask"))
        if kept is None:
            return call

        def masked(module: Any, input: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                call.original(module, input.detach().clone())
            with out_of_sight():
                noise = from_numpy(kept, input.device).to(input.dtype).div_(1 - module.p)
            return input.mul_(noise) if module.inplace else input * noise

        return replace(call, original=masked)

    def _wrap_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            state = self._state
            if self._inside or not state.recording or state.evaluating or not is_integer(target):
                return original(input, target, *args, **kwargs)
            step = self.tape.step
            call, self._losses[step] = self._losses[step], self._losses[step] + 1
            value = self._given(Site(step, "loss", "loss.cross_entropy", call, "labels"))
            if value is not None:
                target = _like(target, value)
            self._inside = True
            try:
                return original(input, target, *args, **kwargs)
            finally:
                self._inside = False

        return loss


def _like(tensor: torch.Tensor, value: NDArray[Any]) -> torch.Tensor:
    """A given value with the dtype and device of a tensor, of whatever shape it has."""
    with out_of_sight():
        return from_numpy(value, tensor.device).to(tensor.dtype)
