"""Which payloads and sketches a recording keeps."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tracediff.errors import UsageError
from tracediff.events import EXACT_KINDS
from tracediff.trace.summary import SHORT_SKETCH, SKETCH_SIZE

LEVELS: Final = ("digest", "module", "op-digest", "op")


@dataclass(frozen=True, slots=True)
class Policy:
    """Which payloads and sketches are kept.

    Attributes:
        level: `digest` keeps no tensor payloads, `module` keeps them at module boundaries, `op`
            those of every operation as well; `op-digest` records every operation and keeps none.
        steps: Steps whose payloads are kept and whose operations are recorded, or None for all.
        sketch_every: Where payloads are not kept, steps at which every event keeps a sketch.
            At the others what modules return keeps a short one, unless operations are recorded.
        state_every: Likewise, steps at which parameters, updates and their gradients keep a whole
            one; at the others they keep a short one.
        only: Module path, or a pattern for it, to which tensor payloads and operations are
            restricted; what is inside the module belongs to it.
    """

    level: str = "module"
    steps: Sequence[range] | None = None
    sketch_every: int = 100
    state_every: int = 100
    only: str | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(f"level {self.level!r} is unknown: use one of {', '.join(LEVELS)}")
        for name, every in (("every", self.sketch_every), ("state", self.state_every)):
            if every < 1:
                raise UsageError(f"--sketch-{name} is {every}: it must be 1 or more")

    @property
    def operations(self) -> bool:
        """Whether operations are recorded at all."""
        return self.level in ("op", "op-digest")

    @property
    def only_digests(self) -> bool:
        """Whether operations are recorded, and no payload of a tensor kept."""
        return self.level == "op-digest"

    @property
    def brief(self) -> bool:
        """Whether fingerprints leave out what tells apart operations without names."""
        return self.level != "op"

    def keeps_payload(self, step: int, phase: str, kind: str, path: str) -> bool:
        if kind in EXACT_KINDS or phase in ("rendering", "rng"):
            return True
        return self.level in ("module", "op") and self._selects(step, path)

    def records_operations(self, step: int, path: str) -> bool:
        """Whether operations of the module at `path` are recorded."""
        return self.operations and self._selects(step, path)

    def _selects(self, step: int, path: str) -> bool:
        if self.steps is not None and not any(step in steps for steps in self.steps):
            return False
        return self.only is None or _within(path.partition("@")[0], self.only)

    def buckets(self, step: int, phase: str, port: str) -> int:
        """How many buckets of a sketch an event without a payload keeps: `SKETCH_SIZE` of a whole
        one, `SHORT_SKETCH`, or 0 for none.

        A parameter, its update and the gradient that it is made of keep one at every step: what
        goes wrong in the optimizer's state shows in the update, and from then on in the parameter.
        So does what a module returns: without, nobody could say how far it really is apart, and
        what rounding may have done to all weights before it would allow for a fault. Recordings of
        operations do without: they are not left on, and would hash what both return once more.
        """
        is_state = phase == "optimizer" and port in ("grad", "update", "param")
        every = self.state_every if is_state else self.sketch_every
        if phase == "loading" or step < 3 or step % every == 0:
            return SKETCH_SIZE
        is_result = phase == "forward" and port.startswith("out") and not self.operations
        return SHORT_SKETCH if is_state or is_result else 0


@functools.lru_cache(maxsize=1 << 16)
def _within(path: str, pattern: str) -> bool:
    """Whether a path, or one of the modules that it is inside of, is or matches the pattern."""
    parts = path.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(prefix == pattern or fnmatch.fnmatchcase(prefix, pattern) for prefix in prefixes)
