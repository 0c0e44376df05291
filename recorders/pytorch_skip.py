"""Skipped steps of a rerun on PyTorch: the script's loop runs, and nothing is computed.

A call of a model returns what it returned in the recording, as far as that is known: every number
exactly, other tensors as zeros of their shape. There is no backward pass, so an optimizer finds no
gradients and changes nothing. Nothing is saved to disk, as the weights are not those of the step.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from tracediff.events import Event
from tracediff.recorders.pytorch_modules import Call, ModuleHooks
from tracediff.recorders.pytorch_state import State
from tracediff.recorders.pytorch_tensors import (
    Ports,
    from_numpy,
    map_tensors,
    out_of_sight,
    output_ports,
)
from tracediff.recording import Patches
from tracediff.rerun import Rerun
from tracediff.trace.dtypes import DTYPES

_SAVING: Final = (
    ("safetensors.torch", "", "serialize_file"),
    ("transformers.trainer", "Trainer", "_save_checkpoint"),
)
"""Module, class in it, and function that writes weights to disk."""


class SkipHooks:
    """What takes the place of a training step's computation while the tape is skipping."""

    def __init__(self, state: State, patches: Patches, modules: ModuleHooks, rerun: Rerun) -> None:
        self._state = state
        self._patches = patches
        self._modules = modules
        self._rerun = rerun
        self._backward_calls = 0
        self._step = -1
        self._like: dict[tuple[str, bool], Any] = {}

    def install(self) -> None:
        self._modules.skip = self._call
        patch = self._patches.replace
        patch(torch.autograd, "backward", self._wrap_backward)
        patch(torch.autograd, "grad", self._wrap_grad)
        for name in ("step", "update", "unscale_"):
            patch(torch.amp.GradScaler, name, functools.partial(self._wrap_scaler, name))
        patch(torch, "save", self._wrap_save)

    def _install_late(self) -> None:
        """Keeps libraries from saving, those that the script has imported by its first step."""
        for module, owner, name in _SAVING:
            found = sys.modules.get(module)
            if found is not None:
                holder = getattr(found, owner) if owner else found
                self._patches.replace(holder, name, self._wrap_save)

    @property
    def _skipping(self) -> bool:
        return self._state.recording and self._state.tape.skipping

    # ---- calls of models -------------------------------------------------------------------

    def _call(self, call: Call, path: str, ports: Ports, evaluating: bool) -> Any:
        """What a call returned when it was recorded, or what it returns now if it is unlike."""
        tape = self._state.tape
        phase = "trajectory" if evaluating else "forward"
        if self._state.roots.is_root(call.module):
            self._check_batch(ports, evaluating)
        recorded = self._rerun.ports(tape.step, phase, path, tape.next_call(phase, path))
        if not self._like:
            self._install_late()
        key = (path, evaluating)
        if key not in self._like:
            with torch.no_grad():
                self._like[key] = self._modules.unseen(call)
        like = self._like[key]
        found = output_ports(like).tensors
        if [port for port, _ in found] != list(recorded) or not recorded:
            return self._modules.unseen(call)
        new = {
            id(tensor): self._placeholder(tensor, recorded[port], not evaluating)
            for port, tensor in found
        }
        return _rebuilt(like, new)

    def _check_batch(self, ports: Ports, evaluating: bool) -> None:
        tape = self._state.tape
        count = tape.next_call("rendering", "eval_batch") if evaluating else tape.root_calls
        tape.root_calls += not evaluating
        tape.evaluating = evaluating
        self._modules.emit_batch(ports, count)
        tape.evaluating = False

    def _placeholder(self, like: torch.Tensor, event: Event, trains: bool) -> torch.Tensor:
        value = self._rerun.scalar(event)
        with torch.no_grad(), out_of_sight():
            if value is None:
                value = np.broadcast_to(np.zeros((), DTYPES[event.dtype]), event.shape)
            made = from_numpy(value, like.device)
        if trains and made.is_floating_point():
            # Not a leaf, so that the script may change it in place as it may an output.
            return made.requires_grad_().clone()
        return made

    # ---- backward --------------------------------------------------------------------------

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            if self._skipping:
                self._begin(args[0] if args else kwargs.get("tensors"))
            else:
                original(*args, **kwargs)

        return backward

    def _wrap_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._skipping:
                return original(outputs, inputs, *args, **kwargs)
            self._begin(outputs)
            many = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
            return tuple(torch.zeros_like(tensor) for tensor in many)

        return grad

    def _begin(self, tensors: Any) -> None:
        """Gives each loss the value that it had; the script may look at it afterwards."""
        step = self._state.tape.step
        if step != self._step:
            self._step, self._backward_calls = step, 0
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ())
        for index, loss in enumerate(losses):
            path = f"loss[{index}]" if index else "loss"
            event = self._rerun.event(step, "loss", path, self._backward_calls)
            value = self._rerun.scalar(event)
            if value is not None and value.shape == tuple(loss.shape):
                with torch.no_grad(), out_of_sight():
                    loss.data.copy_(from_numpy(value, loss.device))
        self._backward_calls += 1

    def _wrap_scaler(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._skipping:
                return original(scaler, *args, **kwargs)
            # An update that was left out for infinite gradients did not end the step.
            calls = self._rerun.calls(self._state.tape.step, "loss", "loss")
            if name == "step" and self._backward_calls >= calls:
                return args[0].step()
            return None

        return method

    def _wrap_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if not self._skipping:
                return original(*args, **kwargs)
            self._state.tape.note("the script saved nothing while steps were skipped")
            return None

        return save


def _rebuilt(value: Any, new: Mapping[int, torch.Tensor]) -> Any:
    """A result like another one, with other tensors: also for the outputs of transformers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            child = getattr(value, field.name)
            if child is not None:
                setattr(made, field.name, _rebuilt(child, new))
        return made
    return map_tensors(value, lambda tensor: new.get(id(tensor), tensor))
