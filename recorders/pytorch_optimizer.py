"""Optimizer updates: gradients, hyper-parameters, state, update and parameter of each."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tracediff.deferred import Deferred
from tracediff.recorders.identity import ByIdentity
from tracediff.recorders.pytorch_dataflow import address_of
from tracediff.recorders.pytorch_shards import local_part
from tracediff.recorders.pytorch_state import State
from tracediff.recorders.pytorch_tensors import out_of_sight, scalar
from tracediff.recording import Patches

_IMPLEMENTATION: Final = frozenset(
    {"betas", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
)
"""Settings that are recorded under other names, or choose an implementation of the same update."""


@dataclass(frozen=True, slots=True)
class Updated:
    """A parameter that an update is about to change."""

    index: int
    parameter: torch.Tensor
    before: torch.Tensor
    inputs: tuple[int, ...]


class OptimizerHooks:
    """Records each `Optimizer.step`; a step of the trace ends with it."""

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._patches = patches
        self._pending: list[Updated] = []
        self._loaded: ByIdentity[bool] = ByIdentity()
        self._copies: ByIdentity[torch.Tensor] = ByIdentity()

    def install(self) -> None:
        gc.collect()  # an optimizer that nobody holds any more does not count
        # `type(o)`, as `isinstance` would wake up lazy proxies.
        self._state.optimizer_seen = any(issubclass(type(o), Optimizer) for o in gc.get_objects())
        self._patches.replace(Optimizer, "__init__", self._wrap_init)
        self._patches.on_undo(register_optimizer_step_pre_hook(self._before).remove)
        self._patches.on_undo(register_optimizer_step_post_hook(self._after).remove)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            self._patches.replace(owner, "clip_grad_norm_", self._wrap_clip)

    def _wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._state.optimizer_seen = True
            original(optimizer, *args, **kwargs)

        return init

    def _wrap_clip(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
            outer, self._state.stage = self._state.stage, "optimizer"
            clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            for parameter in clipped:
                if (named := self._state.roots.named(parameter)) is not None:
                    self._name_memory(named.path, parameter, {})
            try:
                norm = original(clipped, max_norm, *args, **kwargs)
            finally:
                self._state.stage = outer
            if self._state.recording:
                call = self._state.tape.next_call("optimizer", "clip_grad_norm")
                attributes = {"max_norm": float(max_norm)}
                self._state.emit_tensor(
                    "optimizer", "clip_grad_norm", "out", norm, call=call, attributes=attributes
                )
            return norm

        return clip

    # ---- one update ------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._pending = []
        if not self._state.recording:
            return
        op, grads = type(optimizer).__name__, list[int]()
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        for index, (parameter, group) in enumerate(parameters):
            if parameter.grad is None and not has_closure:
                continue
            path = self._path(index, parameter)
            self._name_memory(path, parameter, optimizer.state.get(parameter, {}))
            inputs = self._load_state(optimizer, path, parameter)
            found = parameter.grad
            grad, shard = (None, "") if found is None else self._state.read_part(found)
            if found is not None and grad is not None:
                twin = self._state.twin(found)
                inputs.append(self._emit(parameter, path, "grad", grad, op, (), shard, twin))
                grads.append(inputs[-1])
            hyper = hyper_parameters(optimizer, group, parameter)
            inputs.append(self._emit(parameter, path, "hyper", hyper, op=op))
            before = self._copied(parameter)
            self._pending.append(Updated(index, parameter, before, tuple(inputs)))
        square = sum(self._state.tape.norm_of(order) ** 2 for order in grads)
        self._trajectory("grad_norm", np.float64(np.sqrt(square)))
        for index, group in enumerate(optimizer.param_groups):
            self._trajectory(f"lr[{index}]" if index else "lr", np.float64(scalar(group["lr"])))
        self._state.stage = "optimizer"

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._state.stage = ""
        self._state.memory_names.clear()
        if not self._state.recording:
            return
        op = type(optimizer).__name__
        for updated in self._pending:
            parameter, inputs = updated.parameter, list(updated.inputs)
            path = self._path(updated.index, parameter)  # a closure may have named it by now
            for name, value, shard, twin in self._state_tensors(optimizer, parameter):
                port = f"state.{name}"
                order = self._emit(parameter, path, port, value, op, updated.inputs, shard, twin)
                inputs.append(order)
            after, shard = self._state.read_part(parameter)
            with out_of_sight():
                torch.sub(local_part(parameter).detach(), updated.before, out=updated.before)
            update, _ = self._state.read_part(updated.before)
            if update is not None:
                inputs = [self._emit(parameter, path, "update", update, op, inputs, shard)]
            if after is not None:
                twin = self._state.twin(parameter)
                self._emit(parameter, path, "param", after, op, inputs, shard, twin)
        self._pending = []
        self._state.tape.advance()

    def _copied(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of the parameter, in memory that is kept for it: new memory costs as much."""
        with out_of_sight():
            value = local_part(parameter).detach()
            copy = self._copies.get(parameter)
            if copy is None or _kind_of(copy) != _kind_of(value):
                copy = torch.empty_like(value)
                self._copies.set(parameter, copy)
            return copy.copy_(value)

    def _name_memory(self, path: str, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Lets operations on these tensors be told by the parameter that they belong to."""
        names = self._state.memory_names
        names[address_of(parameter)] = path, path
        if parameter.grad is not None:
            names[address_of(parameter.grad)] = path, f"{path}:grad"
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                owner = path if value.ndim else ""  # a counter is no part of the arithmetic
                names[address_of(value)] = owner, f"{path}:state.{name}"

    def _path(self, index: int, parameter: torch.Tensor) -> str:
        """Path of a parameter, or its place in the optimizer if it belongs to no root."""
        named = self._state.roots.named(parameter)
        return named.path if named else f"param[{index}]"

    def _load_state(self, optimizer: Optimizer, path: str, parameter: torch.Tensor) -> list[int]:
        """Records the state that an optimizer already has when its first update is seen."""
        if self._loaded.get(parameter):
            return []
        self._loaded.set(parameter, True)
        return [
            self._state.tape.emit("loading", path, f"state.{name}", value, shard=shard)
            for name, value, shard, _ in self._state_tensors(optimizer, parameter)
        ]

    def _state_tensors(
        self, optimizer: Optimizer, parameter: torch.Tensor
    ) -> Iterator[tuple[str, Any, str, int | None]]:
        """Tensors that an optimizer keeps for a parameter, each with which part of it this is and
        with the event that holds its value; its step counter is a hyper-parameter."""
        state: Mapping[str, Any] = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if name != "step" and isinstance(value, torch.Tensor):
                read, shard = self._state.read_part(value)
                if read is not None:
                    yield name, read, shard, self._state.twin(value)

    def _emit(
        self,
        parameter: torch.Tensor,
        path: str,
        port: str,
        value: Any,
        op: str,
        inputs: Sequence[int] = (),
        shard: str = "",
        twin: int | None = None,
    ) -> int:
        named = self._state.roots.named(parameter)
        own = tuple(local_part(parameter).shape)
        shape = value.array.shape if isinstance(value, Deferred) else np.shape(value)
        dims = named.dims if named and shape == own else ()
        return self._state.tape.emit(
            "optimizer", path, port, value, op=op, dims=dims, shard=shard, inputs=inputs, twin=twin
        )

    def _trajectory(self, path: str, value: np.float64) -> None:
        call = self._state.tape.next_call("trajectory", path)
        self._state.tape.emit("trajectory", path, "out", np.asarray(value), call=call)


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def hyper_parameters(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """What the coming update of a parameter depends on besides tensors, as plain numbers.

    `step` is the number of the update, from 1, where the optimizer counts them.
    """
    names = [name for name in optimizer.defaults if name not in _IMPLEMENTATION and name in group]
    hyper = {name: scalar(group[name]) for name in names}
    if "betas" in group:
        hyper["beta1"], hyper["beta2"] = (scalar(beta) for beta in group["betas"])
        hyper["bias_correction"] = True
    state = optimizer.state.get(parameter, {})
    if "betas" in group or "step" in state:
        hyper["step"] = int(scalar(state.get("step", 0))) + 1
    return hyper
