"""Calls of modules: their inputs and outputs, and the gradients of the outputs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch import nn

from tracediff.recorders.identity import ByIdentity
from tracediff.recorders.pytorch_roots import WRAPPERS, Named, is_compiled, unwrapped
from tracediff.recorders.pytorch_shards import local_part
from tracediff.recorders.pytorch_state import State, in_backward
from tracediff.recorders.pytorch_tensors import (
    Ports,
    batch_shape,
    has_values,
    hidden_dims,
    input_ports,
    is_integer,
    output_ports,
    to_numpy,
)
from tracediff.recording import Frame, Patches

COMPILED_NOTE: Final = "torch.compile ran eagerly while recording"

_OURS: Final = -1
"""The name of a hook; those that have handles are numbered from 0."""

_is_compiling: Final = torch.compiler.is_compiling
_tracing_state: Final = torch._C._get_tracing_state


@dataclass(slots=True)  # not frozen, as `Ports`
class Call:
    """A call of a module that is about to happen."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    original: Callable[..., Any]

    def run(self) -> Any:
        return self.original(self.module, *self.args, **self.kwargs)

    def inputs(self) -> Ports:
        return input_ports(self.module, self.args, self.kwargs)


class _Hooks(dict[int, Any]):
    """The hooks of a tensor, which the handles of others refer to weakly."""

    __slots__ = ("__weakref__",)


class _Hook(functools.partial[None]):
    """A hook of a tensor, without which the tensor may be saved: torch does not warn about it."""

    __slots__ = ()
    __torch_unserializable__ = True


def _register(tensor: Any, hook: _Hook) -> None:
    """As `tensor.register_hook` of a tensor that is no leaf, without the handle to remove it, which
    takes longer to make than all the rest."""
    if tensor._backward_hooks is None:
        tensor._backward_hooks = _Hooks(((_OURS, hook),))
        tensor.grad_fn._register_hook_dict(tensor)
    else:
        tensor.register_hook(hook)


