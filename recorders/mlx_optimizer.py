"""Optimizer updates: gradients, hyper-parameters, state, update and parameter of each."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.optimizers import MultiOptimizer, Optimizer, clip_grad_norm
from numpy.typing import NDArray

from tracediff.recorders.mlx_arrays import evaluate, flatten, scalar
from tracediff.recorders.mlx_roots import parameters
from tracediff.recorders.mlx_state import ClassHooks, State, replace_everywhere
from tracediff.recording import Patches

_STATE_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "Adamax": {"m": "exp_avg", "v": "exp_inf"},
    "Adam": {"m": "exp_avg", "v": "exp_avg_sq"},
    "Lion": {"m": "exp_avg"},
    "SGD": {"v": "momentum_buffer"},
    "Muon": {"v": "momentum_buffer"},
    "RMSprop": {"v": "square_avg"},
    "Adagrad": {"v": "sum"},
    "AdaDelta": {"v": "square_avg", "u": "acc_delta"},
}
"""Names of the state of an optimizer class and of those derived from it, as others call them."""

_HYPER: Final = (
    *("weight_decay", "eps", "momentum", "dampening", "nesterov"),
    *("bias_correction", "alpha", "rho"),
)


@dataclass(frozen=True, slots=True)
class Updated:
    """A parameter that an update is about to change."""

    name: str
    path: str
    optimizer: Optimizer
    grad: mx.array
    before: mx.array


class OptimizerHooks:
    """Records each outermost `update` or `apply_gradients`; a step of the trace ends with it."""

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._patches = patches
        self._inside = False
        self._loaded: set[str] = set()
        names = ("update", "apply_gradients")
        self._classes = ClassHooks(Optimizer, names, self._wrap_update, patches)

    def install(self) -> None:
        # `type(o)`, as `isinstance` would wake up lazy proxies.
        self._state.optimizer_seen = any(issubclass(type(o), Optimizer) for o in gc.get_objects())
        self._patches.replace(Optimizer, "__init__", self._wrap_init)
        self._classes.install()
        replace_everywhere(self._patches, {clip_grad_norm: self._wrap_clip(clip_grad_norm)})

    def _wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._state.optimizer_seen = True
            original(optimizer, *args, **kwargs)

        return init

    def _wrap_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(grads: Any, max_norm: float) -> Any:
            outer, self._state.stage = self._state.stage, "optimizer"
            try:
                clipped, norm = original(grads, max_norm)
            finally:
                self._state.stage = outer
            if self._state.recording:
                self._state.touch()
                call = self._state.tape.next_call("optimizer", "clip_grad_norm")
                attributes = {"max_norm": float(scalar(max_norm))}
                self._state.emit_array(
                    "optimizer", "clip_grad_norm", "out", norm, call=call, attributes=attributes
                )
            return clipped, norm

        return clip

    # ---- one update ------------------------------------------------------------------------

    def _wrap_update(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        if name == "update":

            def update(optimizer: Optimizer, model: Module, gradients: Any) -> Any:
                return self._run(optimizer, gradients, model, original, (model, gradients))

            return update

        def apply_gradients(optimizer: Optimizer, gradients: Any, parameters: Any) -> Any:
            return self._run(optimizer, gradients, parameters, original, (gradients, parameters))

        return apply_gradients

    def _run(
        self,
        optimizer: Optimizer,
        gradients: Any,
        parameters: Any,
        original: Callable[..., Any],
        args: tuple[Any, Any],
    ) -> Any:
        if self._inside or not self._state.recording:
            return original(optimizer, *args)
        self._state.touch()
        if self._state.tape.skipping:
            _count_update(optimizer)
            self._state.tape.advance()
            return None if isinstance(args[0], Module) else args[1]
        updated = list(self._updated(optimizer, gradients, parameters))
        self._load_state(updated)
        self._inside = True
        self._state.stage = "optimizer"
        self._name_arrays(updated, gradients, parameters)
        try:
            result = original(optimizer, *args)
        finally:
            self._inside = False
            self._state.stage = ""
        after = parameters if result is None else result
        self._record(optimizer, updated, _by_name(after))
        return result

    def _updated(self, optimizer: Optimizer, gradients: Any, parameters: Any) -> Iterator[Updated]:
        model = parameters if isinstance(parameters, Module) else None
        before = _by_name(parameters)
        owners = dict(_owners(optimizer, gradients))
        for name, grad in flatten(gradients):
            path = self._state.roots.parameter_path(model, name)
            # New handles: an in-place operation on the arrays must not alter what is recorded.
            grad, parameter = mx.array(grad), mx.array(before[name])
            yield Updated(name, path, owners.get(name, optimizer), grad, parameter)

    def _name_arrays(self, updated: Sequence[Updated], gradients: Any, parameters: Any) -> None:
        """Lets operations on these arrays be told by the parameter that they belong to."""
        name, before, grads = self._state.name_array, _by_name(parameters), dict(flatten(gradients))
        for item in updated:
            name(before[item.name], item.path, item.path)
            name(grads[item.name], f"{item.path}:grad", item.path)
            for key, array in _state_arrays(item.optimizer, item.name):
                name(array, f"{item.path}:state.{key}", item.path)
            for key in ("step", "learning_rate"):
                name(item.optimizer.state.get(key), key)

    def _load_state(self, updated: Sequence[Updated]) -> None:
        """Records the state that an optimizer already has when its first update is seen."""
        for item in updated:
            if item.path in self._loaded:
                continue
            self._loaded.add(item.path)
            if scalar(item.optimizer.state.get("step", 0)):
                for name, array in _state_arrays(item.optimizer, item.name):
                    self._state.emit_array("loading", item.path, f"state.{name}", array)

    def _record(
        self, optimizer: Optimizer, updated: Sequence[Updated], after: Mapping[str, mx.array]
    ) -> None:
        computed: list[mx.array] = []
        for item in updated:
            state = _state_arrays(item.optimizer, item.name)
            computed += [item.grad, item.before, after[item.name], *(array for _, array in state)]
        evaluate(computed)
        inputs: list[list[int]] = []
        square = 0.0
        for item in updated:
            grad = self._state.read(item.grad)
            if grad is None:
                return  # while `mx.compile` traces: not an update of its own
            inputs.append(self._record_given(item, grad))
            square += self._state.tape.norm_of(inputs[-1][0]) ** 2
        self._trajectory("grad_norm", np.sqrt(square))
        for index, rate in enumerate(_rates(optimizer)):
            self._trajectory(f"lr[{index}]" if index else "lr", rate)
        for item, orders in zip(updated, inputs, strict=True):
            self._record_result(item, orders, after[item.name])
        self._state.tape.advance()

    def _record_given(self, item: Updated, grad: NDArray[Any]) -> list[int]:
        flows = tuple(self._state.grads_of(item.path))
        return [
            self._emit(item, "grad", grad, flows),
            self._emit(item, "hyper", hyper_parameters(item.optimizer), ()),
        ]

    def _record_result(self, item: Updated, inputs: list[int], after: mx.array) -> None:
        read = self._state.read
        orders = list(inputs)
        for name, array in _state_arrays(item.optimizer, item.name):
            if (values := read(array)) is not None:
                orders.append(self._emit(item, f"state.{name}", values, inputs))
        old, new = read(item.before), read(after)
        if old is not None and new is not None:
            update = self._emit(item, "update", np.asarray(new - old), orders)
            self._emit(item, "param", new, [update])

    def _emit(self, item: Updated, port: str, value: Any, inputs: Sequence[int]) -> int:
        op = type(item.optimizer).__name__
        return self._state.tape.emit("optimizer", item.path, port, value, op=op, inputs=inputs)

    def _trajectory(self, path: str, value: float) -> None:
        call = self._state.tape.next_call("trajectory", path)
        self._state.tape.emit("trajectory", path, "out", np.asarray(value, np.float64), call=call)


def _count_update(optimizer: Optimizer) -> None:
    """All that an update leaves behind where a rerun skips it: its count, and scheduled values."""
    for part in optimizer.optimizers if isinstance(optimizer, MultiOptimizer) else ():
        _count_update(part)
    if "step" in optimizer.state:
        for name, schedule in optimizer._schedulers.items():
            optimizer.state[name] = schedule(optimizer.state["step"])
        optimizer.state["step"] = optimizer.state["step"] + 1
        mx.eval(optimizer.state["step"])


def _by_name(tree: Any) -> dict[str, mx.array]:
    return dict(parameters(tree) if isinstance(tree, Module) else flatten(tree))


def _owners(optimizer: Optimizer, gradients: Any) -> Iterator[tuple[str, Optimizer]]:
    """The optimizer that updates each parameter: one of several where they are combined."""
    if isinstance(optimizer, MultiOptimizer):
        parts = optimizer._split_dictionary(gradients)
        for child, part in zip(optimizer.optimizers, parts, strict=True):
            yield from _owners(child, part)
    else:
        yield from ((name, optimizer) for name, _ in flatten(gradients))


def _rates(optimizer: Optimizer) -> Iterator[float]:
    if isinstance(optimizer, MultiOptimizer):
        for child in optimizer.optimizers:
            yield from _rates(child)
    elif "learning_rate" in optimizer.state:
        yield float(scalar(optimizer.state["learning_rate"]))


def _state_arrays(optimizer: Optimizer, name: str) -> Iterator[tuple[str, mx.array]]:
    """Arrays that an optimizer keeps for a parameter; its step counter is a hyper-parameter."""
    state: Any = optimizer.state
    for key in name.split("."):
        state = state[int(key)] if isinstance(state, list) else state.get(key, {})
    if getattr(optimizer, "momentum", 1) == 0:
        return  # it keeps zeros that it never reads
    classes = (cls.__name__ for cls in type(optimizer).__mro__)
    names = next((_STATE_NAMES[cls] for cls in classes if cls in _STATE_NAMES), {})
    for key, array in flatten(state):
        yield names.get(key, key), array


def hyper_parameters(optimizer: Optimizer) -> dict[str, Any]:
    """What the latest update depended on besides tensors, as plain numbers.

    Optimizers evaluate their schedules before they use them, so that the rate they hold after an
    update is the one that it was made with. `step` is the number of the update, from 1.
    """
    hyper: dict[str, Any] = {}
    if "learning_rate" in optimizer.state:
        hyper["lr"] = scalar(optimizer.state["learning_rate"])
    betas = getattr(optimizer, "betas", None)
    if betas is not None:
        hyper["beta1"], hyper["beta2"] = (scalar(beta) for beta in betas)
    for name in _HYPER:
        value = scalar(getattr(optimizer, name, None))
        if value is not None:
            hyper[name] = list(value) if isinstance(value, tuple) else value
    hyper["step"] = int(scalar(optimizer.state["step"]))
    return hyper
