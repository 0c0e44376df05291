"""How much of what could have been compared was compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tracediff.align.names import parent
from tracediff.bisection.healing import Step
from tracediff.events import ROOT, Event

_UNCOUNTED = ("environment", "rng")
"""Settings and generators of one side say nothing about how much of the job was seen."""


def is_counted(event: Event) -> bool:
    return event.site.phase not in _UNCOUNTED


def coverage(steps: Iterable[Step], samples: tuple[int, int, tuple[int, int]]) -> float:
    """The fraction of events, of the side that has fewer, that were compared.

    The finer side always has events that the coarser one has not. Which side is finer differs from
    module to module (a mixture of experts is, on one stack, an attention on the other), so the
    smaller number is taken for each stage within each innermost module that both sides have.

    Args:
        samples: Rendered samples, as `samples.counts` has them: compared, differing, and only on
            one side.
    """
    compared, lacking = samples[0], min(samples[2])
    for step in steps:
        compared += sum(is_counted(judged.event) for judged in step.judged)
        only = step.alignment.baseline_only, step.alignment.target_only
        names: tuple[dict[str, str], dict[str, str]] = (
            {path: path for path in step.alignment.paths.values()},
            step.alignment.paths,
        )
        a, b = (
            Counter(_place(event, known) for event, _ in events if is_counted(event))
            for known, events in zip(names, only, strict=True)
        )
        lacking += (a & b).total()
    return compared / (compared + lacking) if compared else 0.0


def _place(event: Event, known: Mapping[str, str]) -> tuple[str, str]:
    """The stage of an event, and the innermost module around it that both sides have."""
    path = event.site.path
    while path and path not in known:
        path = parent(path)
    return event.site.phase, known.get(path, ROOT)
