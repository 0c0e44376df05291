"""What a reader should know of the rendering on each side, besides how it differs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from tracediff.align import Alignment
from tracediff.align.samples import SampleAlignment
from tracediff.compare import settings
from tracediff.events import Event, Pair
from tracediff.rendering.provenance import IGNORED
from tracediff.trace import Trace

Setting = tuple[str, Any, Any]

_SAMPLE: Final = re.compile(r"^sample\[(\d+)\]\.(.+)$")
_SIDES: Final = ("baseline", "target")
_TEXT_STEPS: Final = ("messages", "template", "text", "ids")
_FACTS_OF_ROWS: Final = frozenset(
    {"lengths", "jumps", "tokens", "special", "pretokens", "padded", "truncated", "tokenizer"}
)
"""Attributes of token IDs that say how they came about, not what they depend on."""

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
    if not codes:
        return
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


def unseen(steps: Iterable[tuple[Alignment, SampleAlignment]]) -> str | None:
    """Which steps of the samples' rendering a trace does not show; None where both show all."""
    paths: tuple[set[str], set[str]] = (set(), set())
    for found, samples in steps:
        both = [(pair.baseline, pair.target) for pair in found.pairs]
        sides = (*zip(*both, strict=True),) if both else ((), ())
        for side, only in enumerate((found.baseline_only, found.target_only)):
            events = (*sides[side], *(event for event, _ in only))
            paths[side].update(e.site.path for e in events if e.site.phase == "rendering")
            paths[side].update(f"sample[0].{name}" for name, _ in samples.rows[side].steps)
    told = [_unseen(side) for side in paths]
    if told[0] == told[1]:
        return told[0] and f"{told[0]} on both sides"
    pairs = zip(_SIDES, told, strict=True)
    return "; ".join(f"{what} in the {name}" for name, what in pairs if what) or None


def _unseen(paths: Iterable[str]) -> str | None:
    found = set(paths)
    steps = {match[2] for path in found if (match := _SAMPLE.match(path))}
    lacking = [step for step in _TEXT_STEPS if step not in steps]
    if not found or not lacking:
        return None
    return f"{', '.join(lacking)} not seen" if steps else "only batches were seen"


def inputs_of(pair: Pair) -> list[Setting]:
    """What a step was given besides the step before (flags, variables), where the sides differ."""
    sides = [
        {k: v for k, v in event.attributes.items() if k not in _FACTS_OF_ROWS}
        for event in (pair.baseline, pair.target)
    ]
    if pair.baseline.site.phase != "rendering" or pair.baseline.kind not in ("text", "ids"):
        return []
    names = dict.fromkeys([*sides[0], *sides[1]])
    both = [(name, sides[0].get(name), sides[1].get(name)) for name in names]
    return [(name, x, y) for name, x, y in both if not settings.equal(x, y)]
