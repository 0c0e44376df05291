"""`tracediff replay B --with A -o TRACE -- SCRIPT ARGS`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracediff.cli import options, output


def replay(
    target: options.Target,
    script: options.Script,
    baseline: Annotated[
        Path, typer.Option("--with", metavar="A", help="The trace whose values are given.")
    ],
    trace: Annotated[
        Path, typer.Option("--output", "-o", metavar="TRACE", help="Where to write the replay.")
    ],
    arguments: options.ScriptArguments = None,
    rules: options.Rules = None,
    overwrite: options.Overwrite = False,
) -> int:
    """Run B's script with A's inputs given to each module, to see where B itself errs."""
    from tracediff.substitution import replay as run

    done = run(
        script,
        arguments or [],
        target=target,
        baseline=baseline,
        output=trace,
        rules=rules,
        overwrite=overwrite,
    )
    for note in done.notes:
        output.tell(f"note: {note}")
    output.tell(f"replayed {script} with the inputs of {baseline}: {trace}")
    return 0
