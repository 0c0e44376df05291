"""Loss functions of `mlx.nn.losses`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import mlx.core as mx
from mlx.nn import losses

from tracediff.recorders.mlx_arrays import is_integer
from tracediff.recorders.mlx_state import State, replace_everywhere
from tracediff.recording import Patches

_FUNCTIONS: Final = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "binary_cross_entropy",
    "kl_div_loss",
    "l1_loss",
)
_SETTINGS: Final = ("reduction", "label_smoothing", "axis", "with_logits")


class LossHooks:
    """Wraps the loss functions, wherever they were imported to."""

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._patches = patches
        self._inside = False

    def install(self) -> None:
        originals = {name: getattr(losses, name) for name in _FUNCTIONS}
        replace_everywhere(
            self._patches, {fun: self._wrap(name, fun) for name, fun in originals.items()}
        )

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def loss(*args: Any, **kwargs: Any) -> Any:
            gradient = self._state.gradient
            repeats = gradient is not None and not gradient.forward
            if self._inside or repeats or not self._state.recording:
                return original(*args, **kwargs)
            self._state.touch()
            self._inside = True
            outer, self._state.stage = self._state.stage, "loss"
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = False
                self._state.stage = outer
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self._record(name, bound.arguments, result)
            return result

        return loss

    def _record(self, name: str, arguments: Mapping[str, Any], result: mx.array) -> None:
        state, tape = self._state, self._state.tape
        if state.evaluating:
            path = f"eval.{name}"
            self._record_evaluation(path, name, arguments, result)
            return
        path = f"loss.{name}"
        given, labels = list(arguments.values())[:2]
        common: dict[str, Any] = {"call": tape.next_call("loss", path), "op": name}
        frame = tape.current
        inputs = frame.available() if frame else state.loss_inputs
        kind = "labels" if is_integer(labels) else "tensor"
        orders = (
            *state.emit_array("loss", path, "in", given, inputs=inputs, **common),
            *state.emit_array("loss", path, "labels", labels, kind=kind, **common),
        )
        settings = _settings(arguments, labels)
        out = state.emit_array(
            "loss", path, "out", result, inputs=orders, attributes=settings, **common
        )
        state.offer(out)

    def _record_evaluation(
        self, path: str, name: str, arguments: Mapping[str, Any], result: mx.array
    ) -> None:
        state = self._state
        labels = list(arguments.values())[1]
        common: dict[str, Any] = {"call": state.tape.next_call("trajectory", path), "op": name}
        if is_integer(labels):
            state.emit_array("trajectory", path, "labels", labels, kind="labels", **common)
        settings = _settings(arguments, labels)
        state.emit_array("trajectory", path, "out", result, attributes=settings, **common)


def _settings(arguments: Mapping[str, Any], labels: mx.array) -> dict[str, Any]:
    """How the loss was reduced; `denominator` is the number of terms of a mean."""
    settings = {name: arguments[name] for name in _SETTINGS if name in arguments}
    if arguments.get("reduction") == "mean":
        settings["denominator"] = int(labels.size)
    if arguments.get("weights") is not None:
        settings["weighted"] = True
    return settings
