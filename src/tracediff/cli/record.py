"""`tracediff record -o TRACE -- SCRIPT ARGS`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracediff.cli import options, output


def record(
    trace: Annotated[
        Path, typer.Option("--output", "-o", metavar="TRACE", help="Where to write the trace.")
    ],
    script: options.Script,
    arguments: options.ScriptArguments = None,
    stack: options.Stack = "auto",
    level: options.Level = "module",
    only: options.Only = None,
    steps: options.Steps = None,
    sketch_every: options.SketchEvery = 100,
    sketch_state: options.SketchState = 100,
    snapshot_every: options.SnapshotEvery = None,
    keep_snapshots: options.KeepSnapshots = None,
    compress: options.Compress = False,
    seal: options.Seal = False,
    max_buffer: options.MaxBuffer = "0",
    on_full: options.OnFull = "wait",
    overwrite: options.Overwrite = False,
    on_error: options.OnError = "stop",
) -> int:
    """Run a training script as it is, and record what it computes."""
    from tracediff.session import record_script
    from tracediff.trace import Trace, place

    run = record_script(
        script,
        arguments or [],
        output=trace,
        stack=None if stack == "auto" else stack,
        level=level,
        steps=steps,
        only=only,
        sketch_every=sketch_every,
        sketch_state=sketch_state,
        snapshot_every=snapshot_every,
        keep_snapshots=keep_snapshots,
        compress=compress,
        seal=seal,
        max_buffer=max_buffer,
        on_full=on_full,
        overwrite=overwrite,
        on_error=on_error,
    )
    for note in run.notes:
        output.tell(f"note: {note}")
    output.tell(f"recorded {script} on {run.stack}, level {run.level}: {place(trace)}")
    if seal:
        with Trace(trace) as sealed:
            output.tell(f"sealed: keep this elsewhere, for verify --seal: {sealed.seal}")
    return 0
