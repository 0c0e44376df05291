"""Gradients of the outputs of operations, as the backward pass of MLX comes by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx

from tracediff.recorders.mlx_arrays import is_float, map_arrays
from tracediff.recorders.mlx_state import State
from tracediff.recorders.operation_events import OperationEvents


class Cotangents:
    """Taps outputs of operations with identities that hand their cotangent over.

    MLX computes gradients without calling Python again, so the operations of a backward pass are
    not seen; what flows between them is.
    """

    def __init__(
        self,
        state: State,
        events: OperationEvents,
        muted: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._state = state
        self._events = events
        self._muted = muted
        self._users: dict[int, list[tuple[Sequence[int], Sequence[int]]]] = defaultdict(list)
        self._grads: dict[int, int] = {}

    def clear(self) -> None:
        self._users.clear()
        self._grads.clear()

    def used(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Notes that an operation computed events from events."""
        for order in set(inputs):
            self._users[order].append((inputs, outputs))

    def tapped(self, result: Any, orders: Mapping[int, int]) -> Any:
        """The same result, whose gradients are recorded when MLX computes them.

        Args:
            orders: Identity of each array in `result` -> order of its event.
        """

        def tap(array: mx.array) -> mx.array:
            if id(array) not in orders or not is_float(array):
                return array
            tapped: mx.array = self._tap(orders[id(array)])(array)
            return tapped

        return map_arrays(result, tap)

    def record(self, order: int, cotangent: mx.array) -> int | None:
        """Records the gradient of the value of a forward event."""
        with self._muted():
            values = self._state.read(cotangent)
            if values is None:
                return None
            self._grads[order] = self._events.cotangent(order, values, self._flows_into(order))
            return self._grads[order]

    def _tap(self, order: int) -> Any:
        step = self._state.tape.step

        def vjp(primals: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
            # After an update the forward event is in a step that is closed.
            if self._state.recording and self._state.tape.step == step:
                self.record(order, cotangent)
            return cotangent

        identity = mx.custom_function(lambda array: array)
        identity.vjp(vjp)
        return identity

    def _flows_into(self, order: int) -> list[int]:
        """What a gradient is computed from: those of all users, and what they computed with."""
        found: set[int] = set()
        for inputs, outputs in self._users[order]:
            grads = [self._grads[each] for each in outputs if each in self._grads]
            if grads:
                found |= {*grads, *inputs, *outputs}
        return sorted(found)
