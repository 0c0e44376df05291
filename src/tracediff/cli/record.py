"""`tracediff record -o TRACE -- SCRIPT ARGS`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracediff.cli import output


def record(
    trace: Annotated[
        Path, typer.Option("--output", "-o", metavar="TRACE", help="Where to write the trace.")
    ],
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The Python script to run, unchanged.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")
    ] = None,
    stack: Annotated[
        str, typer.Option(help="pytorch, mlx or another of `tracediff stacks`; auto looks.")
    ] = "auto",
    level: Annotated[
        str,
        typer.Option(help="digest keeps summaries of all values; module also keeps the values."),
    ] = "module",
    steps: Annotated[
        str | None,
        typer.Option(metavar="STEPS", help="Keep values only at these steps, such as 0:3,100."),
    ] = None,
    sketch_every: Annotated[
        int, typer.Option(metavar="N", help="At level digest, keep sketches at every Nth step.")
    ] = 100,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a trace that is there.")
    ] = False,
) -> int:
    """Run a training script as it is, and record what it computes."""
    from tracediff.session import record_script

    run = record_script(
        script,
        arguments or [],
        output=trace,
        stack=None if stack == "auto" else stack,
        level=level,
        steps=steps,
        sketch_every=sketch_every,
        overwrite=overwrite,
    )
    for note in run.notes:
        output.tell(f"note: {note}")
    output.tell(f"recorded {script} on {run.stack}, level {run.level}: {trace}")
    return 0
