"""What a reader should know of the rendering on each side, though it is no difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from tracediff.events import Event
from tracediff.rendering.id_classes import IGNORED
from tracediff.trace import Trace

_SIDES: Final = ("baseline", "target")
_LOOKED_AT: Final = 2000
"""Texts of a step in which a broken prefix is looked for."""


def notes(traces: tuple[Trace, Trace], steps: Sequence[int]) -> list[str]:
    """A broken prefix property and rows without trained labels, each told once, with its sides."""
    found: dict[str, list[str]] = {}
    for side, trace in zip(_SIDES, traces, strict=True):
        prefix: str | None = None
        untrained: str | None = None
        for step in steps:
            prefix = prefix or broken_prefix(_conversations(trace, step))
            untrained = untrained or next(_untrained(trace, step), None)
        for note in filter(None, (prefix, untrained)):
            found.setdefault(note, []).append(side)
    return [
        f"{'both sides' if len(sides) == 2 else sides[0]}: {note}" for note, sides in found.items()
    ]


def _conversations(trace: Trace, step: int) -> Iterator[Event]:
    """Messages and template texts of the first samples of a step, in order of rendering."""
    rows = trace.samples(step)
    codes = [i for i, (name, _) in enumerate(rows.steps) if name in ("messages", "template")]
    for row in np.flatnonzero(np.isin(rows.step, codes))[:_LOOKED_AT]:
        yield rows.event(int(row))


def broken_prefix(events: Iterable[Event]) -> str | None:
    """The first conversation that was rendered with a further turn, and not as a continuation.

    A conversation goes on where its messages begin with all those of the sample before.
    """
    before: tuple[str, str] | None = None
    messages = ""
    for event in events:
        name = event.site.path.rpartition(".")[2]
        if name == "messages":
            messages = str(event.value)
        elif name == "template":
            text = str(event.value)
            if before and messages.startswith(f"{before[0][:-1]}, ") and before[0].endswith("]"):
                index = next(
                    (i for i, (x, y) in enumerate(zip(before[1], text, strict=False)) if x != y),
                    min(len(before[1]), len(text)),
                )
                if index < len(before[1]):
                    return (
                        f"the prefix property is broken at {event.site.path}: with further turns "
                        f"the text departs at character {index} from that of the turns before; "
                        "the template rewrites history"
                    )
            before = messages, text
    return None


def _untrained(trace: Trace, step: int) -> Iterator[str]:
    for event in trace.events(step, samples=False):
        if (
            (event.site.phase, event.kind) != ("rendering", "labels")
            or event.payload is None
            or len(event.shape) != 2
        ):
            continue
        labels = trace.array(event)
        empty = (labels == IGNORED).all(axis=-1)
        if empty.any() and labels.shape[-1]:
            row = int(empty.argmax())
            yield f"no label of row {row} is trained in {event.site}: all are {IGNORED}"
