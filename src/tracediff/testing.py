"""Builders of traces for tests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from tracediff.events import Event, Run, Site
from tracediff.trace import TraceWriter
from tracediff.trace.summary import digest, digest_value, fingerprint


def build_event(site: Site | str, value: Any, order: int = 0, /, **fields: Any) -> Event:
    """An event as a recorder would make it, with digest and fingerprint of its value.

    Args:
        value: An array, a text, or any JSON value; by default the kind is `tensor`, `text`,
            `scalar` (a float) or `setting`.
        fields: Further fields of the event, such as `kind`, `op`, `dims` or `inputs`.
    """
    place = Site.parse(site) if isinstance(site, str) else site
    if isinstance(value, np.ndarray):
        defaults: dict[str, Any] = {
            "dtype": value.dtype.name,
            "shape": value.shape,
            "digest": digest(value),
            "fingerprint": fingerprint(value) if value.dtype.kind != "c" else (),
        }
    else:
        kind = {str: "text", float: "scalar"}.get(type(value), "setting")
        defaults = {"kind": kind, "value": value, "digest": digest_value(value)}
    return Event(**{"site": place, "order": order, **defaults, **fields})


def build_trace(
    path: str | Path,
    values: Iterable[tuple[str, Any]],
    *,
    stack: str = "pytorch",
    status: str = "finished",
    **run_fields: Any,
) -> Path:
    """Writes a trace of the given values, every payload kept.

    Args:
        path: Folder to create.
        values: Site, as it is printed, and value of each event in execution order, steps
            ascending. A pair's value may also be a tuple of value and further event fields.
        status: `recording` leaves the trace as a killed run would.
        run_fields: Further fields of the run manifest.
    """
    with TraceWriter(path, Run(stack=stack, **run_fields)) as writer:
        step, orders = -1, count()
        for text, given in values:
            value, fields = given if isinstance(given, tuple) else (given, {})
            site = Site.parse(text)
            if site.step != step:
                writer.commit_step()
                step, orders = site.step, count()
            payload = value if isinstance(value, np.ndarray) else None
            writer.add(build_event(site, value, next(orders), **fields), payload)
        writer.commit_step()
        writer.finish(status, run_fields.get("error"))
    return Path(path)
