"""`tracediff show TRACE [SITE]`."""

from __future__ import annotations

from typing import Annotated

import typer

from tracediff.cli import options, output


def show(
    path: options.TracePath,
    site: Annotated[
        str | None,
        typer.Argument(metavar="[SITE]", help="A site as reports print it, or a part of one."),
    ] = None,
    rank: options.Rank = 0,
    json: options.Json = None,
) -> int:
    """Say what a trace holds: the run, its steps, or the values at a site."""
    from tracediff.report.inspection import inspect_site, inspect_trace
    from tracediff.report.json import dumps
    from tracediff.trace import Trace

    output.check_writable(json)
    with Trace(path) as whole, whole.of_rank(rank) if rank else whole as trace:
        seen = inspect_trace(trace) if site is None else inspect_site(trace, site)
        if json is not None:
            output.write(json, dumps(seen.as_json()))
        if json != output.STDOUT:
            output.show(seen, whole_lines=True)
    return 0
