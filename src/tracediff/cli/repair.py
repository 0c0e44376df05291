"""`tracediff repair TRACE -o NEW`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracediff.cli import options, output


def repair(
    path: options.TracePath,
    new: Annotated[
        Path, typer.Option("--output", "-o", metavar="NEW", help="Where to write what is sound.")
    ],
    stack: Annotated[
        str | None, typer.Option(help="The stack of the run, where the manifest is lost.")
    ] = None,
    json: options.Json = None,
) -> int:
    """Copy all that can be read of a damaged or cut-off trace into a new one."""
    from tracediff import trace
    from tracediff.report.json import dumps
    from tracediff.report.tables import repair_json, repaired

    output.check_writable(json)
    result = trace.repair(path, new, stack=stack)
    if json is not None:
        output.write(json, dumps(repair_json(trace.place(path), result)))
    if json != output.STDOUT:
        output.show(repaired(trace.place(path), result))
    return 0 if result.whole else 1
