"""Where values may be computed later than they are recorded, many at once.

Inside a gradient transformation or a model's call: to compute twenty small arrays together takes
MLX four times as long as to compute one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from numpy.typing import NDArray

from tracediff.recorders.mlx_arrays import computed, evaluate
from tracediff.recorders.mlx_state import State, replace_everywhere
from tracediff.recording import Patches


class DeferralHooks:
    """Lets the tape compute what waits, and wraps `mx.vmap`, in which there are no values.

    Only asking for a value tells that there is none, so in there each is asked for at once.
    """

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._patches = patches

    def install(self) -> None:
        self._state.tape.waiting.read = self._read
        self._patches.on_undo(self._state.tape.settle)
        replace_everywhere(self._patches, {mx.vmap: self._wrap_vmap(mx.vmap)})

    def _wrap_vmap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def vmap(fun: Callable[..., Any], *options: Any, **named: Any) -> Any:
            return Mapped(self._state, original(fun, *options, **named))

        return vmap

    def _read(self, arrays: Sequence[mx.array]) -> list[NDArray[Any] | None]:
        read = computed if evaluate(arrays) else self._state.read
        return [read(array) for array in arrays]


class Mapped:
    """A function that `mx.vmap` made; as that, it is no method where it is a class's attribute."""

    def __init__(self, state: State, mapped: Callable[..., Any]) -> None:
        self._state = state
        self._mapped = mapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer, self._state.defers = self._state.defers, False
        try:
            return self._mapped(*args, **kwargs)
        finally:
            self._state.defers = outer
