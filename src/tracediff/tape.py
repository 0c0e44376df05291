"""The tape that every recorder writes on.

It knows steps, call counts, execution order, data-flow edges, summaries and which payloads to keep,
so that recorders stay small and all of them record alike.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from tracediff.deferred import Deferred, Waiting
from tracediff.events import Site
from tracediff.frames import Frame
from tracediff.kernels import unpacked
from tracediff.policy import Policy
from tracediff.rerun import Rerun, RerunEnded
from tracediff.source_lines import line_behind, user_line
from tracediff.step_values import StepValues
from tracediff.trace import BufferedWriter, TraceWriter
from tracediff.trace.rows import About
from tracediff.trace.summary import Plain, digest, euclidean_norm, plain

_BATCH_KINDS: Final = {
    **dict.fromkeys(("labels", "targets"), "labels"),
    **dict.fromkeys(("attention_mask", "loss_mask", "mask"), "mask"),
}

_NOTHING: Final = Plain()

Recorded = tuple[int, About, str, Plain, int | None]
"""What is known of an event before its value: order, the same in steps that are alike, kind,
attributes, and the order of its twin; see `Tape.emit`."""

Given = Callable[[Site], NDArray[Any] | None]
"""What a call is to be run on in place of the value it computed at an input's site, or None."""


