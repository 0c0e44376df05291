"""The Recorder contract: what a stack must provide.

A recorder knows one framework: where to hook in and how to turn its tensors into NumPy arrays.
Everything else is the tape's.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, ClassVar

from numpy.typing import NDArray

from tracediff.errors import StackError
from tracediff.events import ROOT
from tracediff.frames import Frame
from tracediff.policy import LEVELS, Policy
from tracediff.tape import Given, Tape
from tracediff.trace.snapshot import Tree

__all__ = [
    "LEVELS",
    "Frame",
    "Given",
    "Patches",
    "Policy",
    "Recorder",
    "Tape",
    "attached",
    "join_path",
    "root_path",
    "watch_generators",
]


class Patches:
    """Attributes replaced while a recorder is attached, put back in reverse order."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replaces `owner.name` by `wrap(original)`; does nothing where there is no such name."""
        original = getattr(owner, name, None)
        if original is None:
            return
        own = vars(owner)
        if name in own:
            # Not `original`: a static method must not come back as a plain function.
            self._stack.callback(setattr, owner, name, own[name])
        else:
            self._stack.callback(delattr, owner, name)
        setattr(owner, name, wrap(original))

    def replace_static(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """As `replace`, for a static method."""
        self.replace(owner, name, lambda original: staticmethod(wrap(original)))

    def when_imported(self, module: str, install: Callable[[Any], None]) -> None:
        """Calls back with a module: now if it is imported, or else as soon as it is.

        Importing it here would cost seconds in scripts that never do.
        """
        if module in sys.modules:
            install(sys.modules[module])
            return
        finder = _ImportHook(module, install)
        sys.meta_path.insert(0, finder)
        self._stack.callback(finder.remove)

    def on_undo(self, callback: Callable[..., Any], *args: Any) -> None:
        """Calls back when the patches are undone, such as a hook handle's `remove`."""
        self._stack.callback(callback, *args)

    def undo(self) -> None:
        self._stack.close()


class _ImportHook(MetaPathFinder):
    """Finds one module through the other finders, and calls back when it has been executed."""

    def __init__(self, module: str, install: Callable[[Any], None]) -> None:
        self._module = module
        self._install = install

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        self.remove()
        spec = find_spec(name)
        execute = getattr(spec and spec.loader, "exec_module", None)
        if spec is None or spec.loader is None or execute is None:
            return spec

        def exec_module(module: Any) -> None:
            execute(module)
            self._install(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class Recorder(ABC):
    """What a stack must provide: attach to the framework, detach again, and say what it is.

    A subclass lives in `recorders/<stack>_recorder.py`, is named `Recorder`, and is found by the
    file's name; third parties use the entry-point group `tracediff.recorders`. `tracediff.testing`
    holds the conformance tests that it must pass.

    A recorder never changes the run: losses and weights are bit-identical with and without it, and
    it draws from no generator.
    """

    stack: ClassVar[str]

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.patches = Patches()

    @abstractmethod
    def attach(self) -> None:
        """Hooks into the framework, undone by `detach`; use `self.patches`."""

    @abstractmethod
    def environment(self) -> Mapping[str, Any]:
        """Framework settings that can change a result: device, threads, precision switches."""

    @abstractmethod
    def versions(self) -> Mapping[str, str]:
        """Versions of the packages that make up the stack, by distribution name."""

    def detach(self) -> None:
        self.patches.undo()

    # ---- long runs: a stack without these has no snapshots -----------------------------------

    def generators(self) -> Mapping[str, NDArray[Any]]:
        """States of the framework's global generators, under the paths of their `rng` events."""
        return {}

    def set_generators(self, states: Mapping[str, NDArray[Any]]) -> None:
        """Puts those generators that are the framework's into given states."""
        raise StackError(f"the recorder of {self.stack} cannot set generators: {sorted(states)}")

    def capture(self) -> Tree | None:
        """All that the coming step depends on but for generators, or None if it cannot be had."""
        return None

    def restore_weights(self, tree: Tree) -> None:
        """Puts back the weights alone, for an evaluation that comes before the step.

        Raises:
            RerunError: The script has other weights than it had.
        """
        raise StackError(f"the recorder of {self.stack} cannot put back a snapshot")

    def restore(self, tree: Tree) -> None:
        """Puts back what `capture` returned, and records parameters and buffers as loaded.

        Raises:
            RerunError: The script has other objects than it had.
        """
        raise StackError(f"the recorder of {self.stack} cannot put back a snapshot")


def watch_generators(
    tape: Tape,
    states: Callable[[], Mapping[str, NDArray[Any]]],
    fresh: Callable[[str], NDArray[Any] | None] = lambda path: None,
) -> Callable[[], None]:
    """Records states of generators before each step, and after it those that it has changed.

    Args:
        fresh: State of a generator that appears later, when it was new.

    Returns:
        What ends it.
    """
    unused = dict(states())
    before: dict[str, NDArray[Any]] = {}

    def start() -> None:
        before.clear()
        before.update(states())
        for path, state in before.items():
            if path not in unused and (new := fresh(path)) is not None:
                unused[path] = new
            touched = path not in unused or not _same(state, unused[path])
            attributes = {"touched": touched}
            tape.emit("rng", path, "state", state, kind="state", attributes=attributes)

    def end() -> None:
        for path, state in states().items():
            if path in before and not _same(state, before[path]):
                tape.emit("rng", path, "after", state, kind="state")

    def stop() -> None:
        tape.on_step_start.remove(start)
        tape.on_step_end.remove(end)

    tape.on_step_start.append(start)
    tape.on_step_end.append(end)
    return stop


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """As `np.array_equal` of integers, which takes four times as long."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@contextmanager
def attached(recorder: Recorder) -> Iterator[None]:
    """Attaches a recorder for the duration of a `with` block, whatever happens inside."""
    try:
        recorder.attach()
        yield
    finally:
        recorder.detach()


def root_path(index: int) -> str:
    """Path of the root module with this index: `root`, then `root[1]`, `root[2]` ..."""
    return ROOT if index == 0 else f"{ROOT}[{index}]"


def join_path(root_index: int, name: str) -> str:
    """Path of a module within a root: its own name under the first root, prefixed otherwise."""
    if not name:
        return root_path(root_index)
    return name if root_index == 0 else f"{root_path(root_index)}.{name}"
