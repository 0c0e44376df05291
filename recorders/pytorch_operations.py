"""Every ATen operation: forward, loss, backward and optimizer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from numpy.typing import NDArray

from tracediff.consumers import Consumers
from tracediff.events import ROOT
from tracediff.operations import ALIAS, CONSTANT
from tracediff.recorders.operation_events import (
    Lines,
    Operation,
    OperationEvents,
    Place,
    issuing_lines,
)
from tracediff.recorders.pytorch_arguments import (
    Argument,
    Call,
    Function,
    Output,
    Part,
    blank_of,
    flat,
    function_of,
    given,
    operands_of,
    outputs_of,
    shares,
)
from tracediff.recorders.pytorch_collectives import Collectives
from tracediff.recorders.pytorch_dataflow import (
    DataFlow,
    Held,
    Look,
    Nodes,
    address_of,
    look_of,
)
from tracediff.recorders.pytorch_dispatch import install_dispatch, watch_resizing, watch_sharing
from tracediff.recorders.pytorch_modules import ModuleHooks
from tracediff.recorders.pytorch_state import State, in_backward
from tracediff.recorders.pytorch_tensors import to_numpy
from tracediff.recording import Patches
from tracediff.trace.summary import digest

_TORCH: Final = f"{Path(torch.__file__).resolve().parent}{os.sep}"

Made = tuple[str, bytes, torch.dtype, tuple[int, ...]]
"""An operation's name, and digest, dtype and shape of a result."""


