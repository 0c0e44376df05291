"""What `show` prints of one trace: the run and its steps, or the events at a site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from tracediff.errors import UsageError
from tracediff.events import Event, Site, sample_step
from tracediff.report.json import FORMAT, plain
from tracediff.report.text import Harmless, inert, number
from tracediff.trace import Trace
from tracediff.trace.overview import stage_counts
from tracediff.trace.summary import FINGERPRINT_FIELDS

_SHOWN_EVENTS: Final = 40
_JSON_VALUES: Final = 1000
"""Tensors with more elements are left out of the JSON: the trace itself is the place for them."""


def inspect_trace(trace: Trace) -> RunView:
    """The manifest of a trace and the number of events per step and stage."""
    return RunView(trace)


def inspect_site(trace: Trace, text: str) -> SiteView:
    """The events whose printed site is `text`, or else contains it.

    Raises:
        UsageError: There is none; the message names the closest.
    """
    printed = _of_sample(trace, text) or [
        (str(e.site), e) for step in trace.steps for e in trace.events(step)
    ]
    found = [e for site, e in printed if site == text] or [e for site, e in printed if text in site]
    if not found:
        close = get_close_matches(text, [site for site, _ in printed], n=1, cutoff=0.3)
        hint = f"the closest is '{close[0]}'" if close else "it holds no events"
        raise UsageError(f"{trace.path} has no site '{text}': {hint}")
    if len(found) > 1:
        return SiteView(found)
    (event,) = found
    origins = {e.order: site for site, e in printed if e.site.step == event.site.step}
    values = trace.array(event) if event.payload is not None else None
    return SiteView(found, values, [origins[order] for order in event.inputs if order in origins])


def _of_sample(trace: Trace, text: str) -> list[tuple[str, Event]]:
    """The events of the sample that a site is of, if it is there: a data set has very many."""
    try:
        site = Site.parse(text)
    except ValueError:
        return []
    place = sample_step(site.path)
    if place is None or site.step not in trace.steps:
        return []
    rows = trace.samples(site.step)
    events = (rows.event(int(row)) for row in np.flatnonzero(rows.sample == place[0]))
    printed = [(str(event.site), event) for event in events]
    return printed if text in dict(printed) else []


@dataclass(frozen=True, slots=True)
class RunView:
    """The run manifest and its steps, of a trace that is open."""

    trace: Trace

    def as_json(self) -> dict[str, Any]:
        trace = self.trace
        counts = {step: stage_counts(trace, step) for step in trace.steps}
        steps = [{"step": step, "events": events} for step, events in counts.items()]
        shown = {"path": str(trace.path), "run": trace.run, "steps": steps}
        return {"format": FORMAT, **plain(shown)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        run = self.trace.run
        yield Harmless(self.trace.summary())
        yield Text()
        versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
        yield _fields({"started": run.started, "versions": versions})


@dataclass(frozen=True, slots=True)
class SiteView:
    """One event with its values and the sites it was computed from, or a list of events."""

    events: Sequence[Event]
    values: NDArray[Any] | None = None
    inputs: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        found = [_event_json(event) for event in self.events]
        if len(found) == 1:
            small = self.values is not None and self.values.size <= _JSON_VALUES
            found[0] |= {"values": plain(_widened(self.values)) if small else None}
            found[0] |= {"inputs": list(self.inputs)}
        return {"format": FORMAT, "events": found}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if len(self.events) == 1:
            yield from self.one(self.events[0])
        else:
            yield from self.several()

    def one(self, event: Event) -> Iterator[Any]:
        yield Text(inert(str(event.site)), "bold")
        rows: dict[str, Any] = {
            "kind": event.kind,
            "operation": event.op,
            "source": event.source,
            "dtype": event.dtype,
            "shape": list(event.shape) if event.dtype else "",
            "dims": ", ".join(event.dims),
            "shard": event.shard,
            "digest": event.digest.hex(),
            "value": "" if event.value is None else event.value,
            **event.attributes,
            "inputs": ", ".join(self.inputs),
        }
        yield _fields(rows)
        if event.fingerprint:
            yield Text()
            yield _fields(dict(zip(FINGERPRINT_FIELDS, event.fingerprint, strict=True)))
        if self.values is not None:
            yield Text()
            yield Text(_printed(self.values), no_wrap=True, overflow="ignore")
        elif event.dtype:
            yield Text("\n  no values were kept here: record at level module, or widen --steps")

    def several(self) -> Iterator[Any]:
        table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
        for heading in ("site", "kind", "operation", "dtype", "shape"):
            table.add_column(heading, overflow="fold")
        for event in self.events[:_SHOWN_EVENTS]:
            shape = list(event.shape) if event.dtype else ""
            cells = (str(event.site), event.kind, event.op, event.dtype, shape)
            table.add_row(*(Text(inert(cell)) for cell in cells))
        yield table
        if len(self.events) > _SHOWN_EVENTS:
            yield Text(f"… and {len(self.events) - _SHOWN_EVENTS:,} more: name more of the site")


def _event_json(event: Event) -> dict[str, Any]:
    names = ("order", "kind", "op", "source", "dtype", "shape", "dims", "shard", "digest", "value")
    record = {name: getattr(event, name) for name in names}
    fingerprint = dict(zip(FINGERPRINT_FIELDS, event.fingerprint, strict=False))
    shown = {"site": str(event.site), **record, "attributes": event.attributes}
    return dict(plain(shown | {"fingerprint": fingerprint}))


def _fields(rows: Mapping[str, Any]) -> Table:
    """Names and values side by side; what is empty is left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        if value not in ("", None):
            shown = number(value) if isinstance(value, float) else inert(value)
            grid.add_row(Text(f"  {inert(name)}", "dim"), Text(shown))
    return grid


def _widened(values: NDArray[Any] | None) -> NDArray[Any] | None:
    """bfloat16 and float8 as float32, which NumPy and JSON can print."""
    if values is None or values.dtype.kind in "biufc":
        return values
    return values.astype(np.float32)


def _printed(values: NDArray[Any]) -> str:
    return np.array2string(
        np.asarray(_widened(values)), threshold=200, edgeitems=3, precision=6, prefix="  "
    )
