"""Calls of modules: their inputs and outputs, and the gradients of the outputs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from tracediff.recorders.mlx_arrays import (
    Ports,
    batch_shape,
    hidden_dims,
    input_ports,
    is_float,
    is_integer,
    map_arrays,
    output_ports,
    to_numpy,
)
from tracediff.recorders.mlx_roots import walk
from tracediff.recorders.mlx_state import ClassHooks, State, replace_everywhere
from tracediff.recording import Frame, Patches


@dataclass(slots=True)  # not frozen: there is one for each call, and that takes four times as long
class Call:
    """A call of a module that is about to happen."""

    module: Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    original: Callable[..., Any]

    def run(self) -> Any:
        return self.original(self.module, *self.args, **self.kwargs)

    def inputs(self) -> Ports:
        return input_ports(self.module, self.args, self.kwargs)


class ModuleHooks:
    """Wraps `__call__` of every class of modules.

    Values are evaluated together, at the end of the outermost call or when many wait. MLX is lazy,
    but not fused outside of `mx.compile`: when an array is evaluated does not change it.

    Attributes:
        replace: Where it is set, given each recorded call with the orders of its inputs by port
            (none for a call that a checkpoint repeats), returns the call to make instead.
    """

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._patches = patches
        self._classes = ClassHooks(Module, ("__call__",), self._wrap_call, patches)
        self._muted = False
        self._batch: tuple[int, ...] | None = None
        self._repeated: Repeated | None = None
        self.replace: Callable[[Frame, Call, Mapping[str, int]], Call] | None = None

    def install(self) -> None:
        self._classes.install()
        replace_everywhere(self._patches, {mx.checkpoint: self._wrap_checkpoint(mx.checkpoint)})

    # ---- calls -----------------------------------------------------------------------------

    def _wrap_call(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            if self._unrecorded(module):
                return original(module, *args, **kwargs)
            return self._call(Call(module, args, kwargs, original))

        return call

    def _unrecorded(self, module: Module) -> bool:
        """Whether a call that begins now is to be left alone."""
        state = self._state
        if not state.recording:
            return True
        state.touch()
        if self._muted:
            return True
        if state.open and state.open[-1][0] is module:
            return True  # `super().__call__()`
        if self._repeated is not None:
            return False
        if state.gradient is not None and not state.gradient.forward:
            return True  # a checkpoint that was made before the recorder was attached repeats
        if state.open and threading.get_ident() != state.thread:
            state.tape.note("Modules ran in several threads at once: only one was recorded")
            return True
        return False

    def _call(self, call: Call) -> Any:
        state = self._state
        if self._repeated is not None:
            return self._repeat(call, self._repeated)
        if not state.open:
            return self._outermost(call)
        path = state.roots.path_of(call.module)
        if path is None:
            parent = next(frame.path for _, frame in reversed(state.open) if frame)
            path = state.roots.adopt(call.module, parent)
        return self._record(call, path, call.inputs())

    def _outermost(self, call: Call) -> Any:
        state, tape, roots = self._state, self._state.tape, self._state.roots
        evaluating, gradient = state.evaluating, state.gradient
        is_next_step = tape.root_calls and not state.optimizer_seen
        is_first_root = gradient is None or not gradient.root_calls
        if is_next_step and is_first_root and roots.would_be_root(call.module):
            tape.advance()
        modules = walk(call.module)
        path = roots.admit(call.module, modules)
        if path is None:
            return call.run()
        for cls in dict.fromkeys(type(module) for _, module, _ in modules):
            self._classes.ensure(cls)  # the script may have replaced a `__call__`
        ports = call.inputs()
        self._state.thread = threading.get_ident()
        self._batch = batch_shape(ports) or self._batch
        if tape.skipping:
            return self._skip(call, ports, evaluating)
        if evaluating:
            return self._evaluate(call, path, ports)
        tape.start_step()
        if roots.is_root(call.module):
            self._emit_training_batch(ports)
            tape.root_calls += 1
        return self._record(call, path, ports)

    def _record(self, call: Call, path: str, ports: Ports) -> Any:
        state, tape = self._state, self._state.tape
        frame = tape.enter(path, type(call.module).__name__)
        state.open.append((call.module, frame))
        for segment in state.segments:
            segment.append(frame)
        try:
            orders = self._emit_inputs(frame, ports)
            if self.replace is not None:
                call = self.replace(frame, call, orders)
                ports = call.inputs()
            state.given.append(ports)
            try:
                output = call.run()
            finally:
                state.given.pop()
            outputs = output_ports(output)
            recorded = self._emit(tape.emit_out, frame, outputs, state.later, _offset(call))
        finally:
            state.open.pop()
            tape.exit(frame)
            state.settle()
        if not state.open:
            state.offer(frame.outs)
        if state.gradient is None:
            return output
        taps = {id(array): port for port, array in outputs.tensors if port in recorded}
        return self._tapped(frame, output, taps, ports)

    def _evaluate(self, call: Call, path: str, ports: Ports) -> Any:
        """Records a call without gradients as one value in and one out, in the trajectory."""
        tape = self._state.tape
        tape.evaluating = self._muted = True
        frame = tape.enter(path, type(call.module).__name__, phase="trajectory")
        try:
            if self._state.roots.is_root(call.module):
                self._emit_batch(ports, tape.next_call("rendering", "eval_batch"))
            self._emit_inputs(frame, ports)
            output = call.run()
            self._emit(tape.emit_out, frame, output_ports(output), self._state.later)
            return output
        finally:
            tape.exit(frame)
            tape.evaluating = self._muted = False

    def _skip(self, call: Call, ports: Ports, evaluating: bool) -> Any:
        """A call in a step that a rerun skips: built, and not computed."""
        tape = self._state.tape
        tape.seen_model = True
        if not evaluating:
            tape.start_step()
        if self._state.roots.is_root(call.module) and evaluating:
            tape.evaluating = True
            self._emit_batch(ports, tape.next_call("rendering", "eval_batch"))
            tape.evaluating = False
        elif self._state.roots.is_root(call.module):
            self._emit_training_batch(ports)
            tape.root_calls += 1
        self._muted = True
        try:
            output = call.run()
        finally:
            self._muted = False
        return map_arrays(output, mx.zeros_like) if evaluating else output

    # ---- values ----------------------------------------------------------------------------

    def _emit_training_batch(self, ports: Ports) -> None:
        """Records the batch once for each micro-batch, with labels where the loss is given them."""
        gradient = self._state.gradient
        self._state.name_arrays(ports)
        if gradient is not None:
            gradient.root_calls += 1
            if gradient.root_calls > 1:
                return
            if any(is_integer(array) for _, array in gradient.batch.tensors):
                ports = gradient.batch
        self._emit_batch(ports, self._state.tape.next_call("rendering", "batch"))

    def _emit_batch(self, ports: Ports, call: int) -> None:
        for name, array in ports.named():
            if is_integer(array) and (values := self._state.read(array)) is not None:
                self._state.tape.emit_batch(name, values, call)

    def _emit_inputs(self, frame: Frame, ports: Ports) -> dict[str, int]:
        # Those of a root are compared with the batch, at once.
        read = self._state.later if frame.parent else self._state.read
        return self._emit(self._state.tape.emit_in, frame, ports, read)

    def _emit(
        self,
        emit: Callable[..., int],
        frame: Frame,
        ports: Ports,
        read: Callable[[mx.array], Any],
        further: Mapping[str, Any] | None = None,
    ) -> dict[str, int]:
        orders = {}
        attributes = dict(further or {})
        if ports.skipped:
            attributes["skipped"] = ports.skipped
        for port, array in ports.tensors:
            if (values := read(array)) is not None:
                dims = hidden_dims(array, frame.op, self._batch)
                orders[port] = emit(frame, port, values, dims=dims, attributes=attributes)
                attributes = {}
        return orders

    # ---- gradients -------------------------------------------------------------------------

    def _tapped(self, frame: Frame, output: Any, ports: dict[int, str], inputs: Ports) -> Any:
        """The same output, whose gradients are recorded when MLX computes them.

        An array handed through (dropout that is off) is no value of this call: not tapped.

        Args:
            ports: Identity of each array that has values -> its port.
        """
        for _, array in inputs.tensors:
            ports.pop(id(array), None)

        def tap(array: mx.array) -> mx.array:
            if id(array) not in ports or not is_float(array):
                return array
            dims = hidden_dims(array, frame.op, self._batch)
            tapped: mx.array = self._tap(frame, f"grad_{ports[id(array)]}", dims)(array)
            if self._state.operations is not None:
                self._state.operations.same(tapped, array)
            return tapped

        return map_arrays(output, tap)

    def _tap(self, frame: Frame, port: str, dims: tuple[str, ...]) -> Any:
        """The identity function, with a hook on its cotangent."""
        calls = 0

        def vjp(primals: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
            nonlocal calls
            if self._state.recording and (values := self._state.later(cotangent)) is not None:
                # A second differentiation of the same call, as for a Hessian, has its own port.
                unique = f"{port}@{calls}" if calls else port
                self._state.tape.emit_grad(frame, unique, values, dims=dims)
                calls += 1
            return cotangent

        identity = mx.custom_function(_itself)
        identity.vjp(vjp)
        return identity

    # ---- checkpoints -----------------------------------------------------------------------

    def _wrap_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
            plain = original(function)

            def call(*args: Any, **kwargs: Any) -> Any:
                gradient = self._state.gradient
                if not self._state.recording or gradient is None or not gradient.forward:
                    return plain(*args, **kwargs)
                boundary = Boundary(self._state, (args, kwargs))
                result = original(self._segment(function, boundary))(*args, **kwargs)
                boundary.returned(result)
                return result

            return call

        return checkpoint

    def _segment(self, function: Callable[..., Any], boundary: Boundary) -> Callable[..., Any]:
        """A checkpointed function that remembers its calls the first time and repeats them later.

        The values are on the tape already, but only when they are computed again do they have
        gradients.
        """
        frames: list[Frame] = []
        first = True

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            is_first, first = first, False
            with self._first(frames) if is_first else self._again(frames):
                boundary.entered((args, kwargs))
                result = function(*args, **kwargs)
                boundary.left(result)
                return result

        return run

    @contextmanager
    def _first(self, frames: list[Frame]) -> Iterator[None]:
        self._state.segments.append(frames)
        try:
            yield
        finally:
            self._state.segments.remove(frames)

    @contextmanager
    def _again(self, frames: list[Frame]) -> Iterator[None]:
        outer = self._repeated, self._state.repeating
        self._repeated, self._state.repeating = Repeated(frames), True
        try:
            yield
        finally:
            self._repeated, self._state.repeating = outer

    def _repeat(self, call: Call, repeated: Repeated) -> Any:
        frame = repeated.take(self._state.roots.path_of(call.module))
        if self.replace is not None and frame is not None:
            call = self.replace(frame, call, {})
        self._state.open.append((call.module, frame))
        try:
            output = call.run()
        finally:
            self._state.open.pop()
        if frame is None or self._state.gradient is None:
            return output
        outputs = output_ports(output).tensors
        # Without values (inside `mx.vmap`) there is nothing to record.
        taps = {id(array): port for port, array in outputs if to_numpy(array) is not None}
        return self._tapped(frame, output, taps, call.inputs())


class Boundary:
    """Arrays that pass into a checkpoint and out of it, where MLX makes new objects of them.

    Only operations need to know: modules are known by the order of their calls.
    """

    def __init__(self, state: State, given: Any) -> None:
        self._operations = state.operations
        self._given = self._operations.orders_of(given) if self._operations else []
        self._results: list[int | None] = []

    def entered(self, given: Any) -> None:
        if self._operations:
            self._operations.bind(given, self._given)

    def left(self, result: Any) -> None:
        if self._operations:
            self._results = self._operations.orders_of(result)

    def returned(self, result: Any) -> None:
        if self._operations:
            self._operations.bind(result, self._results)


def _itself(array: mx.array) -> mx.array:
    return array


def _offset(call: Call) -> dict[str, int]:
    """Position that a rotary embedding counts from, where it is not 0."""
    if "rope" not in type(call.module).__name__.lower():
        return {}
    given = call.kwargs.get("offset", call.args[1] if len(call.args) > 1 else 0)
    return {"offset": given} if isinstance(given, int) and given else {}


class Repeated:
    """The calls of a checkpointed function, to be met again in the same order."""

    def __init__(self, frames: list[Frame]) -> None:
        self._frames = frames
        self._next = 0

    def take(self, path: str | None) -> Frame | None:
        """The next call, if it is one of the module at `path`."""
        if self._next < len(self._frames) and self._frames[self._next].path == path:
            self._next += 1
            return self._frames[self._next - 1]
        return None
