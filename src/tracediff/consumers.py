"""Who draws from a generator: each call of a module, the data loader, the script between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

from tracediff.draws import Position
from tracediff.tape import Frame, Tape

SCRIPT = "the script"
UNWATCHED = "calls that were not watched"
PORT = "drawn"


class Consumers:
    """Records each consumer of one generator, with the place at which it leaves it.

    What a call draws is its own, and not its parent's. While nothing is drawn, nobody looks: a
    step in which the generator stood still is not followed by one in which calls are watched.
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
        self._watching = True
        self._drawn = False
        self._step = -1
        self._count = 0
        tape.on_step_start.append(self._start)
        tape.on_step_end.append(self._end)
        tape.on_enter.append(self._enter)
        tape.on_exit.append(self._exit)

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

    def _start(self) -> None:
        self.mark(SCRIPT)

    def _end(self) -> None:
        self.mark(SCRIPT)
        self._watching, self._drawn = self._drawn or self._tape.rerun is not None, False

    def _enter(self, frame: Frame) -> None:
        if self._watching:
            self.mark(_name(frame.parent))

    def _exit(self, frame: Frame) -> None:
        if self._watching:
            self.mark(_name(frame))


def _name(frame: Frame | None) -> str:
    return SCRIPT if frame is None else f"{frame.path}#{frame.call}"
