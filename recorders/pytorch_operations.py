"""Every ATen operation: forward, loss, backward and optimizer."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from tracediff.consumers import Consumers
from tracediff.events import ROOT
from tracediff.operations import ALIAS, base_name
from tracediff.recorders.operation_events import (
    Operation,
    OperationEvents,
    Place,
    issuing_lines,
)
from tracediff.recorders.pytorch_arguments import (
    Argument,
    flat,
    name_of,
    plain_arguments,
    shares,
    tensors,
)
from tracediff.recorders.pytorch_dataflow import DataFlow, Held, Nodes, address_of
from tracediff.recorders.pytorch_state import State, in_backward
from tracediff.recorders.pytorch_tensors import to_numpy
from tracediff.recording import Patches
from tracediff.trace.summary import digest

_TORCH: Final = f"{Path(torch.__file__).resolve().parent}{os.sep}"

_SKIPPED_NAMESPACES: Final = frozenset({"profiler"})
_UNINITIALISED: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Their values are whatever was in memory."""


Made = tuple[str, bytes, torch.dtype, tuple[int, ...]]
"""An operation's name, and digest, dtype and shape of a result."""


Run = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operation that reaches a kernel to a function."""

    supports_higher_order_operators = True

    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return self._run(func, args, kwargs or {})


class OperationHooks:
    """Records operations, wherever and on whichever thread they run."""

    def __init__(self, state: State, patches: Patches, consumers: Consumers) -> None:
        self._state = state
        self._patches = patches
        self._consumers = consumers
        self._events = OperationEvents(state.tape, "pytorch")
        self._flow = DataFlow()
        self._nodes = Nodes()
        self._made: dict[Made, int] = {}
        self._owners: dict[int | None, str] = {}
        self._step = -1
        self._lock = threading.RLock()

    def install(self) -> None:
        mode: Any = _Mode(self._dispatch)
        mode.__enter__()
        self._patches.on_undo(mode.__exit__, None, None, None)
        self._patches.replace(threading.Thread, "run", self._wrap_thread)
        frame = torch.utils.checkpoint._CheckpointFrame
        self._patches.replace(frame, "__init__", self._wrap_checkpoint)

    def _wrap_thread(self, original: Callable[..., None]) -> Callable[..., None]:
        def run(thread: threading.Thread) -> None:
            mode: Any = _Mode(self._dispatch)  # modes are a thread's own
            with mode:
                original(thread)

        return run

    def _wrap_checkpoint(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(frame: Any, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            def again(*inputs: Any) -> Any:
                with self._state.repeated():
                    return recompute(*inputs)

            original(frame, again, *args, **kwargs)

        return init

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not _draws(func) or not self._state.recording:
            return self._seen(func, args, kwargs)
        with self._consumers.drawing(name_of(func), lambda: issuing_lines(_TORCH)[0]):
            return self._seen(func, args, kwargs)

    def _seen(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        node = self._nodes.made()
        place = self._place(args) if self._state.recording else None
        if place is None or getattr(func, "namespace", "") in _SKIPPED_NAMESPACES:
            result = func(*args, **kwargs)
            self._unseen(func, args, kwargs)
            return result
        with self._lock:
            if self._state.repeating:
                return self._repeat(func, args, kwargs, node)
            return self._run(func, args, kwargs, place, node)

    # ---- where an operation runs -----------------------------------------------------------

    def _place(self, args: Sequence[Any]) -> Place | None:
        """Stage and module path of the operation that runs now; None if it is not recorded."""
        tape = self._state.tape
        if tape.evaluating or tape.skipping:
            return None
        if tape.step != self._step:
            self._step = tape.step
            tables = self._events, self._flow, self._nodes, self._made, self._owners
            for table in tables:
                table.clear()
        place = self._backward_place() if in_backward() else self._forward_place()
        if place is None:
            return None
        paths = self._owners_of(flat(args)) if place.phase == "optimizer" else {place.path}
        if not any(tape.policy.records_operations(tape.step, path) for path in paths or {ROOT}):
            return None
        if not place.source:
            place.source, place.user_line = issuing_lines(_TORCH)
        return place

    def _forward_place(self) -> Place | None:
        state, frame = self._state, self._state.tape.current
        if threading.get_ident() != state.thread:
            # Frames are those of the thread that runs the model: its helpers are part of the root.
            return None if frame is None else Place("forward", ROOT)
        if frame is not None and state.stage != "loss":
            return Place("forward", frame.path)
        if state.stage == "optimizer":
            return Place("optimizer", ROOT)
        if state.stage or (state.tape.root_calls and not state.evaluating):
            return Place(state.stage or "loss", frame.path if frame else ROOT)
        return None

    def _backward_place(self) -> Place:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return Place("backward", ROOT)
        known = self._nodes.of(node)
        place = None if known is None else self._events.place_of(known)
        if place is not None:
            return Place("backward", place.path, place.source, place.user_line)
        parameter = getattr(node, "variable", None)  # where a gradient is accumulated
        named = None if parameter is None else self._state.roots.named(parameter)
        return Place("backward", named.owners[0] if named and named.owners else ROOT)

    def _owners_of(self, arguments: Sequence[torch.Tensor]) -> set[str]:
        """Paths of the parameters that an update works on, as far as its arguments tell."""
        return {owner for tensor in arguments if (owner := self._owner(tensor))}

    def _owner(self, tensor: torch.Tensor) -> str:
        known = self._state.memory_names.get(address_of(tensor))
        if known:
            return known[0]
        held = self._flow.held(tensor)
        return self._owners.get(held.order, "") if held else ""

    # ---- one operation ---------------------------------------------------------------------

    def _run(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        place: Place,
        node: range,
    ) -> Any:
        arguments = list(tensors(func, args, kwargs))
        places = self._places(func, arguments, place)
        wanted = {i for share, where in places if where is not None for i in share}
        found = [
            self._order(a.tensor, place) if a.read and i in wanted else None
            for i, a in enumerate(arguments)
        ]
        bases = [self._base(a.tensor) if a.written else None for a in arguments]
        given = [self._flow.key(a.tensor) for a in arguments]
        result = func(*args, **kwargs)
        if base_name("pytorch", name_of(func)) in _UNINITIALISED:
            for tensor in flat(result):
                self._flow.blank(tensor)
            return result
        outputs = [a.tensor for a in arguments if a.written]
        written = bool(outputs)
        outputs = outputs or flat(result)
        if not written and all(self._flow.key(tensor) in given for tensor in outputs):
            self._nodes.belong(node, next((each for each in found if each is not None), None))
            return result  # nothing is new: `detach` returns what it was given
        if not written and any(self._flow.is_blank(tensor) for tensor in outputs):
            return result  # a view of memory that nothing was written to
        plain, operands = plain_arguments(func, args, kwargs)
        for share, (_, where) in zip(shares(func, arguments, outputs), places, strict=True):
            if where is None:
                continue
            own = [arguments[i] for i in share.arguments]
            inputs = [order for i in share.arguments if (order := found[i]) is not None]
            attributes = self._attributes(func, plain)
            if written:
                base = next((bases[i] for i in share.arguments if bases[i] is not None), None)
                attributes |= {} if base is None else {"inplace": base}
            else:
                attributes |= self._view_of(own, share.outputs)
            operation = Operation(name_of(func), where, inputs, plain, operands, attributes)
            self._record(operation, share.outputs, written, node)
        return result

    def _places(
        self, func: Any, arguments: Sequence[Argument], place: Place
    ) -> list[tuple[Sequence[int], Place | None]]:
        """Arguments and place of each part that is recorded as one operation; no place for another
        parameter of a list than those that are recorded."""
        found: list[tuple[Sequence[int], Place | None]] = []
        for share in shares(func, arguments, []):
            where = self._of_parameter(place, [arguments[i] for i in share.arguments])
            kept = self._state.tape.policy.records_operations(self._step, where.path)
            found.append((share.arguments, where if kept else None))
        return found

    def _of_parameter(self, place: Place, arguments: Sequence[Argument]) -> Place:
        """The same place; in an update, at the path of the parameter that it is an update of."""
        if place.phase != "optimizer":
            return place
        owners = self._owners_of([argument.tensor for argument in arguments])
        return replace(place, path=owners.pop() if len(owners) == 1 else ROOT)

    def _base(self, tensor: torch.Tensor) -> int | None:
        """Order of the event that a tensor's value comes from before it is written to."""
        held = self._flow.held(tensor)
        return (
            None
            if held is None
            else held.order
            if held.current
            else max(held.sources, default=None)
        )

    def _record(
        self, operation: Operation, outputs: Sequence[torch.Tensor], written: bool, node: range
    ) -> None:
        arrays = [to_numpy(tensor) for tensor in outputs]
        if any(array is None for array in arrays):
            self._state.tape.note("operations on tensors without plain values were left out")
        orders = self._events.outputs(operation, arrays)
        for tensor, array, order in zip(outputs, arrays, orders, strict=True):
            if array is None or order is None:
                continue
            self._flow.hold(tensor, order, written=written)
            of_value = self._state.tape.digest_of(order)
            self._made[_made(operation.name, tensor, of_value)] = order
            # A norm over all parameters is summed from numbers that belong to none of them.
            if operation.place.phase == "optimizer" and tensor.ndim:
                self._owners[order] = operation.place.path
        if orders and orders[0] is not None:
            self._nodes.belong(node, orders[0])

    def _repeat(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], node: range
    ) -> Any:
        """Runs an operation that a checkpoint computes again: its events are on the tape."""
        written = [a.tensor for a in tensors(func, args, kwargs) if a.written]
        result = func(*args, **kwargs)
        for tensor in written or flat(result):
            array = to_numpy(tensor)
            made = None if array is None else _made(name_of(func), tensor, digest(array))
            order = self._made.get(made) if made is not None else None
            if order is not None:
                self._flow.hold(tensor, order, written=bool(written))
                self._nodes.belong(node, order)
        return result

    def _unseen(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for argument in tensors(func, args, kwargs):
                if argument.written:
                    self._flow.forget(argument.tensor)

    # ---- inputs ----------------------------------------------------------------------------

    def _order(self, tensor: torch.Tensor, place: Place) -> int | None:
        """Order of the event with a tensor's value; records a leaf or an alias if there is none.

        None for a tensor without values, or whose memory was not written to.
        """
        held = self._flow.held(tensor)
        if held is not None and held.current and held.order is not None:
            return held.order
        if self._flow.is_blank(tensor):
            return None
        array = to_numpy(tensor)
        if array is None:
            return None
        order: int | None
        if held is None:
            if place.phase == "optimizer":
                place = replace(place, path=self._owner(tensor) or ROOT)
            order = self._events.leaf(place, self._leaf_name(tensor), array)
        elif held.order is not None and self._state.tape.digest_of(held.order) == digest(array):
            order = held.order
        else:
            order = self._alias(tensor, held, place)
        if order is not None:
            self._flow.hold(tensor, order, written=False)
        return order

    def _alias(self, tensor: torch.Tensor, held: Held, place: Place) -> int | None:
        attributes = {"view_of": held.sources[-1]}
        operation = Operation(
            f"aten.{ALIAS}", place, held.sources, attributes=attributes, canonical=ALIAS
        )
        return self._events.outputs(operation, [to_numpy(tensor)])[0]

    def _leaf_name(self, tensor: torch.Tensor) -> str:
        """Name of a parameter, of an argument of a module that runs, or of what is updated."""
        named = self._state.roots.named(tensor)
        if named is not None:
            return named.path
        known = self._state.memory_names.get(address_of(tensor))
        if known:
            return known[1]
        for depth, ports in enumerate(self._state.given):
            for port, value in ports.tensors if depth else ports.named():
                if value is tensor:
                    return port
        return "constant"

    # ---- what is known about it ------------------------------------------------------------

    def _attributes(self, func: Any, plain: Mapping[str, Any]) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        if _draws(func) and plain.get("dropout_p") != 0.0:
            attributes["rng"] = True
        node: Any = torch._C._current_autograd_node() if in_backward() else None
        if node is not None:
            attributes["autograd_node"] = node.name()
            if (order := self._nodes.of(node)) is not None:
                attributes["forward_order"] = order
        return attributes

    def _view_of(
        self, arguments: Sequence[Argument], outputs: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """The argument whose memory the outputs look at, if they do."""
        for argument in arguments:
            if outputs and self._flow.share_memory(argument.tensor, outputs[0]):
                base = self._base(argument.tensor)
                return {} if base is None else {"view_of": base}
        return {}


@functools.lru_cache(maxsize=4096)
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _made(name: str, tensor: torch.Tensor, of_value: bytes) -> Made:
    return name, of_value, tensor.dtype, tuple(tensor.shape)
