"""Who draws from a generator: each call of a module, the data loader, the script between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import TYPE_CHECKING

from tracediff.draws import Position
from tracediff.events import Event

if TYPE_CHECKING:
    from tracediff.frames import Frame
    from tracediff.tape import Tape

SCRIPT = "the script"
UNWATCHED = "calls that were not watched"
PORT = "drawn"
OPERATION_PORT = "draw"


class Consumers:
    """Records each consumer of one generator, with the place at which it leaves it.

    What a call draws is its own, and not its parent's. While nothing is drawn, nobody looks: a
    step in which the generator stood still is not followed by one in which calls are watched.

    Where operations are recorded, each one that draws is on record as well, at a port of its own.
    """

    def __init__(self, tape: Tape, path: str, position: Callable[[], Position | None]) -> None:
        """
        Args:
            path: Path of the generator's `rng` events.
            position: Where it stands now, or None where that cannot be seen.
        """
        self._tape = tape
        self._path = path
        self._position = position
        self._seen = position()
        self._watching = False
        self._drawn = False
        self._step = -1
        self._count = 0
        self._outside = SCRIPT
        tape.on_step_start.append(self._start)
        tape.on_step_end.append(self._end)
        self._watch(True)

    def mark(self, by: str) -> None:
        """Says who has drawn whatever was drawn since the last call."""
        now = self._position()
        if now is None or now == self._seen:
            return
        self._seen, self._drawn = now, True
        if self._step != self._tape.step:
            self._step, self._count = self._tape.step, 0
        value = {"by": by, "at": list(astuple(now))}
        self._tape.emit("rng", self._path, PORT, value, call=self._count, kind="setting")
        self._count += 1

    @contextmanager
    def drawing(self, operation: str, source: Callable[[], str]) -> Iterator[None]:
        """Records an operation that runs in the block, if it draws.

        Args:
            source: Says at which line of the code.
        """
        before = self._position()
        yield
        now = self._position()
        if now is None or now == before:
            return
        frame = self._tape.current
        by = self._outside if frame is None else _name(frame)
        self._tape.emit(
            "rng",
            self._path,
            OPERATION_PORT,
            {"by": by, "at": list(astuple(now))},
            call=self._tape.next_call("rng", f"{self._path}:{OPERATION_PORT}"),
            kind="setting",
            op=operation,
            source=source(),
        )

    @contextmanager
    def outside(self, by: str) -> Iterator[None]:
        """What is drawn outside of modules in the block is drawn by this, and not by the script."""
        self.mark(SCRIPT)
        before, self._outside = self._outside, by
        try:
            yield
        finally:
            self.mark(by)
            self._outside = before

    def _start(self) -> None:
        self.mark(SCRIPT)

    def _end(self) -> None:
        self.mark(SCRIPT)
        self._watch(self._drawn or self._tape.rerun is not None)
        self._drawn = False

    def _watch(self, wanted: bool) -> None:
        """Looks at the generator wherever a call begins and ends, or no longer does."""
        if wanted == self._watching:
            return
        self._watching = wanted
        for callbacks, own in (
            (self._tape.on_enter, self._enter),
            (self._tape.on_exit, self._exit),
        ):
            (callbacks.append if wanted else callbacks.remove)(own)

    def _enter(self, frame: Frame) -> None:
        self.mark(_name(frame.parent))

    def _exit(self, frame: Frame) -> None:
        self.mark(_name(frame))


def _name(frame: Frame | None) -> str:
    return SCRIPT if frame is None else f"{frame.path}#{frame.call}"


def is_draw(event: Event, port: str) -> bool:
    """Whether an event says who left a generator where, in the form that it is written in."""
    site, value = event.site, event.value
    if (site.phase, site.port) != ("rng", port) or not isinstance(value, dict):
        return False
    by, at = value.get("by"), value.get("at")
    return isinstance(by, str) and isinstance(at, list) and list(map(type, at)) == [int, int]