class OperationHooks:
    """Records operations, wherever and on whichever thread they run."""

    def __init__(self, state: State, patches: Patches, consumers: Consumers) -> None:
        self._state = state
        self._patches = patches
        self._consumers = consumers
        self._events = OperationEvents(state.tape, "pytorch")
        self._flow = DataFlow()
        self._nodes = Nodes()
        self._collectives = Collectives()
        self._lines = Lines(_TORCH, ModuleHooks._record.__code__)
        self._made: dict[Made, int] = {}
        self._latest: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
        self._owners: dict[int | None, str] = {}
        self._recorded: dict[str, bool] = {}
        self._only_digests = state.tape.policy.only_digests
        self._step = -1
        self._lock = threading.RLock()

    def install(self) -> None:
        install_dispatch(self._dispatch, self._state, self._patches)
        watch_resizing(self._blanked, self._patches)
        if self._only_digests:
            self._state.twin = self._twin
            watch_sharing(self._flow.doubt, self._patches)

    def _blanked(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            if self._step == self._state.tape.step:
                self._flow.blank_storage(storage)

    def _twin(self, tensor: torch.Tensor) -> int | None:
        """The event of an operation in this step that holds a tensor's value."""
        with self._lock:
            if self._step != self._state.tape.step:
                return None
            return self._flow.twin(tensor, look_of(tensor))

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        call = Call(func, function_of(func), args, kwargs, self._nodes.made())
        recording = self._state.recording
        if not call.function.draws or not recording:
            return self._seen(call, recording)
        with self._consumers.drawing(call.function.name, lambda: issuing_lines(_TORCH)[0]):
            return self._seen(call, recording)

    def _seen(self, call: Call, recording: bool) -> Any:
        place = self._place(call.args) if recording else None
        if place is None or call.function.skipped:
            result = call.run()
            if call.function.writes:
                self._forget(call)
            if call.function.doubtful:
                self._doubt(call, result)
            return result
        with self._lock:
            if self._state.repeating:
                return self._repeat(call)
            return self._run(call, place)

    # ---- where an operation runs -----------------------------------------------------------

    def _place(self, args: Sequence[Any]) -> Place | None:
        """Stage and module path of the operation that runs now; None if it is not recorded."""
        tape = self._state.tape
        if tape.evaluating or tape.skipping:
            return None
        if tape.step != self._step:
            self._step = tape.step
            for table in (
                self._events, self._flow, self._nodes, self._collectives, self._lines
            ):  # fmt: skip
                table.clear()
            for known in (self._made, self._latest, self._owners, self._recorded):
                known.clear()
        place = self._backward_place() if in_backward() else self._forward_place()
        if place is None:
            return None
        if place.phase != "optimizer" or tape.policy.only is None:
            recorded = self._records(place.path)
        else:
            owners = self._owners_of(map(look_of, flat(args)))
            recorded = any(map(self._records, owners or {ROOT}))
        if not recorded:
            return None
        if not place.source:
            inside = place.phase == "forward" and threading.get_ident() == self._state.thread
            call = tape.current if inside else None
            place.source, place.user_line = self._lines.inside(call)
        return place

    def _records(self, path: str) -> bool:
        """Whether operations of a module are recorded in this step."""
        found = self._recorded.get(path)
        if found is None:
            found = self._state.tape.policy.records_operations(self._step, path)
            self._recorded[path] = found
        return found

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

    def _owners_of(self, looks: Iterable[Look | None]) -> set[str]:
        """Paths of the parameters that an update works on, as far as its arguments tell."""
        return {owner for look in looks if (owner := self._owner(look))}

    def _owner(self, look: Look | None) -> str:
        known = self._state.memory_names.get(look and look[0])
        if known:
            return known[0]
        held = self._flow.held(look)
        return self._owners.get(held.order, "") if held else ""

    # ---- one operation ---------------------------------------------------------------------

    def _run(self, call: Call, place: Place) -> Any:
        arguments, plain, operands = given(call.function, call.args, call.kwargs)
        function = call.function
        parts = self._parts(function, arguments, place)
        found = self._inputs(arguments, parts, place)
        bases: list[int | None] = []
        if function.writes:
            bases = [self._base(a.look) if a.written else None for a in arguments]
            self._replaced(arguments)
        result = call.run()
        if function.doubtful:
            _wait(function.name, result)
            self._doubt(call, result)
        blank = blank_of(function, result)
        for tensor in blank:
            self._flow.blank(tensor)
        outputs: list[Output] = []
        looks: list[Look | None] = []
        if function.writes and not function.uninitialised:
            outputs = [(a.tensor, look_of(a.tensor)) for a in arguments if a.written]
        written = bool(outputs)
        if not written:
            values = flat(result)
            if blank:
                values = [value for value in values if all(value is not each for each in blank)]
            outputs = [(tensor, look_of(tensor)) for tensor in values]
            looks = [argument.look for argument in arguments]
            if all(look in looks for _, look in outputs):
                self._nodes.belong(call.node, next((o for o in found if o is not None), None))
                return result  # `detach` returns what it was given
            for _, look in outputs:
                if self._flow.is_blank(look):
                    return result  # a view of memory that nothing was written to
        shared = outputs_of(function, arguments, parts, outputs)
        for element, (part, own) in enumerate(zip(parts, shared, strict=True)):
            if part.place is None:
                self._unseen(own if written else ())
                continue
            inputs = [order for i in part.arguments if (order := found[i]) is not None]
            attributes = self._attributes(function, part.place, plain)
            if written:
                base = next((bases[i] for i in part.arguments if bases[i] is not None), None)
                if base is not None:
                    attributes["inplace"] = base
            else:
                base = self._viewed([looks[i] for i in part.arguments], own)
                if base is not None:
                    attributes["view_of"] = base
            data = operands_of(operands, element) if function.on_lists else operands
            operation = Operation(function.name, part.place, inputs, plain, data, attributes)
            if function.collective:
                self._collectives.started(operation, own)
            else:
                self._record(operation, own, written, call.node)
        return result

    def _parts(self, function: Function, arguments: Sequence[Argument], place: Place) -> list[Part]:
        if not function.on_lists and place.phase != "optimizer":
            return [Part(range(len(arguments)), place)]  # `_place` has seen that it is recorded
        found = []
        for share in shares(function, arguments):
            where = place
            if place.phase == "optimizer":  # each parameter of a list is an operation of its own
                where = self._of_parameter(place, [arguments[i] for i in share])
            found.append(Part(share, where if self._records(where.path) else None))
        return found

    def _of_parameter(self, place: Place, arguments: Sequence[Argument]) -> Place:
        """The same place, at the path of the parameter that it is an update of."""
        owners = self._owners_of([argument.look for argument in arguments])
        path = owners.pop() if len(owners) == 1 else ROOT
        return Place(place.phase, path, place.source, place.user_line)

    def _inputs(
        self, arguments: Sequence[Argument], parts: Sequence[Part], place: Place
    ) -> list[int | None]:
        """Orders of the events with the values of the arguments that are read."""
        if len(parts) == 1 and parts[0].place is not None:
            return [self._order(each, place) if each.read else None for each in arguments]
        orders: list[int | None] = [None] * len(arguments)
        wanted = [part.arguments for part in parts if part.place is not None]
        for i in sorted({i for part in wanted for i in part}):
            if arguments[i].read:
                orders[i] = self._order(arguments[i], place)
        return orders

    def _base(self, look: Look | None) -> int | None:
        """Order of the event that a tensor's value comes from before it is written to."""
        order = self._flow.current(look)
        if order is not None:
            return order
        held = self._flow.held(look)
        return None if held is None else max(held.sources, default=None)

    def _record(
        self,
        operation: Operation,
        outputs: Sequence[Output],
        written: bool,
        node: range,
    ) -> None:
        tape, flow, twins = self._state.tape, self._flow, []
        arrays = [to_numpy(tensor) for tensor, _ in outputs]
        if self._only_digests and not written:
            twins = [flow.twin(tensor, look) for tensor, look in outputs]
        orders = self._events.outputs(operation, arrays, twins)
        for (tensor, look), order in zip(outputs, orders, strict=True):
            if order is None:
                tape.note("operations on tensors without plain values were left out")
                self._unseen([(tensor, look)] if written else ())
                continue
            flow.hold(tensor, look, order, written=written)
            self._latest.append((operation.name, tensor.dtype, tensor.shape, order))
            # A norm over all parameters is summed from numbers that belong to none of them.
            if operation.place.phase == "optimizer" and tensor.ndim:
                self._owners[order] = operation.place.path
        if orders and orders[0] is not None:
            self._nodes.belong(node, orders[0])

    def _repeat(self, call: Call) -> Any:
        """Runs an operation that a checkpoint computes again: its events are on the tape."""
        arguments = given(call.function, call.args, call.kwargs).arguments
        written = [argument.tensor for argument in arguments if argument.written]
        result = call.run()
        if call.function.doubtful:
            self._doubt(call, result)
        if call.function.collective:
            self._forget(call)
            return result
        for tensor in written or flat(result):
            array = to_numpy(tensor)
            order = None if array is None else self._made_before(call.function.name, array, tensor)
            if order is not None:
                self._flow.hold(tensor, look_of(tensor), order, written=bool(written))
                self._nodes.belong(call.node, order)
            elif written:
                self._flow.doubt(tensor)
        return result

    def _made_before(self, name: str, array: NDArray[Any], tensor: torch.Tensor) -> int | None:
        """The latest event of an operation with this name and result, which the array is."""
        for made_by, dtype, shape, order in self._latest:
            self._made[made_by, self._state.tape.digest_of(order), dtype, shape] = order
        self._latest.clear()
        return self._made.get((name, digest(array), tensor.dtype, tensor.shape))

    def _forget(self, call: Call) -> None:
        arguments = given(call.function, call.args, call.kwargs).arguments
        self._replaced(arguments)
        for argument in arguments:
            if argument.written:
                self._flow.forget(argument.look)

    def _replaced(self, arguments: Iterable[Argument]) -> None:
        """What collectives wrote to these is replaced, and was not read."""
        for argument in arguments if self._collectives else ():
            if argument.written:
                self._collectives.take(argument.look)

    def _doubt(self, call: Call, result: Any) -> None:
        """Takes no value of its tensors for known where unseen code may write to them."""
        values = [result] if call.function.fills else [*call.args, *call.kwargs.values(), result]
        for tensor in flat(values):
            self._flow.doubt(tensor)

    def _unseen(self, written: Iterable[Output]) -> None:
        """What was written to these is not on the tape."""
        for tensor, _ in written:
            self._flow.doubt(tensor)

    # ---- inputs ----------------------------------------------------------------------------

    def _order(self, argument: Argument, place: Place) -> int | None:
        """Order of the event with a tensor's value; records a leaf or an alias if there is none.

        None for a tensor without values, or whose memory was not written to.
        """
        if self._collectives and (ended := self._collectives.take(argument.look)) is not None:
            self._record(*ended, written=True, node=range(0))
        known = self._flow.current(argument.look)
        if known is not None or self._flow.is_blank(argument.look):
            return known
        tensor, held = argument.tensor, self._flow.held(argument.look)
        array = to_numpy(tensor)
        if array is None:
            return None
        order: int | None
        if held is None:
            if place.phase == "optimizer":
                place = replace(place, path=self._owner(argument.look) or ROOT)
            order = self._events.leaf(place, self._leaf_name(tensor), array)
        elif held.order is not None and self._state.tape.digest_of(held.order) == digest(array):
            order = held.order
        else:
            order = self._alias(tensor, held, place)
        if order is not None:
            self._flow.hold(tensor, argument.look, order, written=False)
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
        for depth, (_, ports) in enumerate(self._state.running):
            for port, value in ports.tensors if depth else ports.named():
                if value is tensor:
                    return port
        return CONSTANT

    # ---- what is known about it ------------------------------------------------------------

    def _attributes(
        self, function: Function, place: Place, plain: Mapping[str, Any]
    ) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        if function.draws and plain.get("dropout_p", function.dropout) != 0.0:
            attributes["rng"] = True
        node: Any = torch._C._current_autograd_node() if place.phase == "backward" else None
        if node is not None:
            attributes["autograd_node"] = node.name()
            if (order := self._nodes.of(node)) is not None:
                attributes["forward_order"] = order
        return attributes

    def _viewed(self, looks: Sequence[Look | None], outputs: Sequence[Output]) -> int | None:
        """Order of the event of the argument whose memory the outputs look at, if they do."""
        viewed = outputs[0][1] if outputs else None
        if viewed is not None:
            for look in looks:
                if look is not None and look[0] == viewed[0]:
                    return self._base(look)
        return None


def _wait(name: str, result: Any) -> None:
    """Waits for a collective, which writes its results on another thread until the program does."""
    if name.startswith("_c10d_functional."):
        for tensor in flat(result):
            torch.ops._c10d_functional.wait_tensor(tensor)
