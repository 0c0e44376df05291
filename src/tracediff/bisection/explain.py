"""What a report says about one divergence: pattern, deviations, settings, neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.inheritance import Judged
from tracediff.bisection.rendering_notes import inputs_of
from tracediff.bisection.values import read_pair
from tracediff.compare import settings
from tracediff.compare.figures import is_float, largest_deviations, max_ulp
from tracediff.compare.padding import Padding
from tracediff.compare.patterns import recognise
from tracediff.events import ROOT, Event
from tracediff.trace import Trace
from tracediff.verdict import Deviation, Divergence, Neighbour

if TYPE_CHECKING:
    from tracediff.rendering import Difference

Setting = tuple[str, Any, Any]

_NEIGHBOURS: Final = 3
_NOT_SETTINGS_OF_A_MODULE: Final = (
    "version.",
    "python.",
    "platform.",
    "env.",
    "torch.",
    "mlx.",
    "warning[",
    "tokenizer.",
)


def divergence(judged: Judged, *, origin: str | None = None) -> Divergence:
    """The bare facts of a judged pair, without reading payloads."""
    a, b = judged.pair.baseline, judged.pair.target
    return Divergence(
        stage=a.site.phase,
        step=a.site.step,
        site=str(a.site),
        path=a.site.path,
        port=a.site.port,
        kind=judged.kind,
        call=a.site.call,
        order=a.order,
        target_site=str(b.site),
        op={"baseline": a.op, "target": b.op},
        origin=origin or ("inherited" if judged.inherited else "introduced"),
        blame=judged.blame,
        detail=dict(judged.evidence),
        meaning=judged.note,
        error=judged.error,
        bound=judged.bound,
        where={"baseline": a.source, "target": b.source},
        shapes={"baseline": a.shape, "target": b.shape},
    )


def explain(
    judged: Judged,
    traces: tuple[Trace, Trace],
    environment: Sequence[Setting],
    padding: Padding | None = None,
) -> Divergence:
    """The divergence with its pattern, largest deviations and the settings that bear on it."""
    bare = divergence(judged)
    relevant = (
        *_attributes(judged),
        *inputs_of(judged.pair),
        *(setting for setting in environment if _of_tokenizer(setting[0], judged.event)),
        *(setting for setting in environment if _bears_on(setting[0], bare.path)),
    )
    if judged.kind == "setting":
        return replace(bare, **_explain_setting(judged))
    if judged.kind == "text":
        from tracediff.bisection.rendered import differ_texts

        return replace(bare, **_named(differ_texts(traces, judged.pair)), settings=relevant)
    values = read_pair(traces, judged.pair)
    if values is None:
        note = "no payload was kept: record this step at level module to see the values"
        if any(e.attributes.get("dropped") for e in (judged.event, judged.pair.target)):
            note = "its payload was dropped because the buffer was full: give a larger --max-buffer"
        return replace(bare, meaning=note, settings=relevant)
    counts = padding.counts(judged.event, values[0].shape) if padding else None
    if judged.event.kind in ("ids", "labels", "mask") or not is_float(values[0].dtype):
        return _explain_exact(bare, judged, traces, values, counts, relevant)
    pattern = recognise(*values, counts)
    facts: dict[str, Any] = {}
    if pattern:
        facts = {
            "pattern": pattern.name,
            "meaning": "; ".join(part for part in (pattern.meaning, judged.note) if part),
            "detail": {**pattern.detail, **judged.evidence},
        }
    if values[0].shape == values[1].shape:
        facts["error"] = replace(judged.error, max_ulp=max_ulp(*values))
    return replace(bare, **facts, deviations=_deviations(values, counts), settings=relevant)


def _explain_exact(
    bare: Divergence,
    judged: Judged,
    traces: tuple[Trace, Trace],
    values: tuple[NDArray[Any], NDArray[Any]],
    counts: NDArray[np.bool_] | None,
    relevant: tuple[Setting, ...],
) -> Divergence:
    """Of integers: the state of a generator, or rows of a batch."""
    from tracediff.bisection import batch_rows
    from tracediff.bisection.generators import parting
    from tracediff.bisection.rendered import differ_rows

    if judged.event.kind == "state":
        found = parting(traces, judged.event.site.path, judged.event.site.step)
        where = found.where or bare.where
        return replace(
            bare, meaning=found.told, settings=relevant, op=found.op or bare.op, where=where
        )
    rows = differ_rows(traces, judged.pair, values, counts)
    named = _named(rows) if rows else {}
    if arranged := batch_rows.find(traces, judged.event):
        named = {
            "kind": arranged.kind,
            "pattern": arranged.pattern,
            "meaning": arranged.meaning,
            "detail": {**named.get("detail", {}), **arranged.detail},
        }
    return replace(bare, **named, deviations=_deviations(values, counts), settings=relevant)


def neighbours(stage: Sequence[Judged], first: Judged) -> tuple[Neighbour, ...]:
    """The compared sites around the first divergent one, in the order of execution."""
    place = next(i for i, judged in enumerate(stage) if judged is first)
    around = stage[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1]
    return tuple(
        Neighbour(
            site=str(judged.event.site),
            op=judged.event.op,
            mark=judged.mark,
            error=judged.error.rel_l2,
            bound=judged.bound.rel_l2 if judged.bound else 0.0,
        )
        for judged in around
    )


def _attributes(judged: Judged) -> tuple[Setting, ...]:
    """How a loss was reduced and over how many targets, where the two sides differ in that."""
    a, b = judged.pair.baseline, judged.pair.target
    if a.site.phase != "loss":
        return ()
    found = settings.differing(a.attributes, b.attributes)
    return tuple((f"{a.site.path}.{name}", x, y) for name, (x, y) in found.items())


def _of_tokenizer(setting: str, event: Event) -> bool:
    """Whether a setting is of the tokenizer that made a row of IDs."""
    number = event.attributes.get("tokenizer", 0)
    name = f"tokenizer[{number}]." if number else "tokenizer."
    return event.site.phase == "rendering" and event.kind == "ids" and setting.startswith(name)


def _explain_setting(judged: Judged) -> dict[str, Any]:
    a, b = judged.event.value, judged.pair.target.value
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        differing = settings.differing(a, b)
    else:
        differing = {judged.event.site.path: (a, b)}
    text = ", ".join(f"{name} is {x!r} against {y!r}" for name, (x, y) in differing.items())
    return {
        "meaning": text,
        "detail": {name: {"baseline": x, "target": y} for name, (x, y) in differing.items()},
        "settings": tuple((name, x, y) for name, (x, y) in differing.items()),
        "pattern": "setting",
    }


def _named(difference: Difference) -> dict[str, Any]:
    return {
        "pattern": difference.pattern,
        "meaning": difference.meaning,
        "detail": dict(difference.detail),
    }


def _deviations(values: tuple[Any, Any], counts: Any) -> tuple[Deviation, ...]:
    if values[0].shape != values[1].shape:
        return ()
    return largest_deviations(*values, counts)


def _bears_on(setting: str, path: str) -> bool:
    """Whether a setting is the model's configuration, or of a module at or above a path."""
    if setting.startswith("config."):
        return True
    if setting.startswith(_NOT_SETTINGS_OF_A_MODULE):
        return False
    owner = setting.rpartition(".")[0]
    return owner == ROOT or path == owner or path.startswith(f"{owner}.")
