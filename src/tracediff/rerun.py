"""Executing a recorded run once more, up to a step: what is known of the steps that are skipped.

A script cannot jump into its loop. It is run from its beginning: with its data loading, its
schedules and its own code, but without computing the model, its gradients and its updates, until
the step of a snapshot. The recording says what those steps came to: the losses, exactly, and the
states of the generators. From the snapshot on, everything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracediff.errors import RerunError
from tracediff.events import Event, Site
from tracediff.trace import Trace
from tracediff.trace.dtypes import DTYPES
from tracediff.trace.snapshot import Tree
from tracediff.trace.summary import FINGERPRINT_FIELDS, digest

Array = NDArray[Any]
_MEAN = FINGERPRINT_FIELDS.index("mean")


class RerunEnded(BaseException):
    """Leaves a script after the last step that is wanted. Not an error: nothing may catch it."""


class Rerun:
    """The recording that a script is executed against.

    Attributes:
        start: The first step that is computed; those before are skipped.
        stop: The last step; the script is left after it.
        notes: What did not go as it was recorded, while skipping.
    """

    def __init__(self, trace: Trace, stop: int, *, skip: bool = True) -> None:
        """
        Args:
            skip: Skip to the latest snapshot at or before `stop`; otherwise compute all steps.

        Raises:
            RerunError: The recording has no step `stop`.
        """
        if stop not in trace.steps:
            known = f"steps {trace.steps[0]} to {trace.steps[-1]}" if trace.steps else "no step"
            raise RerunError(f"{trace.path} has no step {stop}: it has {known}")
        self._trace = trace
        self.stop = stop
        usable = [step for step in trace.snapshots if step <= stop] if skip else []
        self.start = max(usable, default=0)
        self.notes: list[str] = []
        self._step = -1
        self._events: dict[Site, Event] = {}

    def skips(self, step: int) -> bool:
        return step < self.start

    def snapshot(self) -> Tree:
        """What the run was made of before step `start`."""
        return self._trace.snapshot(self.start)

    # ---- what a skipped step came to -------------------------------------------------------

    def event(self, step: int, phase: str, path: str, call: int = 0, port: str = "out") -> Any:
        """The event recorded at a site, or None."""
        return self._of(step).get(Site(step, phase, path, call, port))

    def ports(self, step: int, phase: str, path: str, call: int) -> dict[str, Event]:
        """Outputs of a call by port."""
        return {
            site.port: event
            for site, event in self._of(step).items()
            if (site.phase, site.path, site.call) == (phase, path, call)
            and (site.port == "out" or site.port.startswith("out."))
        }

    def calls(self, step: int, phase: str, path: str) -> int:
        """How often a path was called in a step."""
        return len({s.call for s in self._of(step) if (s.phase, s.path) == (phase, path)})

    def scalar(self, event: Event | None) -> Array | None:
        """The exact value of an event without dimensions, also where no payload was kept.

        All of a float is in its fingerprint: the mean of one element is that element.
        """
        if event is None or event.shape or not event.dtype:
            return None
        if event.payload is not None:
            return self._trace.array(event)
        value = np.asarray(event.fingerprint[_MEAN]).astype(DTYPES[event.dtype])
        return value if digest(value) == event.digest else None

    def generators(self, step: int, port: str) -> dict[str, Array]:
        """States of the generators: before a step (`state`), or those that it changed (`after`)."""
        return {
            site.path: self._trace.array(event)
            for site, event in self._of(step).items()
            if (site.phase, site.port) == ("rng", port) and event.payload is not None
        }

    def check_batch(self, step: int, name: str, call: int, array: Array) -> None:
        """Checks a field of a batch against the recorded one.

        Raises:
            RerunError: It is another one: the script or its data are not those of the recording.
        """
        known = self.event(step, "rendering", name, call)
        if known is not None and (known.digest, known.shape) != (digest(array), array.shape):
            raise RerunError(
                f"{name} of step {step} is not what was recorded, on the way to the snapshot of "
                f"step {self.start}: check the script, its arguments and data, or compute all "
                "steps with --from-start"
            )

    def _of(self, step: int) -> dict[Site, Event]:
        if self._step != step:
            known = step in self._trace.steps
            self._events = {e.site: e for e in self._trace.events(step)} if known else {}
            self._step = step
        return self._events


def follow(
    rerun: Rerun,
    step: int,
    port: str,
    states: Mapping[str, Array],
    restore: Callable[[Mapping[str, Array]], None],
) -> None:
    """Puts generators into the states that were recorded at a place of a skipped step.

    At the start of a step they should be in them already; where one is not, the script drew other
    numbers than it did when it was recorded, which is noted.
    """
    known = rerun.generators(step, port)
    other = {
        name: state
        for name, state in known.items()
        if name in states and not np.array_equal(state, states[name])
    }
    if not other:
        return
    for name in other if port == "state" else ():
        event = rerun.event(step, "rng", name, 0, "state")
        if event.attributes.get("touched", True) and len(rerun.notes) < 3:
            rerun.notes.append(
                f"generator {name} was not in its recorded state before step {step}, while "
                "skipping: it was put into it"
            )
    restore(other)


def differing_sites(
    recorded: Trace, again: Trace, steps: Sequence[int]
) -> Iterator[tuple[Site, str]]:
    """Sites at which a re-execution is not bit-equal to the recording, in the order of execution.

    Settings of the environment are no result, and generators that nobody seeded or drew from are
    no input. Sites that only the re-execution has were recorded in more detail.
    """
    for step in steps:
        found = {event.site: event for event in again.events(step)}
        for event in recorded.events(step):
            site = event.site
            other = found.get(site)
            untouched = event.attributes.get("touched") is False
            if site.phase == "environment" or untouched:
                continue
            if other is None:
                yield site, "was not recorded again"
            elif (other.digest, other.shape, other.dtype) != (
                event.digest,
                event.shape,
                event.dtype,
            ):
                yield site, "is not bit-equal"
