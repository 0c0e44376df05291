"""Replay by substitution on PyTorch: the recorder, with calls of modules run on given inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tracediff.events import Site
from tracediff.recorders.pytorch_modules import Call
from tracediff.recorders.pytorch_recorder import Recorder
from tracediff.recorders.pytorch_tensors import map_tensors
from tracediff.recording import Frame, Given, Tape
from tracediff.replayers.pytorch_checkpoints import RepeatHooks
from tracediff.replayers.pytorch_stages import StageSubstituter

__all__ = ["StageSubstituter", "Substituter"]


class Substituter(Recorder):
    """Records a run while the inputs of its modules are replaced.

    Gradients pass through a replaced input as if it had not been, so the script trains on.
    """

    def __init__(self, tape: Tape, given: Given) -> None:
        super().__init__(tape)
        self._given = given

    def attach(self) -> None:
        super().attach()
        self.modules.replace = self._replace
        RepeatHooks(self._state, self.patches, self.modules).install()

    def _replace(self, frame: Frame, call: Call, orders: Mapping[str, int]) -> Call:
        new: dict[int, torch.Tensor] = {}
        ports = []
        for port, tensor in call.inputs().tensors:
            value = self._given(Site(frame.step, "forward", frame.path, frame.call, port))
            if value is not None and tuple(tensor.shape) == value.shape:
                new[id(tensor)] = _in_place_of(tensor, value)
                ports.append(port)
        if not new:
            return call
        if orders:
            self.tape.give(frame, {port: orders[port] for port in ports if port in orders})

        def swap(tensor: torch.Tensor) -> torch.Tensor:
            return new.get(id(tensor), tensor)

        return replace(
            call, args=map_tensors(call.args, swap), kwargs=map_tensors(call.kwargs, swap)
        )


class _PassedThrough(torch.autograd.Function):
    """The second argument's value, with the first one's place in the graph."""

    @staticmethod
    def forward(ctx: Any, computed: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _in_place_of(tensor: torch.Tensor, value: NDArray[Any]) -> torch.Tensor:
    """A given value with the dtype, device and place in the graph of a computed one."""
    if value.dtype.kind not in "biufc":  # bfloat16 and float8, which float32 holds exactly
        value = value.astype(np.float32)
    given = torch.from_numpy(np.array(value)).to(device=tensor.device, dtype=tensor.dtype)
    if not tensor.requires_grad:
        return given
    passed: torch.Tensor = _PassedThrough.apply(tensor, given)  # type: ignore[no-untyped-call]
    return passed
