"""Which event holds the value of a tensor: data flow through memory, within one step."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch

_STRIDED: Final = torch.strided

View = tuple[Any, ...]
"""How a tensor looks at its storage."""

Look = tuple[int, View]
"""Address of a tensor's storage, and how the tensor looks at it. Equal for two tensors that are the
same view of the same memory."""


@dataclass(slots=True)
class Memory:
    """What is known about one storage.

    Attributes:
        reference: Takes it out of what is known when the storage is freed, whose address is then
            used again.
        writer: Order of the event that last wrote to it, through whichever view; None as long as
            it holds whatever was there before.
        holders: For each view, the order of the event with its value; of one that is contiguous
            also for where it begins and how many elements it has.
    """

    reference: weakref.ref[torch.UntypedStorage]
    writer: int | None
    holders: dict[View, int] = field(default_factory=dict)


class Held(NamedTuple):
    """What the tape knows about a tensor's value.

    Attributes:
        order: Event that holds it, or held it before something was written to the memory.
        current: Whether it still does.
        sources: Orders that the present value comes from, where it is not current.
    """

    order: int | None
    current: bool
    sources: tuple[int, ...] = ()


class DataFlow:
    """Knows tensors by the memory that they look at, not by their Python objects.

    Autograd makes new tensor objects for views and for what it saved. Of a storage that is freed
    nothing is kept: not even a small piece between the tensors, which would tear up the room that
    they leave, so that the next ones need new memory of the system.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Memory] = {}
        self._doubted: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def clear(self) -> None:
        self._memory.clear()

    def current(self, look: Look | None) -> int | None:
        """The event with a tensor's value; None where it is not known, or no longer has it."""
        if look is None or (memory := self._memory.get(look[0])) is None:
            return None
        order = memory.holders.get(look[1])
        if order is None or (memory.writer is not None and order < memory.writer):
            return None
        return order

    def held(self, look: Look | None) -> Held | None:
        """What is known about a tensor's value; None where its memory is not known."""
        if look is None or (memory := self._memory.get(look[0])) is None:
            return None
        order = memory.holders.get(look[1])
        if order is not None and (memory.writer is None or order >= memory.writer):
            return Held(order, current=True)
        sources = {source for source in (order, memory.writer) if source is not None}
        return Held(order, False, tuple(sorted(sources)))

    def hold(self, tensor: torch.Tensor, look: Look | None, order: int, *, written: bool) -> None:
        """Says that an event has the tensor's value, and whether it wrote to memory in use."""
        if look is None:
            return
        memory = self._memory.get(look[0])
        if memory is None:
            memory = Memory(_reference(tensor.untyped_storage(), self._memory), order)
            self._memory[look[0]] = memory
        if written or memory.writer is None:
            memory.writer = order
        memory.holders[look[1]] = order
        if tensor.is_contiguous():
            memory.holders[_run_of(tensor, look)] = order

    def twin(self, tensor: torch.Tensor, look: Look | None) -> int | None:
        """The event of a tensor with the same elements in the same order and the same memory, which
        nothing was written to since.

        None where something may have been that is no operation: memory of an accelerator, for
        which people write kernels, memory that NumPy has as well (it cannot be resized), and what
        is in doubt.
        """
        if look is None or look[0] not in self._memory or look[0] in self._doubted:
            return None
        if not tensor.is_cpu:
            return None
        order = self.current(look)
        if order is None and tensor.is_contiguous():
            order = self.current((look[0], _run_of(tensor, look)))
        return order if order is not None and tensor.untyped_storage().resizable() else None

    def doubt(self, tensor: torch.Tensor) -> None:
        """Says that a tensor's memory may be written to by what is not recorded, now or later."""
        key = address_of(tensor)
        if key is not None and key not in self._doubted:
            self._doubted[key] = _reference(tensor.untyped_storage(), self._doubted)

    def blank(self, tensor: torch.Tensor) -> None:
        """Says that the tensor's memory was allocated, and not written to."""
        if address_of(tensor) is not None:
            self.blank_storage(tensor.untyped_storage())

    def blank_storage(self, storage: torch.UntypedStorage) -> None:
        """As `blank`, of all that looks at a storage."""
        self._memory[_key_of(storage)] = Memory(_reference(storage, self._memory), None)

    def is_blank(self, look: Look | None) -> bool:
        memory = self._memory.get(look[0]) if look is not None else None
        return memory is not None and memory.writer is None

    def forget(self, look: Look | None) -> None:
        """Says that a tensor's memory was written to by something that is not recorded."""
        if look is not None:
            self._memory.pop(look[0], None)


class Nodes:
    """Which forward operation each node of the autograd graph belongs to, within one step.

    Nodes are numbered as they are made, just before the operation that they differentiate runs.
    """

    def __init__(self) -> None:
        self._orders: dict[int, int] = {}
        self._local = threading.local()

    def clear(self) -> None:
        self._orders.clear()

    def made(self) -> range:
        """Numbers of the nodes that this thread has made since it was last asked."""
        count: Any = torch._C._autograd._get_sequence_nr()
        local = self._local.__dict__
        before = local.get("count", count - 1)
        local["count"] = count
        return range(before, count)

    def belong(self, numbers: range, order: int | None) -> None:
        """Says which event they differentiate; None for one that is not known."""
        if order is not None:
            for number in numbers:
                self._orders.setdefault(number, order)

    def of(self, node: Any) -> int | None:
        """Order of the event of the operation that a node differentiates."""
        return self._orders.get(node._sequence_nr())


def address_of(tensor: torch.Tensor) -> int | None:
    """Address of the storage, which stays the same for all views of it; None where it has none."""
    if tensor.layout is not _STRIDED or tensor.is_nested:
        return None
    try:
        return _key_of(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # as PyTorch says that there is none
        return None


def look_of(tensor: torch.Tensor) -> Look | None:
    """None for a tensor without storage."""
    address = address_of(tensor)
    if address is None:
        return None
    return address, (
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _run_of(tensor: torch.Tensor, look: Look) -> View:
    """Equal for two contiguous tensors with the same elements in the same order."""
    offset, _, _, *kind = look[1]
    return offset, tensor.numel(), *kind


def _key_of(storage: Any) -> int:
    return int(storage._cdata)


def _reference(
    storage: torch.UntypedStorage, known: dict[int, Any]
) -> weakref.ref[torch.UntypedStorage]:
    """A reference that takes the storage out of a table of what is known when it is freed.

    The Python object of a storage lasts as long as the storage does.
    """
    return weakref.ref(storage, partial(known.pop, _key_of(storage)))
