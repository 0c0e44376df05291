"""The rendered samples of a step: what differs in their arrangement, and whether it decides."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracediff.align import Rules
from tracediff.align.arrangement import Arrangement, arrangements
from tracediff.align.samples import LIMIT, SampleAlignment, align_samples
from tracediff.events import STAGE_RANK, Event
from tracediff.trace import Trace
from tracediff.verdict import Divergence

_RUN: Final = ("forward", "loss", "backward", "optimizer", "trajectory")
_RANK: Final = STAGE_RANK["rendering"]

Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The samples of one step.

    Attributes:
        alignment: Pairs whose values are equal are only counted there.
        rearranged: What differs in their arrangement, by order.
        decides: Whether that is all there is to compare. Where batches were recorded too, they
            decide: a script may render in any order, and more than it trains on.
    """

    step: int
    alignment: SampleAlignment
    rearranged: Sequence[Divergence]
    decides: bool

    @property
    def first(self) -> Divergence | None:
        """The first difference in arrangement, if it decides."""
        return self.rearranged[0] if self.decides and self.rearranged else None

    def told(self) -> Iterator[str]:
        """A warning for each difference in arrangement that does not decide."""
        if not self.decides:
            yield from (f"rendered samples: {found.meaning}" for found in self.rearranged)


def rendered(
    traces: tuple[Trace, Trace],
    step: int,
    events: tuple[Sequence[Event], Sequence[Event]],
    rules: Rules,
    every: bool = False,
) -> Rendered:
    """Aligns the samples of a step.

    Args:
        events: The other events of the step, of both sides.
        every: Whether equal pairs are among the pairs, too, of which there may be very many.
    """
    a, b = traces
    rows = a.samples(step), b.samples(step)
    alignment = align_samples(*rows, (a.array, b.array), rules, None if every else LIMIT)
    found = [
        _divergence(alignment, arrangement)
        for arrangement in arrangements(alignment.partner, alignment.keys)
        if not _cut_off(alignment, arrangement, traces)
    ]
    found.sort(key=lambda divergence: divergence.order)
    return Rendered(step, alignment, found, not any(_is_of_run(e) for s in events for e in s))


def last_agreeing(steps: Iterable[Rendered], before: Place | None) -> tuple[Place, str] | None:
    """Place and site of the last equal value of a sample before a place; None is the end."""
    last = None
    for step in steps:
        if before is None or (step.step, _RANK) <= before[:2]:
            here = before is not None and (step.step, _RANK) == before[:2]
            found = step.alignment.last_agreeing(before[2] if before and here else sys.maxsize)
            if found is not None:
                last = (step.step, _RANK, found.order), str(found.site)
    return last


def counts(steps: Iterable[Rendered]) -> tuple[int, int, tuple[int, int]]:
    """How many values of samples were compared that are no judged pairs, how many of them differ,
    and how many of each side are unmatched and not listed."""
    compared = differing = 0
    only = [0, 0]
    for step in steps:
        compared += step.alignment.compared
        differing += step.alignment.compared - len(step.alignment.agreeing)
        for side in (0, 1):
            only[side] += step.alignment.unlisted[side]
    return compared, differing, (only[0], only[1])


def _is_of_run(event: Event) -> bool:
    return event.site.phase in _RUN or event.site.path.startswith(("batch.", "eval_batch."))


def _cut_off(
    samples: SampleAlignment, arrangement: Arrangement, traces: tuple[Trace, Trace]
) -> bool:
    """Whether samples are lacking at the end only, of a run that was cut off."""
    if arrangement.kind == "order":
        return False
    which = 1 if arrangement.kind == "missing" else 0  # the side that lacks samples
    if traces[which].run.status == "finished":
        return False
    own = [i if which else j for i, j in enumerate(samples.partner) if j >= 0]
    return arrangement.place > max(own, default=-1)


def _divergence(samples: SampleAlignment, found: Arrangement) -> Divergence:
    which = 1 if found.kind == "extra" else 0
    rows, indices = samples.rows[which], samples.samples[which]
    index = int(indices[found.place])
    own = np.flatnonzero(rows.sample == index)
    event = rows.event(int(own[np.argmin(rows.order[own])]))
    detail = {"count": found.detail["count"], "sample": index}
    if "other" in found.detail:
        other = 1 if found.kind == "order" else which
        detail["other_sample"] = int(samples.samples[other][found.detail["other"]])
    if "places" in found.detail:
        detail["samples"] = [int(indices[place]) for place in found.detail["places"]]
    return Divergence(
        stage="rendering",
        step=event.site.step,
        site=str(event.site),
        path=event.site.path,
        port=event.site.port,
        kind=found.kind,
        pattern=found.pattern,
        order=event.order,
        detail=detail,
        meaning=_meaning(found, detail),
        where={("baseline", "target")[which]: event.source},
    )


def _meaning(found: Arrangement, detail: dict[str, object]) -> str:
    count, index, other = detail["count"], detail["sample"], detail.get("other_sample")
    many = f"{count} samples" if count != 1 else "1 sample"
    if found.pattern == "shuffled":
        return (
            f"{many} of {found.detail['of']} {'are' if count != 1 else 'is'} rendered in another "
            f"order; sample[{index}] is the target's sample[{other}]"
        )
    if found.pattern == "duplicated":
        return f"the target renders {many} once more; sample[{index}] is its sample[{other}] again"
    if found.pattern == "inserted":
        return f"the target renders {many} that the baseline does not have, first sample[{index}]"
    again = "" if other is None else f", which it renders more than once (sample[{other}])"
    return f"the target does not render {many} of the baseline, first sample[{index}]{again}"