class Tape:
    """Numbers, summarises and writes the events of a run, step by step.

    Values are summarised, and written or copied, before `emit` returns, so a recorder may pass a
    view of a live tensor: an in-place operation afterwards cannot alter what was recorded. Only
    what is `Deferred` waits, for `settle`.

    Payloads are handed to the writer at once, events together: one by one between the calls of the
    framework, each would find the processor's caches full of its values.
    """

    def __init__(self, writer: TraceWriter | BufferedWriter, policy: Policy) -> None:
        self.writer = writer
        self.policy = policy
        self.step = 0
        self.evaluating = False
        self.root_calls = 0
        self._order = 0
        self._calls: dict[tuple[str, str], int] = defaultdict(int)
        self._stack: list[Frame] = []
        self._frames: dict[str, Frame] = {}
        self._batch: dict[bytes, int] = {}
        self.waiting: Waiting[Recorded] = Waiting()
        self._values = StepValues(writer, policy)
        self._lock = threading.RLock()
        self._notes: list[str] = []
        self.on_step_start: list[Callable[[], None]] = []
        self.on_batch: list[Callable[[NDArray[Any], str, int], None]] = []
        self.on_step_end: list[Callable[[], None]] = []
        self.on_evaluation: list[Callable[[], None]] = []
        self.on_enter: list[Callable[[Frame], None]] = []
        self.on_exit: list[Callable[[Frame], None]] = []
        self.rerun: Rerun | None = None
        self.settings_of_skipped: dict[str, Any] = {}
        self.step_started = False
        self.seen_model = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.finish()
        else:
            self.finish("failed", f"{type(error).__name__}: {error}".splitlines()[0])

    # ---- steps -----------------------------------------------------------------------------

    @property
    def skipping(self) -> bool:
        """Whether this step of a rerun is not computed, and nothing of it recorded."""
        return self.rerun is not None and self.rerun.skips(self.step)

    def start_step(self) -> None:
        """Runs `on_step_start` once per step, before the first call of a model in it."""
        if not self.step_started:
            self.step_started = True
            for callback in self.on_step_start:
                callback()

    def advance(self) -> None:
        """Commits the events of the current step and begins the next one."""
        with self._lock:
            for callback in self.on_step_end if self.step_started else ():
                callback()
            self.settle()
            self._values.hand_over()
            self.writer.commit_step()
            self.step += 1
            self._order = 0
            self.root_calls = 0
            self._calls.clear()
            self._frames.clear()
            self._batch.clear()
            self._values.begin(self.step)
            self.step_started = False
            if self.rerun is not None and self.step > self.rerun.stop:
                raise RerunEnded

    def finish(self, status: str = "finished", error: str | None = None) -> None:
        """Ends the trace, with what was recorded since the last step; see `TraceWriter.finish`."""
        try:
            with self._lock:
                self.settle()
                self._values.hand_over()
        finally:
            self.writer.finish(status, error)

    def note(self, text: str) -> None:
        """Adds a sentence to the manifest, once."""
        if text not in self._notes:
            self._notes.append(text)
            self.writer.add_note(text)

    # ---- calls -----------------------------------------------------------------------------

    @property
    def current(self) -> Frame | None:
        """The innermost call that is running."""
        return self._stack[-1] if self._stack else None

    @property
    def loaded(self) -> Mapping[str, tuple[bytes, str]]:
        """Digest and dtype of each parameter as loaded, by its path."""
        return self._values.loaded

    @property
    def seen_samples(self) -> bool:
        """Whether a rendered sample was recorded."""
        return self._values.seen_samples

    @property
    def recorded(self) -> int:
        """How many events the step has so far."""
        return self._order

    def next_call(self, phase: str, path: str) -> int:
        """Counts calls of a path within a phase and step, from 0."""
        call = self._calls[phase, path]
        self._calls[phase, path] = call + 1
        return call

    def enter(self, path: str, op: str, *, phase: str = "forward", source: str = "") -> Frame:
        """Begins a call; every call entered must be left with `exit`, in reverse order."""
        if phase == "trajectory":
            for callback in self.on_evaluation:
                callback()
        parent = self.current
        source = source or (parent.source if parent else user_line())
        frame = Frame(path, self.next_call(phase, path), op, phase, parent, source, self.step)
        self.seen_model = True
        if parent is not None:
            parent.children.append(frame)
        self._stack.append(frame)
        self._frames[path] = frame
        for entered in self.on_enter:
            entered(frame)
        return frame

    def exit(self, frame: Frame) -> None:
        """Ends a call, and any call inside it that an exception left open."""
        for left in self.on_exit:
            left(frame)
        while self._stack and self._stack.pop() is not frame:
            pass

    def digest_of(self, order: int) -> bytes:
        """Digest of the event with this order in the current step."""
        if self.waiting.values:
            self.settle()
        return self._values.summaries[order].digest

    def norm_of(self, order: int) -> float:
        """Euclidean norm of a tensor that was recorded in the current step, by its order."""
        if order < 0:  # in a step that a rerun skips
            return 0.0
        self.settle()
        return euclidean_norm(unpacked(self._values.summaries[order].statistics))

    def frame_of(self, path: str) -> Frame | None:
        """The last call of `path` in this step."""
        return self._frames.get(path)

    def emit_in(
        self,
        frame: Frame,
        port: str,
        array: NDArray[Any] | Deferred,
        dims: tuple[str, ...] = (),
        attributes: Mapping[str, Any] | None = None,
        shard: str = "",
        twin: int | None = None,
        kind: str = "tensor",
    ) -> int:
        """Records an input of a call. Its inputs are what the calling code could have used.

        Args:
            twin: See `emit`.
        """
        inputs = frame.parent.available() if frame.parent else self._from_batch(array)
        about = (
            frame.phase, frame.path, frame.call, port, frame.op, frame.source, dims, shard,
            inputs if frame.step == self.step else (),
        )  # fmt: skip
        order = self.add(about, array, kind, attributes, twin)
        frame.ins.append(order)
        return order

    def emit_out(
        self,
        frame: Frame,
        port: str,
        array: NDArray[Any] | Deferred,
        dims: tuple[str, ...] = (),
        attributes: Mapping[str, Any] | None = None,
        shard: str = "",
        twin: int | None = None,
    ) -> int:
        """Records an output of a call, computed from its inputs and its children's outputs."""
        about = (
            frame.phase, frame.path, frame.call, port, frame.op, frame.source, dims, shard,
            frame.available() if frame.step == self.step else (),
        )  # fmt: skip
        order = self.add(about, array, "tensor", attributes, twin)
        frame.outs.append(order)
        if frame.parent is not None:
            frame.parent.made.append(order)
        return order

    def give(self, frame: Frame, ports: Mapping[str, int]) -> None:
        """Says that a call runs on given values instead of those recorded at its inputs.

        What the call computes then does not depend on them: the event at port `given`, which lists
        the ports, takes their place.

        Args:
            ports: Port -> order of the event that was recorded there.
        """
        order = self.emit(
            "forward", frame.path, "given", sorted(ports), call=frame.call, op=frame.op
        )
        replaced = set(ports.values())
        frame.ins[:] = [*(kept for kept in frame.ins if kept not in replaced), order]

    def emit_grad(
        self,
        frame: Frame,
        port: str,
        array: NDArray[Any] | Deferred,
        dims: tuple[str, ...] = (),
        shard: str = "",
        twin: int | None = None,
    ) -> int:
        """Records the gradient of the loss with respect to an output of a past call.

        Where the call was in an earlier step (a generator, whose loss comes after the update of
        the discriminator), the gradient has no edges: orders count within a step.
        """
        is_now = frame.step == self.step
        about = (
            "backward", frame.path, frame.call, port, frame.op, frame.source, dims, shard,
            frame.downstream() if is_now else (),
        )  # fmt: skip
        order = self.add(about, array, "tensor", None, twin)
        if is_now:
            frame.grads.append(order)
        return order

    # ---- values ----------------------------------------------------------------------------

    def emit(
        self,
        phase: str,
        path: str,
        port: str,
        value: Any,
        *,
        kind: str | None = None,
        call: int = 0,
        op: str = "",
        source: str = "",
        dims: Sequence[str] = (),
        shard: str = "",
        inputs: Sequence[int] = (),
        attributes: Mapping[str, Any] | None = None,
        twin: int | None = None,
    ) -> int:
        """Records one value and returns its order within the step.

        Args:
            value: An array (any NumPy or ml_dtypes dtype) or what stands for one (`Deferred`, or
                `Found` where no payload is kept), a text, or any JSON value.
            kind: One of `events.KINDS`; by default `tensor` for arrays, `text` for strings and
                `setting` for the rest.
            shard: Which part of a distributed tensor it is, see `events.Event`.
            inputs: Orders of the events that the value was computed from.
            twin: Order of an event with the same elements in the same order, in whatever shape: a
                view of it, say. Where no payload is kept, and some elements are found to be the
                same, its summary is that of this value, too.
        """
        if isinstance(value, np.generic):
            value = np.asarray(value)
        if kind is None:
            is_array = isinstance(value, np.ndarray | Deferred)
            kind = "tensor" if is_array else "text" if isinstance(value, str) else "setting"
        source = source or line_behind(phase)
        about = phase, path, call, port, op, source, tuple(dims), shard, tuple(inputs)
        return self.add(about, value, kind, attributes, twin)

    def add(
        self,
        about: About,
        value: Any,
        kind: str,
        attributes: Mapping[str, Any] | None,
        twin: int | None,
    ) -> int:
        """As `emit`, for the events of calls and operations, which are nearly all.

        Args:
            about: With a source, where the stage is to have one.
        """
        with self._lock:
            if self.rerun is not None and self.rerun.skips(self.step):
                if about[0] == "environment":
                    self.settings_of_skipped[about[1]] = value
                return -1
            order = self._order
            self._order = order + 1
            if type(attributes) is not Plain:
                attributes = Plain(plain(attributes)) if attributes else _NOTHING
            waiting = self.waiting
            if not waiting.values and type(value) is not Deferred:
                if not self._values.add_directly(value, order, about, kind, attributes, twin):
                    self._values.add(value, order, about, kind, attributes, twin)
            elif not waiting.must_wait(value):
                self.settle()
                self._values.add(value, order, about, kind, attributes, twin)
            elif waiting.add(value, (order, about, kind, attributes, twin)):
                self.settle()
        return order

    def settle(self) -> None:
        """Writes the events whose values are `Deferred`: they are computed and read together."""
        if self.waiting:
            with self._lock:
                for value, recorded in self.waiting.take():
                    self._values.add(value, *recorded)

    def emit_batch(self, name: str, array: NDArray[Any], call: int) -> int:
        """Records one field of a batch as the model (or the loss function) was given it."""
        kind = _BATCH_KINDS.get(name, "ids" if array.dtype.kind in "iu" else "tensor")
        if array.dtype.kind == "b":
            kind = "mask"
        dims = ("batch", "sequence") if array.ndim == 2 else ()
        prefix = "eval_batch" if self.evaluating else "batch"
        path = f"{prefix}.{name}"
        if self.rerun is not None and self.skipping:
            self.rerun.check_batch(self.step, path, call, array)
        for callback in self.on_batch:
            callback(array, prefix, call)
        order = self.emit("rendering", path, "out", array, kind=kind, call=call, dims=dims)
        self._batch[digest(array)] = order
        return order

    def _from_batch(self, array: NDArray[Any] | Deferred) -> tuple[int, ...]:
        """Order of the field of the step's batch that a root's input is, if it is one."""
        if not self._batch or isinstance(array, Deferred) or array.dtype.kind not in "iub":
            return ()
        order = self._batch.get(digest(array))
        return () if order is None else (order,)

    def emit_settings(self, settings: Mapping[str, Any]) -> None:
        """Records settings as events of the environment stage; `path` is the dotted name."""
        for name, value in settings.items():
            self.emit("environment", name, "out", value, kind="setting")
