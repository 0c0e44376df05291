"""A replay by substitution as the judge has to read it: its calls ran on the baseline's inputs.

A replay records what each input would have been, and then runs the call on the baseline's value.
"""

from __future__ import annotations

from typing import Any, Final

from numpy.typing import NDArray

from tracediff.align import Alignment
from tracediff.events import Event, Pair, Run, Site
from tracediff.trace import Trace

SETTING: Final = "replay"
"""Setting of the manifest that says what was replayed with what, see `tracediff.substitution`."""


PORT: Final = "given"
"""Port at which a replay says what a call ran on: it has no partner in the run it was made with."""


def identity(run: Run) -> dict[str, str]:
    """What tells one recording from another, wherever it is moved."""
    return {"stack": run.stack, "started": run.started, "source": run.source_digest}


def is_replay(run: Run) -> bool:
    """Whether a run was a replay by substitution."""
    return SETTING in run.settings


class AsGiven(Trace):
    """A replay, in which the input of a call is the value it ran on, not the one it computed."""

    def __init__(self, baseline: Trace, replay: Trace, alignment: Alignment) -> None:
        super().__init__(replay.path, rank=replay.rank)
        self._baseline = baseline
        self._given: dict[Site, Event] = {}
        given = {
            (event.site.path, event.site.call, port)
            for event, _ in alignment.target_only
            if (event.site.phase, event.site.port) == ("forward", PORT)
            for port in event.value
        }
        for pair in alignment.pairs:
            site = pair.target.site
            if site.phase == "forward" and (site.path, site.call, site.port) in given:
                self._given[site] = pair.baseline

    def ran_on(self, pair: Pair) -> bool:
        """Whether the target's call ran on the baseline's value of this pair."""
        return pair.target.site in self._given

    def array(self, event: Event) -> NDArray[Any]:
        given = self._given.get(event.site)
        if given is None:
            return super().array(event)
        own = super().array(event).dtype
        value: NDArray[Any] = self._baseline.array(given).astype(own, copy=False)
        return value
