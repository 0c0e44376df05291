"""Every ATen operation: forward, loss, backward and optimizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tracediff.operations import ALIAS, base_name, canonical_operation, takes_scalar_operands
from tracediff.recorders.operation_events import (
    Operation,
    OperationEvents,
    Place,
    issuing_lines,
)
from tracediff.recorders.pytorch_dataflow import DataFlow, Held, address_of
from tracediff.recorders.pytorch_state import State, in_backward
from tracediff.recorders.pytorch_tensors import to_numpy
from tracediff.recording import Patches
from tracediff.trace.summary import digest

_TORCH: Final = str(Path(torch.__file__).resolve().parent)

_SKIPPED_NAMESPACES: Final = frozenset({"profiler"})
_UNINITIALISED: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Their values are whatever was in memory."""

_OVERWRITING: Final = frozenset(
    {
        *("copy", "fill", "zero", "normal", "uniform", "bernoulli", "exponential", "random"),
        *("geometric", "log_normal", "cauchy"),
    }
)
"""In-place operations that do not read what they replace."""

_OPERANDS: Final = frozenset(
    {"self", "other", "value", "exponent", "weight", "min", "max", "fill_value"}
)
"""Names of arguments that are numbers where they could be tensors."""

_SILENT: Final = frozenset(
    {"pin_memory", "non_blocking", "memory_format", "layout", "device", "copy", "implicit"}
)
"""Arguments that change where a result lies, not what it is."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor that an operation is given.

    Attributes:
        read: Whether its value matters: not for `out=` and what is filled.
        written: Whether the operation changes it in place.
        listed: Whether it is one of a list, and its place there.
    """

    tensor: torch.Tensor
    read: bool
    written: bool
    listed: bool
    place: int


