"""Gradient transformations: the batch they are given, the loss, and the gradients they return."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import mlx.core as mx
from mlx.nn import utils as nn_utils
from mlx.nn.layers.base import Module

from tracediff.events import ROOT
from tracediff.recorders.mlx_arrays import evaluate, flatten, input_ports
from tracediff.recorders.mlx_state import Gradient, State, replace_everywhere
from tracediff.recording import Patches

_MODEL_GRADIENT: Final = nn_utils.value_and_grad
_MADE_BY_IT: Final = [
    code for code in _MODEL_GRADIENT.__code__.co_consts if isinstance(code, types.CodeType)
]
"""Code of the functions that `nn.value_and_grad` returns."""


class GradientHooks:
    """Wraps `nn.value_and_grad`, `mx.value_and_grad`, `mx.grad` and `mx.vjp`.

    Only the outermost transformation is recorded; one inside another is part of its function.
    """

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._patches = patches
        self._making = False

    def install(self) -> None:
        self._patch_existing()
        replace_everywhere(
            self._patches,
            {
                _MODEL_GRADIENT: self._wrap_model_gradient(_MODEL_GRADIENT),
                mx.value_and_grad: self._wrap_gradient(mx.value_and_grad, has_value=True),
                mx.grad: self._wrap_gradient(mx.grad, has_value=False),
                mx.vjp: self._wrap_vjp(mx.vjp),
            },
        )

    # ---- transformations -------------------------------------------------------------------

    def _wrap_model_gradient(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def value_and_grad(model: Module, fn: Callable[..., Any]) -> Callable[..., Any]:
            self._making = True  # it calls `mx.value_and_grad`, which is wrapped as well
            try:
                traced = self._traced(fn)
                plain = original(model, traced)
            finally:
                self._making = False

            def call(*args: Any, **kwargs: Any) -> Any:
                if not self._starts():
                    return plain(*args, **kwargs)
                self._state.roots.remember(model)
                with self._transforming(fn, args, kwargs):
                    value, grads = plain(*args, **kwargs)
                if self._state.skipped is not None and self._state.tape.skipping:
                    return self._state.skipped((value, grads), True)
                self._emit_model_grads(model, grads)
                return value, grads

            return _named_like(fn, call)

        return value_and_grad

    def _wrap_gradient(
        self, original: Callable[..., Any], *, has_value: bool
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def transform(fun: Callable[..., Any], *options: Any, **named: Any) -> Callable[..., Any]:
            plain: Callable[..., Any]
            if self._making:
                plain = original(fun, *options, **named)
                return plain
            plain = original(self._traced(fun), *options, **named)

            def call(*args: Any, **kwargs: Any) -> Any:
                if not self._starts():
                    return plain(*args, **kwargs)
                with self._transforming(fun, args, kwargs):
                    result = plain(*args, **kwargs)
                if self._state.skipped is not None and self._state.tape.skipping:
                    return self._state.skipped(result, has_value)
                grads = result[1] if has_value else result
                self._emit_grads(_grad_names(fun, args, grads, *options, **named))
                return result

            return call

        return transform

    def _wrap_vjp(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def vjp(fun: Callable[..., Any], primals: Any, cotangents: Any) -> Any:
            if not self._starts():
                return original(fun, primals, cotangents)
            with self._transforming(fun, primals, {}):
                return original(self._traced(fun), primals, cotangents)

        return vjp

    def _starts(self) -> bool:
        """Whether a transformation that begins now is the outermost one."""
        if not self._state.recording:
            return False
        self._state.touch()
        return self._state.gradient is None and not self._state.open

    @contextmanager
    def _transforming(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
        if self._state.roots.known:
            # Inside, parameters are tracers: a snapshot is taken and put back out here.
            self._state.tape.start_step()
        self._state.gradient = Gradient(batch=input_ports(fun, args, kwargs))
        try:
            yield
        finally:
            self._state.gradient = None
            self._state.settle()
            self._state.roots.forget_remembered()

    def _traced(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The user's function, known to be running while it does, its value recorded."""

        def traced(*args: Any, **kwargs: Any) -> Any:
            gradient = self._state.gradient
            if gradient is None or gradient.started or not self._state.recording:
                return fun(*args, **kwargs)
            gradient.started = gradient.forward = True
            self._state.name_arrays(input_ports(fun, args, kwargs))
            try:
                result = fun(*args, **kwargs)
            finally:
                gradient.forward = False
            self._emit_loss(result)
            return result

        return _named_like(fun, traced)

    # ---- values ----------------------------------------------------------------------------

    def _emit_loss(self, result: Any) -> None:
        state, tape = self._state, self._state.tape
        loss = result[0] if isinstance(result, tuple | list) and result else result
        if not isinstance(loss, mx.array) or loss.ndim:
            return
        call = tape.next_call("loss", "loss")
        state.emit_array("loss", "loss", "out", loss, call=call, inputs=state.loss_inputs)
        call = tape.next_call("trajectory", "loss")
        state.emit_array("trajectory", "loss", "out", loss, call=call)

    def _emit_model_grads(self, model: Module, grads: Any) -> None:
        roots = self._state.roots
        named = [(roots.parameter_path(model, name), g) for name, g in flatten(grads)]
        self._emit_named(named)

    def _emit_grads(self, named: Sequence[tuple[str, str, mx.array]]) -> None:
        """Records gradients of arguments, under the name of the parameter where it is one."""
        roots = self._state.roots
        paths = []
        for argument, name, grad in named:
            path = roots.parameter_path(None, name) if name else ""
            full = f"{argument}.{name}" if name else argument
            paths.append((path if roots.is_parameter(path) else full, grad))
        self._emit_named(paths)

    def _emit_named(self, named: Sequence[tuple[str, mx.array]]) -> None:
        """Records gradients of parameters, last ones first: the order of a backward pass."""
        state = self._state
        if not state.tape.skipping:
            evaluate([grad for _, grad in named])
        for path, grad in reversed(named):
            if state.operations is not None:
                state.operations.parameter_grad(path, grad)
            call = state.tape.next_call("backward", path)
            orders = state.emit_array(
                "backward", path, "grad", grad, call=call, inputs=self._flows_into(path)
            )
            state.grads_of(path).extend(orders)
            state.name_array(grad, f"{path}:grad", path)

    def _flows_into(self, path: str) -> tuple[int, ...]:
        """Orders that the gradient of a parameter can have been computed from."""
        owner = path
        while owner:
            owner = owner.rpartition(".")[0]
            if frame := self._state.tape.frame_of(owner or ROOT):
                return (*frame.grads, *frame.ins)
        return ()

    # ---- functions made before -------------------------------------------------------------

    def _patch_existing(self) -> None:
        """Records functions that `nn.value_and_grad` made before the recorder was attached.

        A notebook makes its training step in one cell and records in another.
        """
        wrap = self._wrap_model_gradient(_MODEL_GRADIENT)
        for found in gc.get_objects():
            if type(found) is not types.FunctionType or found.__code__ not in _MADE_BY_IT:
                continue
            outer = _cells(found)
            if "value_grad_fn" not in outer:
                continue
            plain = outer["value_grad_fn"].cell_contents
            for inner in gc.get_referents(plain):
                inside = _cells(inner)
                if {"model", "fn"} <= inside.keys():
                    recorded = wrap(inside["model"].cell_contents, inside["fn"].cell_contents)
                    outer["value_grad_fn"].cell_contents = _without_parameters(recorded)
                    self._patches.on_undo(setattr, outer["value_grad_fn"], "cell_contents", plain)


