"""What the parts of the PyTorch recorder share while it is attached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tracediff.checkpoint import Checkpoints
from tracediff.forks import Recording
from tracediff.recorders.pytorch_roots import Roots
from tracediff.recorders.pytorch_tensors import Ports, read_part
from tracediff.recording import Frame, Tape


class State(Recording):
    """The tape, the names of modules and parameters, and where in the training step the run is.

    Attributes:
        optimizer_seen: An optimizer exists in the process, so steps are counted by its updates
            and calls without gradients are evaluations.
        stage: `loss` or `optimizer` while code of that stage runs outside of modules, else "".
        memory_names: Address of the memory of gradients and state that are about to be updated,
            and of their parameters -> path of the parameter and name of the tensor.
        backward_call: Index of the backward pass within the step (of the micro-batch).
        open: Calls that are running, innermost last; None for a repeated one that was not
            recorded the first time.
        running: Modules whose calls are being made, with their arguments, innermost last.
        repeating: Whether a checkpoint computes again what it computed before.
        thread: Identity of the thread that runs the model.
        segments: For each reentrant checkpoint that runs for the first time, its calls so far.
        twin: Where operations are recorded without payloads, finds the event of an operation that
            holds a tensor's value; None where there is none.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.checkpoints = Checkpoints(tape)
        self.roots = Roots(tape, self.checkpoints)
        self.optimizer_seen = False
        self.stage = ""
        self.memory_names: dict[int | None, tuple[str, str]] = {}
        self.backward_call = 0
        self.open: list[Frame | None] = []
        self.segments: list[list[Frame]] = []
        self.running: list[tuple[torch.nn.Module, Ports]] = []
        self.repeating = False
        self.thread = 0
        self.read_part: Callable[[torch.Tensor], tuple[Any, str]] = read_part
        self.twin: Callable[[torch.Tensor], int | None] = lambda _: None
        self._sources: tuple[int, tuple[int, ...]] = (0, ())
        self._emitted: dict[tuple[str, int, str], int] = defaultdict(int)
        self._emitted_step = 0

    @property
    def evaluating(self) -> bool:
        """Whether a call that begins now, outside any other, would be part of an evaluation."""
        if torch.is_grad_enabled() or not self.optimizer_seen:
            return False
        return not self.open and not self.segments  # a reentrant checkpoint disables gradients

    @property
    def loss_inputs(self) -> tuple[int, ...]:
        """Orders of the latest outputs that a loss can have been computed from."""
        step, orders = self._sources
        return orders if step == self.tape.step else ()

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """For the duration of the block, a checkpoint computes something again."""
        outer, self.repeating = self.repeating, True
        try:
            yield
        finally:
            self.repeating = outer

    def offer(self, orders: Sequence[int]) -> None:
        """Names the events that the next loss may have been computed from."""
        self._sources = (self.tape.step, tuple(orders))

    def emit_grad(self, frame: Frame, port: str, dims: tuple[str, ...], grad: torch.Tensor) -> None:
        """Records the gradient of a module's output."""
        if not self.recording:
            return
        array, shard = self.read_part(grad)
        if array is not None:
            port = self.unique(frame.path, frame.call, port)
            self.tape.emit_grad(frame, port, array, dims, shard, self.twin(grad))

    def unique(self, path: str, call: int, port: str) -> str:
        """`port`, or `port@1`, `port@2` ... where one call is differentiated several times."""
        if self._emitted_step != self.tape.step:
            self._emitted.clear()
            self._emitted_step = self.tape.step
        count = self._emitted[path, call, port]
        self._emitted[path, call, port] = count + 1
        return f"{port}@{count}" if count else port

    def emit_tensor(
        self, phase: str, path: str, port: str, value: torch.Tensor, **extra: Any
    ) -> tuple[int, ...]:
        """Records a tensor; returns its order as a tuple, empty if it has no values."""
        array, shard = self.read_part(value)
        if array is None:
            return ()
        return (self.tape.emit(phase, path, port, array, shard=shard, **extra),)


def in_backward() -> bool:
    """Whether autograd is running a backward pass, in which checkpointed calls are repeated."""
    return int(torch._C._current_graph_task_id()) != -1
