"""What collectives write, which is there once the program has waited for it."""

from __future__ import annotations

from collections.abc import Sequence

from tracediff.recorders.operation_events import Operation
from tracediff.recorders.pytorch_arguments import Output
from tracediff.recorders.pytorch_dataflow import Look


class Collectives:
    """Collectives of a step whose results no operation has read so far.

    They run on threads of their own, and a program does other work before it waits for them:
    gradients of one layer are summed while those of the next are computed. To wait in its place
    could stop processes that send to each other for good. It has waited when it first reads a
    result, so that this is when the result can be recorded.
    """

    def __init__(self) -> None:
        self._pending: dict[int, tuple[Operation, Sequence[Output]]] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def clear(self) -> None:
        self._pending.clear()

    def started(self, operation: Operation, outputs: Sequence[Output]) -> None:
        """Keeps a collective; its outputs keep their memory, whose address tells them."""
        for _, look in outputs:
            if look is not None:
                self._pending[look[0]] = operation, outputs

    def take(self, look: Look | None) -> tuple[Operation, Sequence[Output]] | None:
        """The collective that wrote to the memory that a tensor looks at, and its outputs."""
        found = self._pending.get(look[0]) if look is not None else None
        if found is not None:
            for _, each in found[1]:
                if each is not None:
                    self._pending.pop(each[0], None)
        return found