@dataclass(frozen=True, slots=True)
class Share:
    """What is recorded as one operation: indices of its arguments, and its outputs."""

    arguments: Sequence[int]
    outputs: Sequence[torch.Tensor]


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
    """Records the operations of this thread."""

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._patches = patches
        self._events = OperationEvents(state.tape, "pytorch")
        self._flow = DataFlow()
        self._digests: dict[int, bytes] = {}
        self._nodes: dict[int, tuple[int, Place]] = {}
        self._owners: dict[int | None, str] = {}
        self._step = -1
        self._lock = threading.RLock()

    def install(self) -> None:
        mode: Any = _Mode(self._dispatch)
        mode.__enter__()
        self._patches.on_undo(mode.__exit__, None, None, None)

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        place = self._place(args) if self._state.recording else None
        if place is None or getattr(func, "namespace", "") in _SKIPPED_NAMESPACES:
            result = func(*args, **kwargs)
            self._unseen(func, args, kwargs)
            return result
        with self._lock:
            return self._run(func, args, kwargs, place)

    # ---- where an operation runs -----------------------------------------------------------

    def _place(self, args: Sequence[Any]) -> Place | None:
        """Stage and module path of the operation that runs now; None if it is not recorded."""
        state, tape = self._state, self._state.tape
        if tape.evaluating:
            return None
        if tape.step != self._step:
            self._step = tape.step
            self._flow.clear()
            self._digests.clear()
            self._nodes.clear()
            self._owners.clear()
        frame = tape.current
        if in_backward():
            place = self._backward_place()
        elif frame is not None and state.stage != "loss":
            place = Place("forward", frame.path)
        elif state.stage == "optimizer":
            place = Place("optimizer", self._parameter_path(args))
        elif state.stage or (tape.root_calls and not state.evaluating):
            place = Place(state.stage or "loss", frame.path if frame else "root")
        else:
            return None
        if not tape.policy.records_operations(tape.step, place.path):
            return None
        if not place.source:
            place.source, place.user_line = issuing_lines(_TORCH)
        return place

    def _backward_place(self) -> Place:
        node: Any = torch._C._current_autograd_node()
        known = self._nodes.get(node._sequence_nr()) if node is not None else None
        if known is None:
            return Place("backward", "root")
        place = known[1]
        return Place("backward", place.path, place.source, place.user_line)

    def _parameter_path(self, args: Sequence[Any]) -> str:
        """Path of the parameter that an update works on, as far as the arguments tell."""
        owners = {owner for tensor in _flat(args) if (owner := self._owner(tensor))}
        return owners.pop() if len(owners) == 1 else "root"

    def _owner(self, tensor: torch.Tensor) -> str:
        known = self._state.memory_names.get(address_of(tensor))
        if known:
            return known[0]
        held = self._flow.held(tensor)
        return self._owners.get(held.order, "") if held else ""

    # ---- one operation ---------------------------------------------------------------------

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], place: Place) -> Any:
        arguments = list(_tensors(func, args, kwargs))
        found = [self._order(a.tensor, place) if a.read else None for a in arguments]
        bases = [self._base(a.tensor) if a.written else None for a in arguments]
        given = [self._flow.key(a.tensor) for a in arguments]
        result = func(*args, **kwargs)
        if base_name("pytorch", str(func)) in _UNINITIALISED:
            return result
        outputs = [a.tensor for a in arguments if a.written]
        written = bool(outputs)
        outputs = outputs or _flat(result)
        if not written and all(self._flow.key(tensor) in given for tensor in outputs):
            return result  # nothing is new: `detach` returns what it was given
        plain, operands = _plain_arguments(func, args, kwargs)
        for share in _shares(func, arguments, outputs):
            inputs = [order for i in share.arguments if (order := found[i]) is not None]
            attributes = self._attributes(func, plain)
            if written:
                base = next((bases[i] for i in share.arguments if bases[i] is not None), None)
                attributes |= {} if base is None else {"inplace": base}
            else:
                attributes |= self._view_of([arguments[i] for i in share.arguments], share.outputs)
            operation = Operation(str(func), place, inputs, plain, operands, attributes)
            self._record(operation, share.outputs, written)
        return result

    def _base(self, tensor: torch.Tensor) -> int | None:
        """Order of the event that a tensor's value comes from before it is written to."""
        held = self._flow.held(tensor)
        return None if held is None else held.order if held.current else held.sources[-1]

    def _record(self, operation: Operation, outputs: Sequence[torch.Tensor], written: bool) -> None:
        arrays = [to_numpy(tensor) for tensor in outputs]
        if any(array is None for array in arrays):
            self._state.tape.note("operations on tensors without plain values were left out")
        orders = self._events.outputs(operation, arrays)
        for tensor, array, order in zip(outputs, arrays, orders, strict=True):
            if array is not None and order is not None:
                self._flow.hold(tensor, order, written=written)
                self._digests[order] = digest(array)
                # A norm over all parameters is summed from numbers that belong to none of them.
                if operation.place.phase == "optimizer" and tensor.ndim:
                    self._owners[order] = operation.place.path
        if orders and orders[0] is not None:
            self._remember_node(orders[0], operation.place)

    def _remember_node(self, order: int, place: Place) -> None:
        """Notes which forward operation the autograd node that was made last belongs to."""
        if place.phase != "backward" and torch.is_grad_enabled():
            made: Any = torch._C._autograd._get_sequence_nr()
            self._nodes.setdefault(made - 1, (order, place))

    def _unseen(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for argument in _tensors(func, args, kwargs):
                if argument.written:
                    self._flow.forget(argument.tensor)

    # ---- inputs ----------------------------------------------------------------------------

    def _order(self, tensor: torch.Tensor, place: Place) -> int | None:
        """Order of the event with a tensor's value; records a leaf or an alias if there is none.

        None for a tensor without values.
        """
        held = self._flow.held(tensor)
        if held is not None and held.current and held.order is not None:
            return held.order
        array = to_numpy(tensor)
        if array is None:
            return None
        order: int | None
        if held is None:
            order = self._events.leaf(place, self._leaf_name(tensor), array)
        elif held.order is not None and self._digests.get(held.order) == digest(array):
            order = held.order
        else:
            order = self._alias(tensor, held, place)
        if order is not None:
            self._digests[order] = digest(array)
            self._flow.hold(tensor, order, written=False)
        return order

    def _alias(self, tensor: torch.Tensor, held: Held, place: Place) -> int | None:
        attributes = {"view_of": held.sources[-1]}
        operation = Operation(ALIAS, place, held.sources, attributes=attributes)
        return self._events.outputs(operation, [to_numpy(tensor)])[0]

    def _leaf_name(self, tensor: torch.Tensor) -> str:
        named = self._state.roots.named(tensor)
        if named is not None:
            return named.path
        known = self._state.memory_names.get(address_of(tensor))
        return known[1] if known else "constant"

    # ---- what is known about it ------------------------------------------------------------

    def _attributes(self, func: Any, plain: Mapping[str, Any]) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if draws and plain.get("dropout_p") != 0.0:
            attributes["rng"] = True
        node: Any = torch._C._current_autograd_node() if in_backward() else None
        if node is not None:
            attributes["autograd_node"] = node.name()
            if known := self._nodes.get(node._sequence_nr()):
                attributes["forward_order"] = known[0]
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


# ---- arguments ----------------------------------------------------------------------------------


def _tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Argument]:
    """Tensor arguments in the order of the schema, those of lists one by one."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        for index, tensor in enumerate(_flat([*args, *kwargs.values()])):
            yield Argument(tensor, True, False, False, index)
        return
    overwrites = base_name("pytorch", str(func)) in _OVERWRITING
    for place, argument in enumerate(schema.arguments):
        if place < len(args):
            value = args[place]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        written = argument.alias_info is not None and argument.alias_info.is_write
        read = not (written and (overwrites or argument.is_out))
        listed = not isinstance(value, torch.Tensor)
        for index, tensor in enumerate(_flat(value)):
            yield Argument(tensor, read, written, listed, index)


def _shares(
    func: Any, arguments: Sequence[Argument], outputs: Sequence[torch.Tensor]
) -> Iterator[Share]:
    """An operation as one, or one for each tensor where it works on lists (`_foreach_add_`)."""
    schema = getattr(func, "_schema", None)
    name = schema.name.partition("::")[2] if schema is not None else ""
    if not name.startswith(("_foreach", "_fused_ad", "_fused_sgd")):
        yield Share(range(len(arguments)), outputs)
        return
    count = 1 + max((a.place for a in arguments if a.listed), default=-1)
    written = [i for i, argument in enumerate(arguments) if argument.written]
    for place in range(count):
        own = [i for i, a in enumerate(arguments) if not a.listed or a.place == place]
        if written:
            yield Share(own, [arguments[i].tensor for i in own if arguments[i].written])
        else:
            yield Share(own, outputs[place : place + 1])


def _flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a result or argument, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _flat(item)]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _flat(item)]
    return []


def _plain_arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Any]]:
    """Arguments that are no tensors: attributes by name, and the operands where one is a number."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return {}, []
    takes_numbers = takes_scalar_operands(canonical_operation("pytorch", str(func)))
    attributes: dict[str, Any] = {}
    operands: list[Any] = []
    for place, argument in enumerate(schema.arguments):
        given = place < len(args) or argument.name in kwargs
        if not given:
            continue
        value = args[place] if place < len(args) else kwargs[argument.name]
        is_number = isinstance(value, bool | int | float)
        if isinstance(value, torch.Tensor):
            operands.append(None)
        elif is_number and takes_numbers and "Tensor" in str(argument.type):
            operands.append(value)
        elif is_number and takes_numbers and str(argument.type) == "number":
            if argument.name in _OPERANDS:
                operands.append(value)
            else:
                attributes[argument.name] = value
        elif (
            argument.name not in _SILENT
            and not _flat(value)
            and (plain := _plain(value)) is not None
        ):
            attributes[argument.name] = plain
    return attributes, operands if any(operand is not None for operand in operands) else []


def _plain(value: Any) -> Any:
    """A JSON value, or None for what says nothing about the result (device, memory format)."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None
