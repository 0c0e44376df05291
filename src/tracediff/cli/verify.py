"""`tracediff verify TRACE`."""

from __future__ import annotations

from typing import Annotated

import typer

from tracediff.cli import options, output


def verify(
    path: options.TracePath,
    seal: Annotated[
        str | None,
        typer.Option(metavar="SHA256", help="The seal that `record --seal` told of this trace."),
    ] = None,
    json: options.Json = None,
) -> int:
    """Check every byte of a trace against its digests, and its seal if it has one."""
    from tracediff import trace
    from tracediff.report.json import dumps
    from tracediff.report.tables import verification, verification_json

    output.check_writable(json)
    result = trace.verify(path, seal)
    if json is not None:
        output.write(json, dumps(verification_json(trace.place(path), result)))
    if json != output.STDOUT:
        output.show(verification(trace.place(path), result))
    return 0 if result.sound else 1
