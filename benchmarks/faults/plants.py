"""Ways to change a job: edits of weights, modules, gradients, that work on both stacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from torch import nn

from benchmarks.faults.job import Job
from benchmarks.faults.models import Weights

Plant = Callable[[Job], None]
Transform = Callable[[Any, Any, Any], Any]
"""Given the module, its first input and its output: the output that it has instead."""


# ---- of any part of a job -----------------------------------------------------------------------


def put(path: str, value: Any) -> Plant:
    """Sets an attribute of a job: `put("optimizer.lr", 1e-2)`, `put("config.rope_theta", 5e5)`."""

    def plant(job: Job) -> None:
        *owners, last = path.split(".")
        owner: Any = functools.reduce(getattr, owners, job)
        if isinstance(owner, dict):
            owner[last] = value
        else:
            setattr(owner, last, value)

    return plant


def add(path: str, edit: Callable[..., Any]) -> Plant:
    """Appends to one of the lists of edits of a job: `add("rendering.encoded", ...)`."""

    def plant(job: Job) -> None:
        functools.reduce(getattr, path.split("."), job).append(edit)

    return plant


def both(*plants: Plant) -> Plant:
    def plant(job: Job) -> None:
        for each in plants:
            each(job)

    return plant


# ---- weights ------------------------------------------------------------------------------------


def weight(name: str, edit: Callable[[np.ndarray[Any, Any]], Any]) -> Plant:
    """Replaces the weights whose transformers name ends with `name`."""

    def change(weights: Weights) -> None:
        found = [key for key in weights if key.endswith(name)]
        assert found, f"no weight is named {name}"
        for key in found:
            weights[key] = np.asarray(edit(weights[key]), dtype=np.float32)

    return add("weights", change)


def element(index: tuple[int, ...], delta: float) -> Callable[[Any], Any]:
    """Adds to one element."""

    def edit(array: Any) -> Any:
        array = array.copy()
        array[index] += delta
        return array

    return edit


def noise_like(array: Any) -> Any:
    return 0.2 * np.random.default_rng(99).standard_normal(array.shape)


# ---- modules ------------------------------------------------------------------------------------


def find(model: Any, path: str) -> Any:
    """The module of a path as either stack writes it, inside an adapter or not."""
    if isinstance(model, nn.Module):
        while hasattr(model, "base_model") and hasattr(model, "peft_config"):
            model = model.base_model.model
        return model.get_submodule(path)
    for part in path.split("."):
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model


def replace_call(module: Any, function: Callable[..., Any]) -> None:
    """Has `function(original, *args, **kwargs)` run in place of a module's own computation.

    The recorder sees the module called as before, by its old class name.
    """
    if isinstance(module, nn.Module):
        module.forward = functools.partial(function, module.forward)
        return
    cls = type(module)
    original = cls.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(functools.partial(original, self), *args, **kwargs)

    module.__class__ = type(cls.__name__, (cls,), {"__call__": call})


def output(path: str, transform: Transform, *, from_step: int = 0) -> Plant:
    """Changes what a module returns; its inputs and parameters stay as they are."""

    def change(model: Any) -> None:
        module = find(model, path)
        calls = 0

        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            given = args[0] if args else next(iter(kwargs.values()))
            result = original(*args, **kwargs)
            if calls <= from_step:
                return result
            if isinstance(result, tuple):
                return (transform(module, given, result[0]), *result[1:])
            return transform(module, given, result)

        replace_call(module, run)

    return add("built", change)


def scaled(factor: float) -> Transform:
    return lambda module, x, y: y * factor


def attribute(path: str, name: str, edit: Callable[[Any], Any]) -> Plant:
    """Changes an attribute of a module; `a|b` names it on PyTorch and on MLX."""

    def change(model: Any) -> None:
        module = find(model, path)
        names = name.split("|")
        chosen = names[0] if isinstance(module, nn.Module) else names[-1]
        setattr(module, chosen, edit(getattr(module, chosen)))

    return add("built", change)


def constant(like: Any, values: Any) -> Any:
    """An array of the stack and dtype of `like`."""
    if isinstance(like, torch.Tensor):
        return torch.tensor(values, dtype=like.dtype)
    return mx.array(values).astype(like.dtype)


def one_element(index: tuple[int, ...], delta: float) -> Transform:
    def transform(module: Any, x: Any, y: Any) -> Any:
        bump = np.zeros(y.shape, np.float32)
        bump[index] = delta
        return y + constant(y, bump)

    return transform


# ---- gradients ----------------------------------------------------------------------------------


class _ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None


def scaled_gradient(x: Any, factor: float) -> Any:
    """The same values, whose gradient is multiplied on the way back."""
    if isinstance(x, torch.Tensor):
        return _ScaledGradient.apply(x, factor)

    @mx.custom_function
    def identity(y: mx.array) -> mx.array:
        return y * 1

    @identity.vjp
    def _(primals: Any, cotangent: Any, result: Any) -> Any:
        return cotangent * factor

    return identity(x)


def input_gradient(path: str, factor: float) -> Plant:
    """Scales the gradient that a module passes back to its input; the forward pass is untouched."""

    def run(original: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
        return original(scaled_gradient(x, factor), *args, **kwargs)

    return add("built", lambda model: replace_call(find(model, path), run))


def stopped(module: Any, x: Any, y: Any) -> Any:
    """The output, cut off from the backward pass."""
    return y.detach() if isinstance(y, torch.Tensor) else mx.stop_gradient(y)


def gradient(name: str, edit: Callable[[Any], Any], *, step: int = 0) -> Plant:
    """Changes the accumulated gradients of parameters whose name ends with `name`."""

    def change(grads: dict[str, Any], now: int) -> dict[str, Any]:
        if now < step:
            return {}
        found = {key: edit(grad) for key, grad in grads.items() if key.endswith(name)}
        assert found, f"no gradient is named {name}"
        return found

    return add("graded", change)


def after_step(name: str, factor: float, *, step: int = 0) -> Plant:
    """Multiplies a parameter after an update, behind the optimizer's back."""

    def change(runner: Any, now: int) -> None:
        if now != step:
            return
        module = find(runner.model, name.rpartition(".")[0])
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Module):
            with torch.no_grad():
                getattr(module, last).mul_(factor)
        else:
            setattr(module, last, getattr(module, last) * factor)

    return add("stepped", change)