class ModuleHooks:
    """Wraps `nn.Module.__call__`, so that arguments, results and exceptions pass one place.

    Global forward hooks would not do: they run before the module's own hooks, which may replace
    the output, and the pre-hook does not see keyword arguments.

    Attributes:
        on_call: Called with each module before a call of it is recorded.
        skip: Where it is set, makes the outermost calls of steps that a rerun skips.
        replace: Where it is set, given each recorded call with the orders of its inputs by port
            (none for a call that a checkpoint repeats), returns the call to make instead.
    """

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._patches = patches
        self._muted = False
        self._batch: tuple[int, ...] | None = None
        self._repeated: Iterator[Frame] | None = None
        self._hooked: ByIdentity[Any] = ByIdentity()
        self.on_call: list[Callable[[nn.Module], None]] = []
        self.skip: Callable[[Call, str, Ports, bool], Any] | None = None
        self.replace: Callable[[Frame, Call, Mapping[str, int]], Call] | None = None

    def install(self) -> None:
        checkpoint = torch.utils.checkpoint.CheckpointFunction
        self._patches.replace(nn.Module, "__call__", self._wrap_call)
        self._patches.replace(checkpoint, "forward", self._wrap_checkpoint)

    # ---- calls -----------------------------------------------------------------------------

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.unrecorded():
                return original(module, *args, **kwargs)
            if type(module).__name__ in WRAPPERS or module._compiled_call_impl is not None:
                if is_compiled(module):
                    self._state.tape.note(COMPILED_NOTE)
                if unwrapped(module) is not module:
                    return original(module, *args, **kwargs)
            return self._call(Call(module, args, kwargs, original))

        return call

    def unrecorded(self) -> bool:
        """Whether a call that begins now is to be left alone."""
        state = self._state
        if _is_compiling() or _tracing_state() is not None:
            return True
        if self._muted or not state.recording:
            return True
        if self._repeated is not None:
            return False
        if in_backward():
            return True  # a checkpoint that is not reentrant repeats its forward pass
        if state.open and threading.get_ident() != state.thread:
            state.tape.note("Modules ran in several threads at once: only one was recorded")
            return True
        return False

    def _call(self, call: Call) -> Any:
        state = self._state
        if not state.open and self._repeated is None:
            return self._outermost(call)
        path = state.roots.path_of(call.module)
        if path is None:
            parent = next((frame.path for frame in reversed(state.open) if frame), "")
            path = state.roots.adopt(call.module, parent)
        return self._record(call, path, call.inputs())

    def _outermost(self, call: Call) -> Any:
        state, tape, roots = self._state, self._state.tape, self._state.roots
        evaluating = state.evaluating
        if tape.root_calls and not state.optimizer_seen and roots.would_be_root(call.module):
            tape.advance()
        path = roots.admit(call.module)
        if path is None:
            return call.run()
        ports = call.inputs()
        self._state.thread = threading.get_ident()
        self._batch = batch_shape(ports) or self._batch
        if self.skip is not None and tape.skipping:
            if not evaluating:
                tape.start_step()
            tape.seen_model = True
            return self.skip(call, path, ports, evaluating)
        if evaluating:
            return self._evaluate(call, path, ports)
        self._hook_parameters()
        tape.start_step()
        if roots.is_root(call.module):
            self.emit_batch(ports, tape.root_calls)
            tape.root_calls += 1
        return self._record(call, path, ports)

    def record(self, call: Call, path: str, settings: Mapping[str, Any] | None = None) -> Any:
        """Makes a call inside of another, and records it.

        Args:
            settings: What its events are to say of it; a module's are on record already.
        """
        return self._record(call, path, call.inputs(), settings)

    def _record(
        self, call: Call, path: str, ports: Ports, settings: Mapping[str, Any] | None = None
    ) -> Any:
        for callback in self.on_call:
            callback(call.module)
        state, tape, is_new = self._state, self._state.tape, self._repeated is None
        frame: Any = self.begin(path, type(call.module).__name__)
        try:
            orders = self._emit(tape.emit_in, frame, ports, settings) if is_new else {}
            if self.replace is not None and frame is not None:
                call = self.replace(frame, call, orders)
                ports = call.inputs()
            given = {}
            for _, tensor in ports.tensors:
                given[id(tensor)] = tensor._version
            state.running.append((call.module, ports))
            try:
                output = call.run()
            finally:
                state.running.pop()
            ports = output_ports(output)
            if is_new:
                orders = self._emit(tape.emit_out, frame, ports, settings)
            for port, tensor in ports.tensors if frame else ():
                if not (port in orders if is_new else has_values(local_part(tensor))):
                    continue
                # A tensor handed through (nn.Identity) has the gradient of all its users, which
                # is not that of this output; one changed in place is the module's own.
                if given.get(id(tensor)) != tensor._version:
                    self.hook(frame, port, tensor, hidden_dims(tensor, self._batch))
        finally:
            self.end(frame, is_new)
        return output

    def _evaluate(self, call: Call, path: str, ports: Ports) -> Any:
        """Records a call without gradients as one value in and one out, in the trajectory."""
        tape = self._state.tape
        tape.evaluating = self._muted = True
        frame = tape.enter(path, type(call.module).__name__, phase="trajectory")
        try:
            if self._state.roots.is_root(call.module):
                self.emit_batch(ports, tape.next_call("rendering", "eval_batch"))
            self._emit(tape.emit_in, frame, ports)
            output = call.run()
            self._emit(tape.emit_out, frame, output_ports(output))
            return output
        finally:
            tape.exit(frame)
            tape.evaluating = self._muted = False

    def unseen(self, call: Call) -> Any:
        """Makes a call, recording nothing of it."""
        self._muted = True
        try:
            return call.run()
        finally:
            self._muted = False

    @property
    def is_new(self) -> bool:
        """Whether a call that begins now is not one that a checkpoint repeats."""
        return self._repeated is None

    def begin(self, path: str, op: str) -> Frame | None:
        """Begins a call; each must be left with `end`, in reverse order.

        When a reentrant checkpoint repeats a call, it is the call of the first time: its values
        are on the tape already, but only now does it have gradients. None where there was none.
        """
        state = self._state
        frame = state.tape.enter(path, op) if self._repeated is None else self._next_repeated(op)
        state.open.append(frame)
        if frame is not None:
            for segment in state.segments:
                segment.append(frame)
        return frame

    def end(self, frame: Frame | None, is_new: bool) -> None:
        """Ends a call.

        Args:
            is_new: Whether it was new when it began.
        """
        state = self._state
        state.open.pop()
        if frame is not None and is_new:
            state.tape.exit(frame)
            if not state.open:
                state.offer(frame.outs)

    def _next_repeated(self, op: str) -> Frame | None:
        frame = next(self._repeated or iter(()), None)
        return frame if frame and frame.op == op else None

    # ---- values ----------------------------------------------------------------------------

    def emit_batch(self, ports: Ports, call: int) -> None:
        for name, (_, tensor) in zip(ports.names, ports.tensors, strict=True):
            if is_integer(tensor) and (array := to_numpy(tensor)) is not None:
                self._state.tape.emit_batch(name, array, call)

    def _emit(
        self,
        emit: Callable[..., int],
        frame: Frame,
        ports: Ports,
        settings: Mapping[str, Any] | None = None,
    ) -> dict[str, int]:
        orders, state = {}, self._state
        attributes = {"skipped": ports.skipped} if ports.skipped else settings
        for port, tensor in ports.tensors:
            array, shard = state.read_part(tensor)
            if array is None:
                state.tape.note("tensors without plain values of their own were left out")
                continue
            dims = hidden_dims(tensor, self._batch)
            twin = state.twin(tensor)
            orders[port] = emit(frame, port, array, dims, attributes, shard, twin)
            attributes = None
        return orders

    # ---- gradients -------------------------------------------------------------------------

    def hook(self, frame: Frame, port: str, tensor: torch.Tensor, dims: tuple[str, ...]) -> None:
        """Records the gradient of an output that has values, when there is one."""
        # A leaf outlives the step, and so would its hook; parameters have hooks of their own.
        if tensor.requires_grad and not tensor.is_leaf:
            _register(tensor, _Hook(self._state.emit_grad, frame, "grad_" + port, dims))

    def _hook_parameters(self) -> None:
        """Records what each backward pass contributes to a parameter, before it is accumulated."""
        for tensor, named in self._state.roots.trainable():
            if self._hooked.get(tensor) is None:
                register: Any = tensor.register_hook
                handle = register(_Hook(self._parameter_grad, named))
                self._hooked.set(tensor, handle)
                self._patches.on_undo(handle.remove)

    def _parameter_grad(self, named: Named, grad: torch.Tensor) -> None:
        state = self._state
        if not state.recording:
            return
        array, shard = state.read_part(grad)
        if array is None:
            return
        inputs: list[int] = []
        for path in named.owners:
            if (frame := state.tape.frame_of(path)) is not None:
                inputs += frame.grads
                inputs += frame.ins
        call, path = state.backward_call, named.path
        port = state.unique(path, call, "grad")
        about = "backward", path, call, port, "", "", named.dims, shard, tuple(inputs)
        state.tape.add(about, array, "tensor", None, state.twin(grad))

    def _wrap_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
            if self.unrecorded():
                return original(ctx, function, *args)
            return original(ctx, self._segment(function), *args)

        return forward

    def _segment(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpointed function that remembers its calls, for when they are repeated."""
        frames: list[Frame] = []
        caller = self._state.open[-1:]
        first = True

        def run(*args: Any) -> Any:
            nonlocal first
            is_first, first = first, False
            with self._first(frames) if is_first else self.repeating(frames, caller):
                return function(*args)

        return run

    @contextmanager
    def _first(self, frames: list[Frame]) -> Iterator[None]:
        """A block whose calls are collected in a list."""
        self._state.segments.append(frames)
        try:
            yield
        finally:
            self._state.segments.pop()

    @contextmanager
    def repeating(self, frames: Iterable[Frame], caller: Sequence[Frame | None]) -> Iterator[None]:
        """A block in which a checkpoint makes calls again.

        Args:
            frames: The calls, in order, as they were made the first time.
            caller: The call that they were made in: code of its own may be among what is repeated.
        """
        state, outer = self._state, self._repeated
        self._repeated = iter(frames)
        state.open.extend(caller)
        try:
            with state.repeated():
                yield
        finally:
            self._repeated = outer
            if caller:
                state.open.pop()
