"""Events of operations, on every stack alike: paths, lines of code, leaves and outputs."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from numpy.typing import NDArray

from tracediff.operations import LEAF, canonical_operation
from tracediff.recording import Tape
from tracediff.trace.summary import Plain, plain

_HERE: Final = Path(__file__).resolve().parent
_CORE: Final = Path(sys.modules["tracediff"].__file__ or "").resolve().parent


@dataclass(slots=True)
class Place:
    """Where an operation runs: stage, module path, and the lines of code that issued it.

    Attributes:
        source: Innermost line outside the framework itself.
        user_line: Innermost line that belongs to no installed package.
    """

    phase: str
    path: str
    source: str = ""
    user_line: str = ""


@dataclass(slots=True)
class Operation:
    """One operation that ran.

    Attributes:
        name: The stack's own name for it.
        inputs: Orders of the events that its tensor arguments come from.
        args: Arguments that are no data, by name.
        operands: Data arguments in order, None for a tensor, where some are numbers; else ().
        attributes: What else is known about it, as texts, integers and booleans.
        canonical: Its canonical name, where it depends on the arguments.
    """

    name: str
    place: Place
    inputs: Sequence[int] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    operands: Sequence[Any] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    canonical: str = ""


Recorded = tuple[Place, str, str, str, int]
"""A forward event of the current step, for its gradient to refer to: its place, canonical name,
name, port and call."""


class OperationEvents:
    """Writes operations, leaves and gradients onto the tape."""

    def __init__(self, tape: Tape, stack: str) -> None:
        self._tape = tape
        self._stack = stack
        self._recorded: dict[int, Recorded] = {}
        self._differentiated: Counter[int] = Counter()

    def clear(self) -> None:
        """Forgets the events of a step that is over."""
        self._recorded.clear()
        self._differentiated.clear()

    def place_of(self, order: int) -> Place | None:
        """Where the operation ran whose event has this order in the current step."""
        recorded = self._recorded.get(order)
        return recorded[0] if recorded is not None else None

    def cotangent(self, order: int, array: NDArray[Any], inputs: Sequence[int]) -> int:
        """Records the gradient of a forward event's value."""
        place, canonical, op, port, call = self._recorded[order]
        again = self._differentiated[order]  # a second derivative has its own port
        self._differentiated[order] += 1
        port = f"grad_{port}@{again}" if again else f"grad_{port}"
        attributes = Plain(level="op", canonical=canonical, forward_order=order)
        place = replace(place, phase="backward")
        return self._emit(place, canonical, op, port, array, inputs, attributes, call)

    def leaf(self, place: Place, name: str, array: NDArray[Any]) -> int:
        """Records a value that no recorded operation of this step made."""
        attributes = Plain(level="op", canonical=LEAF, leaf=True, name=name)
        call = self._tape.next_call(place.phase, f"{place.path}@{LEAF}")
        return self._emit(place, LEAF, LEAF, "out", array, (), attributes, call)

    def outputs(
        self,
        operation: Operation,
        arrays: Sequence[NDArray[Any] | None],
        twins: Sequence[int | None] = (),
    ) -> list[int | None]:
        """Records what an operation returned; None stands for an output without a value.

        Args:
            twins: For each output, the event that it has its value from unchanged, see `Tape.emit`.
        """
        canonical = operation.canonical or canonical_operation(self._stack, operation.name)
        attributes = Plain({"level": "op", "canonical": canonical, **operation.attributes})
        if operation.args:
            attributes["args"] = plain(operation.args)
        if operation.operands:
            attributes["operands"] = plain(list(operation.operands))
        place = operation.place
        if place.user_line and place.user_line != place.source:
            attributes["user_line"] = place.user_line
        call = self._tape.next_call(place.phase, f"{place.path}@{canonical}")
        return [
            None
            if array is None
            else self._emit(
                place,
                canonical,
                operation.name,
                f"out.{index}" if len(arrays) > 1 else "out",
                array,
                operation.inputs,
                attributes,
                call,
                twin,
            )
            for index, (array, twin) in enumerate(zip_longest(arrays, twins))
        ]

    def _emit(
        self,
        place: Place,
        canonical: str,
        op: str,
        port: str,
        array: NDArray[Any],
        inputs: Sequence[int],
        attributes: Mapping[str, Any],
        call: int,
        twin: int | None = None,
    ) -> int:
        path = f"{place.path}@{canonical}"
        about = place.phase, path, call, port, op, place.source, (), "", tuple(inputs)
        order = self._tape.add(about, array, "tensor", attributes, twin)
        self._recorded[order] = place, canonical, op, port, call
        return order


def issuing_lines(framework: str, start: FrameType | None = None) -> tuple[str, str]:
    """The innermost line outside a framework, and the innermost one outside all packages.

    Args:
        framework: Folder of the framework's own code.
        start: Where to begin, in place of the caller.

    Returns:
        Both as `file:line`, "" where there is none.
    """
    return _told(*_walk(start or sys._getframe(1), _kinds(framework), None))


def _walk(
    frame: FrameType | None, kinds: _Kinds, boundary: CodeType | None
) -> tuple[FrameType | None, FrameType | None]:
    """The innermost frame of a package, if one comes first, and that of the user's code or of the
    boundary."""
    package: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        if code is boundary:
            break
        kind = kinds[code.co_filename]
        if kind is not _FRAMEWORK:
            if kind is _USER:
                break
            package = package or frame
        frame = frame.f_back
    return package, frame


def _told(package: FrameType | None, user: FrameType | None) -> tuple[str, str]:
    line = "" if user is None else _line(user)
    return line if package is None else _line(package), line


class Lines:
    """As `issuing_lines`, of operations inside of calls: what is around a call is found once."""

    def __init__(self, framework: str, boundary: CodeType) -> None:
        """
        Args:
            boundary: The recorder's own function that makes a call.
        """
        self._framework = framework
        self._boundary = boundary
        self._call: object = None
        self._around = "", ""

    def clear(self) -> None:
        self._call = None

    def inside(self, call: object) -> tuple[str, str]:
        """Both lines for the operation that runs now.

        Args:
            call: The innermost call of this thread, which lasts as long as the boundary's frame;
                None where none is known.
        """
        if call is None:
            return issuing_lines(self._framework)
        package, end = _walk(sys._getframe(1), _kinds(self._framework), self._boundary)
        if end is None or end.f_code is not self._boundary:
            return _told(package, end)
        if self._call is not call:
            self._call, self._around = call, issuing_lines(self._framework, end.f_back)
        return (self._around[0] if package is None else _line(package)), self._around[1]


_FRAMEWORK: Final = "framework"
_PACKAGE: Final = "package"
_USER: Final = "user"


def _line(frame: FrameType) -> str:
    """`file:line`; to find a line takes longer than all else that is asked of a frame."""
    return f"{_name(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.lru_cache(maxsize=4096)
def _name(filename: str) -> str:
    return Path(filename).name


class _Kinds(dict[str, str]):
    """Whose code a file is: the framework's (with Python's and ours), a package's, the user's."""

    def __init__(self, framework: str) -> None:
        self._framework = framework

    def __missing__(self, filename: str) -> str:
        found = self[filename] = self._kind(filename)
        return found

    def _kind(self, filename: str) -> str:
        if "site-packages" in filename and not filename.startswith(self._framework):
            return _PACKAGE
        ours = filename.startswith((self._framework, "<", sys.base_prefix)) or any(
            Path(filename).resolve().is_relative_to(folder) for folder in (_HERE, _CORE)
        )
        return _FRAMEWORK if ours else _USER


_kinds: Final = functools.lru_cache(_Kinds)
