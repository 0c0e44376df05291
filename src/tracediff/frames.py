"""Calls of modules, and what flows into and out of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Frame:
    """One call of one module while it runs, and afterwards what its gradients flow from.

    Attributes:
        made: Orders of the outputs of the calls inside it.
    """

    path: str
    call: int
    op: str
    phase: str
    parent: Frame | None
    source: str = ""
    ins: list[int] = field(default_factory=list)
    outs: list[int] = field(default_factory=list)
    grads: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    children: list[Frame] = field(default_factory=list)
    step: int = 0

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
