"""When and where else a divergence shows, which may say more than its own shape: only after some
steps, only in parameters of one dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from tracediff.bisection.healing import Step
from tracediff.bisection.inheritance import Judged
from tracediff.verdict import Divergence

_PARAMETER_STAGES: Final = ("loading", "backward", "optimizer")


def told(found: Divergence, first: Judged | Divergence, steps: Sequence[Step]) -> Divergence:
    """The divergence with what the other steps and parameters add to it."""
    if not isinstance(first, Judged):
        return found
    notes: list[str] = []
    detail: dict[str, Any] = {}
    before = [s for s in steps if s.number < found.step and _agrees(s, first)]
    if before and found.stage != "rng":  # generators are told with their step and consumer
        detail["agreed_steps"] = len(before)
        notes.append(
            f"the same place agrees in {len(before)} steps before: look for what changes during a "
            "run, such as a schedule, optimizer state, a counter or a cache"
        )
    step = next((s for s in steps if s.number == found.step), None)
    if step is not None and _only_one_dimensional(step, first):
        detail["only"] = "1-D parameters"
        notes.append(
            "only parameters of one dimension (norms, biases) differ here: a rule by dimension or "
            "name, such as weight decay or a filter of what is trained or loaded"
        )
    meaning = "; ".join(part for part in (found.meaning, *notes) if part)
    return replace(found, meaning=meaning, detail={**found.detail, **detail})


def _agrees(step: Step, first: Judged) -> bool:
    site = first.event.site
    return any(
        (j.event.site.phase, j.event.site.path, j.event.site.port)
        == (site.phase, site.path, site.port)
        and j.mark != "diverged"
        for j in step.judged
    )


def _only_one_dimensional(step: Step, first: Judged) -> bool:
    """Whether all that diverge of the same port are parameters of one dimension, several of them,
    and none of the others does."""
    site = first.event.site
    if site.phase not in _PARAMETER_STAGES:
        return False
    dimensions = {
        j.event.site.path: len(j.event.shape)
        for j in step.judged
        if j.event.site.phase in _PARAMETER_STAGES and j.event.site.port in ("param", "grad")
    }
    same = [
        (dimensions[j.event.site.path], j.mark == "diverged")
        for j in step.judged
        if (j.event.site.phase, j.event.site.port) == (site.phase, site.port)
        and j.event.site.path in dimensions
    ]
    diverged = [dims for dims, differs in same if differs]
    others = [dims for dims, differs in same if not differs]
    return len(diverged) > 1 and set(diverged) == {1} and bool(others) and 1 not in others
