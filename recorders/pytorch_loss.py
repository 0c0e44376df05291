"""Loss functions, and the tensor that the backward pass starts from."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F

from tracediff.recorders.pytorch_state import State, in_backward
from tracediff.recorders.pytorch_tensors import is_integer, to_numpy
from tracediff.recording import Patches

_FUNCTIONS: Final = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "l1_loss",
)
_SETTINGS: Final = ("reduction", "ignore_index", "label_smoothing", "log_target")


class LossHooks:
    """Wraps the loss functions of `torch.nn.functional`, which the loss modules call as well."""

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._patches = patches
        self._depth = 0

    def install(self) -> None:
        for name in _FUNCTIONS:
            self._patches.replace(F, name, functools.partial(self._wrap_loss, name))
        # `Tensor.backward` calls `torch.autograd.backward`.
        self._patches.replace(torch.autograd, "backward", self._wrap_backward)
        self._patches.replace(torch.autograd, "grad", self._wrap_backward)

    # ---- loss functions --------------------------------------------------------------------

    def _wrap_loss(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def loss(*args: Any, **kwargs: Any) -> Any:
            # A function mode calls the wrapper once more from inside the original.
            if self._depth or in_backward() or not self._state.recording:
                return original(*args, **kwargs)
            self._depth += 1
            outer, self._state.stage = self._state.stage, "loss"
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
                self._state.stage = outer
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self._record(name, bound.arguments, result)
            return result

        return loss

    def _record(self, name: str, arguments: Mapping[str, Any], result: torch.Tensor) -> None:
        state, tape = self._state, self._state.tape
        if state.evaluating:
            path = f"eval.{name}"
            self._record_evaluation(path, name, arguments, result)
            return
        path = f"loss.{name}"
        given, labels = arguments["input"], arguments["target"]
        common: dict[str, Any] = {"call": tape.next_call("loss", path), "op": name}
        inputs = state.open[-1].available() if state.open and state.open[-1] else state.loss_inputs
        kind = "labels" if is_integer(labels) else "tensor"
        orders = (
            *state.emit_tensor("loss", path, "in", given, inputs=inputs, **common),
            *state.emit_tensor("loss", path, "labels", labels, kind=kind, **common),
        )
        settings = _settings(arguments)
        out = state.emit_tensor(
            "loss", path, "out", result, inputs=orders, attributes=settings, **common
        )
        state.offer(out)

    def _record_evaluation(
        self, path: str, name: str, arguments: Mapping[str, Any], result: torch.Tensor
    ) -> None:
        state = self._state
        labels = arguments["target"]
        common: dict[str, Any] = {"call": state.tape.next_call("trajectory", path), "op": name}
        if is_integer(labels):
            state.emit_tensor("trajectory", path, "labels", labels, kind="labels", **common)
        settings = _settings(arguments)
        state.emit_tensor("trajectory", path, "out", result, attributes=settings, **common)

    # ---- backward --------------------------------------------------------------------------

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            # A reentrant checkpoint starts a backward pass inside the one that runs.
            if self._state.recording and not in_backward():
                self._start(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
            return original(*args, **kwargs)

        return backward

    def _start(self, tensors: Any) -> None:
        state, tape = self._state, self._state.tape
        call = state.backward_call = tape.next_call("backward", "loss")
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ())
        for index, loss in enumerate(losses):
            path = f"loss[{index}]" if index else "loss"
            inputs = state.loss_inputs
            state.emit_tensor("loss", path, "out", loss, call=call, inputs=inputs)
            state.emit_tensor("trajectory", path, "out", loss, call=call)


def _settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: arguments[name] for name in _SETTINGS if name in arguments}
    settings["denominator"] = _denominator(arguments)
    if arguments.get("weight") is not None:
        settings["weighted"] = True
    return settings


def _denominator(arguments: Mapping[str, Any]) -> int:
    """Number of terms that a mean is taken over: targets that are not ignored, or elements."""
    given, target = arguments["input"], arguments["target"]
    if arguments.get("reduction") == "batchmean":
        return int(given.shape[0])
    if "ignore_index" not in arguments:
        return math.prod(np.broadcast_shapes(given.shape, target.shape))
    if not is_integer(target):  # cross-entropy with class probabilities
        return int(target.numel() // given.shape[1 if given.ndim > 1 else 0])
    labels = to_numpy(target)
    return 0 if labels is None else int((labels != arguments["ignore_index"]).sum())
