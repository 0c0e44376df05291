"""How often Python looks for cyclic garbage while a run is recorded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_PER_EVENT: Final = 10
"""Containers that an event keeps until its step is written, rather too few than too many."""


@contextmanager
def paced() -> Iterator[Callable[[int], None]]:
    """Keeps what is recorded from setting off the collector of cyclic garbage.

    It sets in after so many containers more than were freed. Those of the events of a step are
    freed when the step is written, and hold no cycles: to count them would walk over all modules
    of a framework every few steps. The run's own garbage is looked for once a step, as it was.

    Yields:
        What is to be called at the end of each step with the number of its events. It does
        nothing once somebody else has set the threshold.
    """
    before = ours = gc.get_threshold()

    def adapt(events: int) -> None:
        nonlocal ours
        if gc.isenabled() and before[0] and gc.get_threshold() == ours:
            ours = max(before[0], _PER_EVENT * events), *before[1:]
            gc.set_threshold(*ours)

    try:
        yield adapt
    finally:
        if gc.get_threshold() == ours:
            gc.set_threshold(*before)