def _cells(function: Any) -> dict[str, types.CellType]:
    """Cells of the variables that a function takes from around it."""
    if not isinstance(function, types.FunctionType):
        return {}
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _named_like(fun: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.wraps` for functions; a module or another callable object has no name to take."""
    return functools.update_wrapper(call, fun) if isinstance(fun, types.FunctionType) else call


def _without_parameters(recorded: Callable[..., Any]) -> Callable[..., Any]:
    return lambda parameters, *args, **kwargs: recorded(*args, **kwargs)


def _grad_names(
    fun: Callable[..., Any],
    args: Sequence[Any],
    grads: Any,
    argnums: int | Sequence[int] | None = None,
    argnames: str | Sequence[str] = (),
) -> list[tuple[str, str, mx.array]]:
    """Argument, name inside it and array of each gradient that `mx.grad(fun, ...)` returned."""
    keywords = [argnames] if isinstance(argnames, str) else list(argnames)
    if argnums is None and not keywords:
        argnums = 0
    by_position, by_keyword = grads if keywords else (grads, {})
    places = [] if argnums is None else [argnums] if isinstance(argnums, int) else list(argnums)
    values = [by_position] if isinstance(argnums, int) else list(by_position or ())
    names = input_ports(fun, [mx.array(0)] * len(args), {}).names
    found = [*zip((names[place] for place in places), values, strict=True), *by_keyword.items()]
    return [(arg, name, grad) for arg, tree in found for name, grad in flatten(tree)]
