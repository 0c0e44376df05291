"""`tracediff selfcheck -- SCRIPT ARGS`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracediff.cli import options, output

Compare = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH", help="A file that the script writes, compared byte by byte; repeatable."
    ),
]
Keep = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Keep both traces and all outputs in this folder."),
]
NoStdout = Annotated[
    bool,
    typer.Option("--no-stdout", help="Leave out standard output, where it holds timings."),
]


def selfcheck(
    script: options.Script,
    arguments: options.ScriptArguments = None,
    compare: Compare = None,
    no_stdout: NoStdout = False,
    keep: Keep = None,
    stack: options.Stack = "auto",
    level: options.Level = "module",
    steps: options.Steps = None,
    sketch_every: options.SketchEvery = 100,
    json: options.Json = None,
) -> int:
    """Run a script twice recorded and once not: is it deterministic, and left as it is?"""
    from tracediff import selfcheck as checking
    from tracediff.report.json import dumps
    from tracediff.report.selfcheck import render, selfcheck_json

    output.check_writable(json)
    job = checking.Job(
        script=script,
        args=tuple(arguments or ()),
        recording={
            "stack": None if stack == "auto" else stack,
            "level": level,
            "steps": steps,
            "sketch_every": sketch_every,
        },
        files=tuple(compare or ()),
        stdout=not no_stdout,
    )
    with output.progress() as progress:
        found = checking.selfcheck(job, keep, progress)
    if json is not None:
        output.write(json, dumps(selfcheck_json(found)))
    if json != output.STDOUT:
        output.show(render(found))
    return found.exit_code
