"""What the parts of the MLX recorder share while it is attached."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
from numpy.typing import NDArray

from tracediff.deferred import Deferred
from tracediff.forks import Recording
from tracediff.recorders.mlx_arrays import Ports, to_numpy
from tracediff.recorders.mlx_roots import Roots
from tracediff.recording import Frame, Patches, Tape

UNREADABLE: Final = (
    "Values inside mx.vmap, or inside a function that mx.compile traced, cannot be read: "
    "they are not in the trace"
)


@dataclass(eq=False, slots=True)
class Gradient:
    """One call of a gradient transformation such as `value_and_grad`, while it runs.

    Attributes:
        batch: Arguments of the user's function.
        started: Whether the user's function has been called.
        forward: Whether it is running; afterwards MLX only differentiates, and what calls modules
            then is a checkpoint that computes them again.
        root_calls: Calls of root modules inside it so far.
    """

    batch: Ports
    started: bool = False
    forward: bool = False
    root_calls: int = 0


class Touched(BaseException):
    """Ends the trial of a function in which there is something to record."""


@dataclass(frozen=True, slots=True)
class NamedArray:
    """An array that operations may use, by its name and the parameter that it belongs to."""

    reference: weakref.ref[mx.array]
    name: str
    path: str


@dataclass(eq=False, slots=True)
class State(Recording):
    """The tape, the names of modules, and where in the training step the run is.

    Attributes:
        optimizer_seen: An optimizer exists in the process, so steps are counted by its updates
            and calls outside of a gradient transformation are evaluations.
        gradient: The outermost gradient transformation that is running.
        open: Calls of modules that are running, innermost last, and the module of each; the frame
            is None for a repeated call that was not recorded the first time.
        given: Arguments of the calls that are running, innermost last.
        segments: For each checkpointed function that runs for the first time, its calls so far.
        trying: Whether a function only runs to find out if there is something to record in it.
        repeating: Whether a checkpoint computes again what it computed before.
        thread: Identity of the thread that runs the model.
        stage: `loss` or `optimizer` while code of that stage runs outside of modules, else "".
        operations: Records operations, at level `op`.
        active: Whether the recorder is attached; functions that it wrapped outlive it.
        defers: Whether values may be computed after they were recorded.
        readable: Whether all values that the outermost call asked for so far were there.
        skipped: What a gradient transformation returns in a step that a rerun skips, given what it
            would return and whether that has a value.
    """

    tape: Tape
    roots: Roots
    optimizer_seen: bool = False
    gradient: Gradient | None = None
    open: list[tuple[Any, Frame | None]] = field(default_factory=list)
    given: list[Ports] = field(default_factory=list)
    segments: list[list[Frame]] = field(default_factory=list)
    trying: bool = False
    repeating: bool = False
    thread: int = 0
    stage: str = ""
    operations: Any = None
    defers: bool = True
    readable: bool = True
    skipped: Callable[[Any, bool], Any] | None = None
    _sources: tuple[int, tuple[int, ...]] = (0, ())
    _grads: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _grads_step: int = 0
    _names: dict[int, NamedArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Recording.__init__(self)

    @property
    def evaluating(self) -> bool:
        """Whether a call that begins now is part of an evaluation."""
        return self.optimizer_seen and self.gradient is None

    @property
    def in_gradient(self) -> bool:
        """Whether arrays that are computed now will be differentiated."""
        return self.gradient is not None and (self.gradient.forward or self.repeating)

    @property
    def differentiating(self) -> bool:
        """Whether the function to differentiate has run, and no checkpoint repeats parts of it."""
        gradient = self.gradient
        ran = gradient is not None and gradient.started and not gradient.forward
        return ran and not self.repeating

    def touch(self) -> None:
        """Says that there is something to record here.

        Raises:
            Touched: The function that runs was only tried, to find this out.
        """
        if self.trying:
            raise Touched

    @property
    def loss_inputs(self) -> tuple[int, ...]:
        """Orders of the latest outputs that a loss can have been computed from."""
        step, orders = self._sources
        return orders if step == self.tape.step else ()

    def offer(self, orders: Sequence[int]) -> None:
        """Names the events that the next loss may have been computed from."""
        self._sources = (self.tape.step, tuple(orders))

    def grads_of(self, path: str) -> list[int]:
        """Orders of the gradients of a parameter in this step, to read and to extend."""
        if self._grads_step != self.tape.step:
            self._grads.clear()
            self._grads_step = self.tape.step
        return self._grads[path]

    def name_array(self, array: Any, name: str, path: str = "") -> None:
        """Gives an array a name for the operations that use it.

        Args:
            path: The parameter that it belongs to, for gradients and an optimizer's state.
        """
        if self.operations is not None and isinstance(array, mx.array):
            self._names[id(array)] = NamedArray(weakref.ref(array), name, path)

    def name_arrays(self, ports: Ports) -> None:
        """Gives the arguments of a function their names, unless they have one."""
        for name, array in ports.named():
            if self.name_of(array) is None:
                self.name_array(array, name)

    def name_of(self, array: mx.array) -> NamedArray | None:
        named = self._names.get(id(array))
        return named if named is not None and named.reference() is array else None

    def read(self, array: mx.array) -> NDArray[Any] | None:
        """Values of an array, or None with a note in the trace where there are none."""
        values = to_numpy(array)
        if values is None:
            self.readable = False
            self.tape.note(UNREADABLE)
        return values

    def later(self, array: mx.array) -> NDArray[Any] | Deferred | None:
        """Values of an array as `read` has them, or the array for `settle` to read them."""
        inside = self.gradient is not None or self.open
        # Between operations nothing can wait: each is on the tape before the next.
        if not (inside and self.defers and self.readable and self.operations is None):
            return self.read(array)
        # A new handle: an in-place operation on the array must not alter what is recorded.
        return Deferred(array.astype(array.dtype), array.nbytes)

    def settle(self) -> None:
        """Computes and writes what waits, at the end of an outermost call."""
        if self.gradient is None and not self.open:
            self.tape.settle()
            self.readable = True

    def emit_array(
        self, phase: str, path: str, port: str, array: mx.array, **extra: Any
    ) -> tuple[int, ...]:
        """Records an array; returns its order as a tuple, empty if it has no values."""
        if self.tape.skipping:
            return ()  # reading it would compute it
        values = self.later(array)
        return () if values is None else (self.tape.emit(phase, path, port, values, **extra),)


class ClassHooks:
    """Wraps a method in every class that defines it, below a base class, now or later.

    MLX modules define `__call__` in their own classes and optimizers may override `update`: there
    is no single place to hook.
    """

    def __init__(
        self,
        base: type,
        names: Sequence[str],
        wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]],
        patches: Patches,
    ) -> None:
        self._base = base
        self._names = names
        self._wrap = wrap
        self._patches = patches
        self._wrappers: set[int] = set()

    def install(self) -> None:
        for cls in _with_subclasses(self._base):
            self.ensure(cls)
        base: Any = self._base

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            super(base, cls).__init_subclass__(**kwargs)
            self.ensure(cls)

        self._patches.replace(base, "__init_subclass__", lambda _: classmethod(init_subclass))

    def ensure(self, cls: type) -> None:
        """Wraps what a class defines itself, also if it was replaced since it was wrapped."""
        for name in self._names:
            original = vars(cls).get(name)
            if callable(original) and id(original) not in self._wrappers:
                wrapper = functools.wraps(original)(self._wrap(name, original))
                self._wrappers.add(id(wrapper))
                setattr(cls, name, wrapper)
                self._patches.on_undo(_put_back, cls, name, wrapper, original)


def _put_back(cls: type, name: str, wrapper: Any, original: Any) -> None:
    """Restores a method, unless the user's code has replaced it since."""
    if vars(cls).get(name) is wrapper:
        setattr(cls, name, original)


def _with_subclasses(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for cls in base.__subclasses__():
        yield from _with_subclasses(cls)


def replace_everywhere(patches: Patches, replacements: Mapping[Any, Any]) -> None:
    """Replaces functions in all modules that hold them, whatever name they imported them by."""
    by_id = {id(original): new for original, new in replacements.items()}
    for module in list(sys.modules.values()):
        held = getattr(module, "__dict__", {})
        if by_id.keys().isdisjoint(map(id, list(held.values()))):
            continue  # most of thousands of modules, without a loop in Python
        for name, value in list(held.items()):
            new = by_id.get(id(value))
            if new is not None:
                patches.replace(module, name, functools.partial(_instead, new))


def _instead(new: Any, original: Any) -> Any:
    return new
