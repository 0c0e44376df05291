"""Compiled functions: run as plain Python where there is something to record inside."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
import numpy as np

from tracediff.recorders.mlx_arrays import random_key
from tracediff.recorders.mlx_state import State, Touched, replace_everywhere
from tracediff.recording import Patches

_LIBRARIES: Final = ("mlx", "mlx_lm", "mlx_vlm")

_attached: list[State] = []
"""States of the recordings that are attached, the innermost last. A function that was compiled
during one recording (a module that it imported) may be called in the next."""


class CompileHooks:
    """Decides for each compiled function whether it must run uncompiled to be seen inside.

    Modules compile small functions of their own, such as activations. They stay compiled, so that
    they round as they do without a recorder; a training step that is compiled as a whole does not.
    """

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._patches = patches

    def install(self) -> None:
        _attached.append(self._state)
        self._patches.on_undo(_attached.remove, self._state)
        name = _compiled_before()
        self._state.defers = not name  # inside of what `mx.vmap` made there are no values
        if name and _compiles():
            self._state.tape.note(
                f"{name} was compiled or transformed before recording began: "
                "mx.compile was disabled while recording"
            )
            mx.disable_compile()
            self._patches.on_undo(mx.enable_compile)
        replace_everywhere(self._patches, {mx.compile: self._wrap(mx.compile)})

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(fun: Callable[..., Any], *options: Any, **named: Any) -> Any:
            compiled = original(fun, *options, **named)
            outputs = named.get("outputs", options[1] if len(options) > 1 else None)
            changes_state = outputs is not None and not _is_random_state(outputs)
            return Compiled(fun, compiled, changes_state)

        return compile


class Compiled:
    """A compiled function that finds out at its first call whether to run compiled.

    An object and no function, as what `mx.compile` returns is no method either when it is an
    attribute of a class.
    """

    def __init__(self, fun: Callable[..., Any], compiled: Any, changes_state: bool) -> None:
        self._fun = fun
        self._compiled = compiled
        self._changes_state = changes_state
        self._state: State | None = None
        self._is_eager: bool | None = None
        self._name = getattr(fun, "__name__", type(fun).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = _attached[-1] if _attached else None
        if state is None or not state.recording:
            return self._compiled(*args, **kwargs)
        if state is not self._state:
            self._state, self._is_eager = state, None
        if self._is_eager is None:
            return self._first(state, args, kwargs)
        if self._is_eager:
            return self._fun(*args, **kwargs)
        if state.operations is None:
            return self._compiled(*args, **kwargs)
        return state.operations.opaque(self._name, self._compiled, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def _first(self, state: State, args: Any, kwargs: Any) -> Any:
        """Tries the function uncompiled, to see whether there is something to record in it.

        Compiled functions are pure but for the state that they declare, and lazy: a trial costs
        nothing and changes nothing except the state of the generator, which is restored.
        """
        if self._changes_state:  # of the model or the optimizer: a trial would leave its marks
            self._run_eagerly(state)
            return self(*args, **kwargs)
        key = random_key()
        if key is None:  # another function is being compiled around this one
            return self._compiled(*args, **kwargs)
        outer, state.trying = state.trying, True
        try:
            self._fun(*args, **kwargs)
            self._is_eager = False
        except Touched:
            self._run_eagerly(state)
            if outer:
                raise
        finally:
            state.trying = outer
            if (now := random_key()) is not None and not np.array_equal(key, now):
                mx.random.seed((int(key[0]) << 32) | int(key[1]))
        return self(*args, **kwargs)

    def _run_eagerly(self, state: State) -> None:
        self._is_eager = True
        state.tape.note(
            f"{self._name} is compiled by mx.compile and ran uncompiled while recording: "
            "a compiled run may round differently"
        )


def _is_random_state(outputs: Any) -> bool:
    if isinstance(outputs, list | tuple):
        return all(output is mx.random.state for output in outputs)
    return outputs is mx.random.state


def _compiled_before() -> str:
    """Name of a function, of no library, that was compiled already; "" if there is none.

    MLX has one class for all transformed functions, so a user's own `mx.grad` or `mx.vmap` counts
    as well.
    """
    transformed = type(mx.compile(lambda: None))
    for found in gc.get_objects():
        if type(found) is transformed:
            for inner in gc.get_referents(found):
                if isinstance(inner, types.FunctionType) and not _is_library(inner):
                    return inner.__qualname__
    return ""


def _compiles() -> bool:
    """Whether compilation is enabled: a compiled function is then traced once for two calls."""
    calls = []

    def identity(array: mx.array) -> mx.array:
        calls.append(array.shape)
        return array

    compiled = mx.compile(identity)
    compiled(mx.array(0.0))
    compiled(mx.array(0.0))
    return len(calls) == 1


def _is_library(function: types.FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] in (*_LIBRARIES, __name__.split(".")[0])
