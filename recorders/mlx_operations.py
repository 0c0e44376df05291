"""Every operation of `mlx.core`: forward, loss and optimizer."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn

from tracediff.consumers import Consumers
from tracediff.events import ROOT
from tracediff.operations import CONSTANT, LEAF, VIEWS, canonical_operation, takes_scalar_operands
from tracediff.recorders.mlx_arrays import to_numpy
from tracediff.recorders.mlx_cotangents import Cotangents
from tracediff.recorders.mlx_dataflow import Arrays
from tracediff.recorders.mlx_functions import (
    Function,
    array_methods,
    compiled_functions,
    core_functions,
)
from tracediff.recorders.mlx_roots import members
from tracediff.recorders.mlx_state import State, replace_everywhere
from tracediff.recorders.operation_events import (
    Operation,
    OperationEvents,
    Place,
    issuing_lines,
)
from tracediff.recording import Patches

_MLX: Final = f"{Path(mlx.nn.__file__).resolve().parents[1]}{os.sep}"
_LIBRARIES: Final = ("mlx", "mlx_lm", "mlx_vlm")


class OperationHooks:
    """Wraps whatever computes an array."""

    def __init__(self, state: State, patches: Patches, consumers: Consumers) -> None:
        self._state = state
        self._patches = patches
        self._consumers = consumers
        self._events = OperationEvents(state.tape, "mlx")
        self._cotangents = Cotangents(state, self._events, self.muted)
        self._arrays = Arrays()
        self._leaves: dict[str, int] = {}
        self._owners: dict[int, str] = {}
        self._local = threading.local()
        self._lock = threading.RLock()
        self._step = -1

    def install(self) -> None:
        everywhere: dict[Any, Any] = {}
        for function in (*core_functions(), *compiled_functions(_LIBRARIES)):
            everywhere.setdefault(function.original, self._wrap(function))
        replace_everywhere(self._patches, everywhere)
        for function in array_methods():
            wrapper: Any = self._wrap(function)
            if isinstance(function.original, property):
                wrapper = property(wrapper)
            self._patches.replace(function.owner, function.attribute, _always(wrapper))
        replace_everywhere(self._patches, {mx.vmap: self._wrap_vmap(mx.vmap)})
        self._state.operations = self

    # ---- calls -----------------------------------------------------------------------------

    def _wrap(self, function: Function) -> Callable[..., Any]:
        original = function.original
        plain: Any = original.fget if isinstance(original, property) else original

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._run(function, plain, args, kwargs)

        return call if isinstance(original, property) else functools.update_wrapper(call, original)

    def opaque(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a function that cannot be seen inside, as one operation of that name."""
        return self._run(Function(None, "", None, name), plain, args, kwargs)

    def _wrap_vmap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def vmap(fun: Callable[..., Any], *axes: Any, **named: Any) -> Callable[..., Any]:
            plain = original(fun, *axes, **named)
            return lambda *args, **kwargs: self.opaque("mlx.vmap", plain, args, kwargs)

        return vmap

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Operations inside the block are parts of one that is recorded, or the recorder's own."""
        busy = getattr(self._local, "busy", False)
        self._local.busy = True
        try:
            yield
        finally:
            self._local.busy = busy

    def same(self, new: Any, old: Any) -> None:
        """Says that an array has the value of another one."""
        order = self._arrays.order(old)
        if order is not None:
            self._arrays.hold(new, order)

    def orders_of(self, value: Any) -> list[int | None]:
        """Orders of the events with the values of all arrays in an argument or result."""
        with self.muted():
            place = self._place([])
            return [None if place is None else self._order(a, place) for a in _flat(value)]

    def bind(self, value: Any, orders: Sequence[int | None]) -> None:
        """Says that the arrays in an argument or result have the values of these events."""
        for array, order in zip(_flat(value), orders, strict=False):
            if order is not None:
                self._arrays.hold(array, order)

    # ---- where an operation runs -----------------------------------------------------------

    def _place(self, args: Sequence[Any]) -> Place | None:
        """Stage and module path of the operation that runs now; None if it is not recorded."""
        state, tape = self._state, self._state.tape
        if tape.step != self._step:
            self._step = tape.step
            for known in (
                self._arrays,
                self._owners,
                self._leaves,
                self._events,
                self._cotangents,
            ):
                known.clear()
        frame = tape.current
        if tape.evaluating or tape.skipping:
            return None
        if state.differentiating:  # of Python, only the user's own gradients run now
            place = Place("backward", ROOT)
        elif threading.get_ident() != state.thread:
            # Frames are those of the thread that runs the model: its helpers are part of the root.
            place = Place("forward", ROOT)
            if frame is None:
                return None
        elif frame is not None and state.stage != "loss":
            place = Place("forward", frame.path)
        elif state.stage == "optimizer":
            place = Place("optimizer", self._parameter_path(args))
        elif tape.root_calls and not state.evaluating:
            place = Place(state.stage or "loss", frame.path if frame else ROOT)
        else:
            return None
        if not tape.policy.records_operations(tape.step, place.path):
            return None
        place.source, place.user_line = issuing_lines(_MLX)
        return place

    def _parameter_path(self, args: Sequence[Any]) -> str:
        """Path of the parameter that an update works on, as far as the arguments tell."""
        owners = {owner for array in _flat(args) if (owner := self._owner(array))}
        return owners.pop() if len(owners) == 1 else ROOT

    def _owner(self, array: mx.array) -> str:
        known = self._state.name_of(array)
        if known is not None:
            return known.path
        order = self._arrays.order(array)
        return "" if order is None else self._owners.get(order, "")

    # ---- one operation ---------------------------------------------------------------------

    def _run(
        self,
        function: Function,
        plain: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        busy = getattr(self._local, "busy", False)
        if busy or not self._state.recording or self._state.trying:
            return plain(*args, **kwargs)
        if not _draws(function):
            return self._seen(function, plain, args, kwargs)
        with self._consumers.drawing(function.name, lambda: issuing_lines(_MLX)[0]):
            return self._seen(function, plain, args, kwargs)

    def _seen(
        self,
        function: Function,
        plain: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        with self.muted(), self._lock:
            place = self._place(args)
            if place is None:
                return plain(*args, **kwargs)
            if self._state.repeating:
                return self._repeated(function, plain(*args, **kwargs), args)
            given = list(reversed(args)) if function.reflected else list(args)
            found = [self._order(array, place) for array in _flat([given, *kwargs.values()])]
            base = self._arrays.order(args[0]) if function.in_place else None
            result = plain(*args, **kwargs)
            outputs = [args[0]] if function.in_place else _flat(result)
            if not outputs or self._hands_through(function, args, outputs):
                return result
            inputs = [order for order in found if order is not None]
            attributes = {} if base is None else {"inplace": base}
            operation = _operation(function, place, given, kwargs, inputs, attributes)
            orders = self._record(operation, outputs)
            return self._tapped(outputs[0] if function.in_place else result, orders, function)

    def _repeated(self, function: Function, result: Any, args: Sequence[Any]) -> Any:
        """The result of an operation that a checkpoint computes again.

        It is on the tape already, but only now does it have gradients.
        """
        outputs = [args[0]] if function.in_place else _flat(result)
        orders: dict[int, int] = {}
        for array in outputs:
            values = to_numpy(array)
            name = _canonical(function, args)
            order = None if values is None else self._arrays.made(name, values)
            if order is not None:
                self._arrays.hold(array, order)
                orders[id(array)] = order
        return self._tapped(outputs[0] if function.in_place else result, orders, function)

    def _tapped(self, result: Any, orders: Mapping[int, int], function: Function) -> Any:
        """The result with taps on its gradients; what was changed in place stays that object."""
        if not self._state.in_gradient:
            return result
        before = _flat(result)
        tapped = self._cotangents.tapped(result, orders)
        if function.in_place:
            result[...] = tapped
            return result
        for new, old in zip(_flat(tapped), before, strict=True):
            self.same(new, old)
        return tapped

    def parameter_grad(self, path: str, grad: mx.array) -> None:
        """Records the gradient of a parameter that operations of this step computed with."""
        leaf = self._leaves.get(path)
        order = None if leaf is None else self._cotangents.record(leaf, grad)
        if order is not None:
            self._arrays.hold(grad, order)

    def _hands_through(
        self, function: Function, args: Sequence[Any], outputs: Sequence[mx.array]
    ) -> bool:
        """Whether the result is the very value that was given: a cast to the same dtype."""
        if function.name not in ("mlx.astype", "mlx.reshape"):
            return False
        new, old = outputs[0], args[0]
        if not isinstance(old, mx.array) or (new.dtype, new.shape) != (old.dtype, old.shape):
            return False
        self.same(new, old)
        return True

    def _record(self, operation: Operation, outputs: Sequence[mx.array]) -> dict[int, int]:
        """Records what an operation computed; returns the order of each output by its identity."""
        values = [self._state.read(array) for array in outputs]
        if all(value is None for value in values):
            return {}
        orders = self._events.outputs(operation, values)
        recorded: dict[int, int] = {}
        for array, value, order in zip(outputs, values, orders, strict=True):
            if order is None or value is None:
                continue
            recorded[id(array)] = order
            self._arrays.hold(array, order, value)
            self._arrays.make(operation.canonical, value, order)
            # A norm over all parameters is summed from numbers that belong to none of them.
            if operation.place.phase == "optimizer" and array.ndim:
                self._owners[order] = operation.place.path
        self._cotangents.used(operation.inputs, list(recorded.values()))
        return recorded

    # ---- inputs ----------------------------------------------------------------------------

    def _order(self, array: mx.array, place: Place) -> int | None:
        """Order of the event with an array's value; records a leaf if there is none.

        None for an array without values.
        """
        order = self._arrays.order(array)
        if order is not None:
            return order
        values = to_numpy(array)
        if values is None:
            return None
        name = self._name(array)
        order = self._arrays.made(f"{LEAF} {name}", values) if name else None
        if not self._is_parameter(array):
            order = self._arrays.equal(values) if order is None else order
        if order is None:
            order = self._events.leaf(place, name or CONSTANT, values)
            self._leaves[name] = order
            self._arrays.make(f"{LEAF} {name}", values, order)
        self._arrays.hold(array, order, values)
        return order

    def _is_parameter(self, array: mx.array) -> bool:
        """Whether an array is a parameter: what a step computes is none, even with its value."""
        return self._state.name_of(array) is not None

    def _name(self, array: mx.array) -> str:
        """Name of a parameter or argument of a module that runs, or of what is updated."""
        known = self._state.name_of(array)
        if known is not None:
            return known.name
        if self._state.open:
            module, frame = self._state.open[-1]
            for key, value in members(module):
                if value is array:
                    return f"{frame.path}.{key}" if frame and frame.path != ROOT else key
        for ports in self._state.given:
            for port, value in ports.tensors:
                if value is array:
                    return port
        return ""


# ---- arguments ----------------------------------------------------------------------------------


def _operation(
    function: Function,
    place: Place,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[int],
    attributes: Mapping[str, Any],
) -> Operation:
    canonical = _canonical(function, args)
    attributes = dict(attributes)
    if canonical in VIEWS and inputs:
        attributes["view_of"] = inputs[0]
    if _draws(function):
        attributes["rng"] = True
    plain, operands = _plain_arguments(function, canonical, args, kwargs)
    return Operation(function.name, place, inputs, plain, operands, attributes, canonical)


def _draws(function: Function) -> bool:
    return function.name.startswith("mlx.random.")


def _canonical(function: Function, args: Sequence[Any]) -> str:
    if function.name == "mlx.getitem":
        return _indexing(args[1])
    return canonical_operation("mlx", function.name)


def _plain_arguments(
    function: Function, canonical: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], Sequence[Any]]:
    """Arguments that are no arrays: attributes by name, and the operands where one is a number."""
    takes_numbers = takes_scalar_operands(canonical)
    plain: dict[str, Any] = {}
    operands: list[Any] = []
    for name, value in [*function.named(args), *kwargs.items()]:
        if isinstance(value, mx.array):
            operands.append(None)
        elif takes_numbers and isinstance(value, bool | int | float) and name != "stream":
            operands.append(value)
        elif name != "stream" and not _flat(value) and value is not None:
            plain[name] = _plain(value)
    return plain, operands if any(operand is not None for operand in operands) else ()


def _indexing(index: Any) -> str:
    """What `array[index]` does, in the vocabulary of other stacks."""
    if isinstance(index, mx.array):
        return "index" if index.dtype == mx.bool_ else "embedding"
    return "index" if _flat(index) else "slice"


def _flat(value: Any) -> list[mx.array]:
    """The arrays of a result or argument, in order."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, list | tuple):
        return [array for item in value for array in _flat(item)]
    if isinstance(value, Mapping) and type(value) is dict:
        return [array for item in value.values() for array in _flat(item)]
    return []


def _plain(value: Any) -> Any:
    """A JSON value."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, mx.Dtype):
        return str(value).removeprefix("mlx.core.")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda original: value
