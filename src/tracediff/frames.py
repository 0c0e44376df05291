"""Calls of modules, and what flows into and out of them."""

from __future__ import annotations


class Frame:
    """One call of one module while it runs, and afterwards what its gradients flow from.

    Attributes:
        made: Orders of the outputs of the calls inside it.
    """

    # Written out: as a dataclass, it takes twice as long to make.

    __slots__ = (
        *("path", "call", "op", "phase", "parent", "source", "step"),
        *("ins", "outs", "grads", "made", "children"),
    )

    def __init__(
        self,
        path: str,
        call: int,
        op: str,
        phase: str,
        parent: Frame | None,
        source: str,
        step: int,
    ) -> None:
        self.path = path
        self.call = call
        self.op = op
        self.phase = phase
        self.parent = parent
        self.source = source
        self.step = step
        self.ins: list[int] = []
        self.outs: list[int] = []
        self.grads: list[int] = []
        self.made: list[int] = []
        self.children: list[Frame] = []

    def available(self) -> tuple[int, ...]:
        """Orders of what code in this call can have computed with so far."""
        return (*self.ins, *self.made)

    def downstream(self) -> tuple[int, ...]:
        """Orders of what the gradient of this call's output can have been computed from."""
        if self.parent is None:
            return tuple(self.outs)
        orders = [*self.outs, *self.parent.grads]
        for frame in self.parent.children[self.parent.children.index(self) + 1 :]:
            orders += frame.grads
            orders += frame.outs
        return tuple(orders)
