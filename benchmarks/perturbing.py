"""Multiplies the result of one operation by `1 + size * random signs`, under a recorder.

The operation is given by the order of its event. What the recorder sees is the perturbed result, as
if the operation had computed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tracediff.operations import LEAF
from tracediff.recorders.mlx_autograd import GradientHooks
from tracediff.recorders.mlx_cotangents import Cotangents
from tracediff.recorders.mlx_operations import OperationHooks


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Which operation, by the order of its first output's event and its name, and how much."""

    order: int
    op: str
    size: float
    output: int = 0


@dataclass(slots=True)
class Meter:
    """Knows the order of the next event, and whether the perturbation has happened."""

    tape: Any = None
    done: bool = field(default=False)

    def is_at(self, perturbation: Perturbation, op: str) -> bool:
        return (
            self.tape is not None
            and not self.done
            and self.tape.step == 0
            and self.tape._order == perturbation.order
            and op == perturbation.op
        )


def signs(shape: Sequence[int]) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(17)
    return np.asarray(generator.integers(0, 2, tuple(shape)) * 2 - 1, np.float32)


class PyTorchPerturbing(TorchDispatchMode):
    """Perturbs one operation of PyTorch. Entered before the recorder, it runs below it."""

    def __init__(self, perturbation: Perturbation, meter: Meter) -> None:
        super().__init__()
        self._perturbation = perturbation
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        here = self._meter.is_at(self._perturbation, str(func))
        result = func(*args, **(kwargs or {}))
        if here:
            self._meter.done = True
            schema = func._schema
            written = [
                value
                for value, argument in zip(args, schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            tensors = _flat(written) or _flat(result)
            tensor = tensors[self._perturbation.output]
            factor = 1 + self._perturbation.size * torch.from_numpy(signs(tensor.shape))
            if schema.is_mutable or (not tensor._is_view() and tensor.is_contiguous()):
                tensor.mul_(factor.to(tensor.dtype))
            else:  # a view must not change what it looks at
                changed = (tensor * factor).to(tensor.dtype)
                return changed if len(tensors) == 1 else _replaced(result, tensor, changed)
        return result


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return []


def _replaced(result: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    return type(result)(new if item is old else item for item in result)


@contextmanager
def _mlx_perturbing(perturbation: Perturbation, meter: Meter) -> Iterator[None]:
    """Perturbs one operation of MLX, where the recorder calls what it wraps; in the backward pass,
    the gradient of an operation's output as it is recorded and handed on."""
    original = OperationHooks._run

    def run(self: Any, function: Any, plain: Any, args: Any, kwargs: Any) -> Any:
        def perturbed(*inner: Any, **named: Any) -> Any:
            here = meter.is_at(perturbation, function.name)
            result = plain(*inner, **named)
            if not here:
                return result
            meter.done = True
            if function.in_place:
                changed = inner[0]
                changed *= _factor(changed, perturbation.size)
                return result
            if isinstance(result, mx.array):
                return _scaled(result, perturbation.size)
            outputs = list(result)
            outputs[perturbation.output] = _scaled(outputs[perturbation.output], perturbation.size)
            return type(result)(outputs)

        return original(self, function, perturbed, args, kwargs)

    def tap(self: Any, order: int) -> Any:
        def vjp(primals: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
            if meter.is_at(perturbation, perturbation.op):
                meter.done = True
                with self._muted():  # no operation of the run
                    cotangent = _scaled(cotangent, perturbation.size)
            if self._state.recording:
                self.record(order, cotangent)
            return cotangent

        identity = mx.custom_function(lambda array: array)
        identity.vjp(vjp)
        return identity

    def emit_named(self: Any, named: Sequence[tuple[str, mx.array]]) -> None:
        for path, grad in reversed(named):
            if meter.is_at(perturbation, LEAF):
                meter.done = True
                with self._state.operations.muted():
                    grad *= _factor(grad, perturbation.size)  # the array that the script is given
            emit_one(self, [(path, grad)])

    # This file is not what issued the operation: the recorder passes over names in brackets.
    run.__code__ = run.__code__.replace(co_filename="<perturbing>")
    original_tap, emit_one = Cotangents._tap, GradientHooks._emit_named
    OperationHooks._run, Cotangents._tap = run, tap  # type: ignore[method-assign]
    GradientHooks._emit_named = emit_named  # type: ignore[method-assign]
    try:
        yield
    finally:
        OperationHooks._run = original  # type: ignore[method-assign]
        Cotangents._tap = original_tap  # type: ignore[method-assign]
        GradientHooks._emit_named = emit_one  # type: ignore[method-assign]


def _scaled(array: mx.array, size: float) -> mx.array:
    return (array * _factor(array, size)).astype(array.dtype)


def _factor(array: mx.array, size: float) -> mx.array:
    return 1 + size * mx.array(signs(array.shape))


@contextmanager
def perturbing(stack: str, perturbation: Perturbation, meter: Meter) -> Iterator[None]:
    """Perturbs an operation of a run that is recorded inside the block."""
    if stack == "mlx":
        with _mlx_perturbing(perturbation, meter):
            yield
    else:
        with PyTorchPerturbing(perturbation, meter):
            yield
