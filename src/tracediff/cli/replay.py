"""`tracediff replay RUN --step K -- SCRIPT` and `replay B --with A -o TRACE -- SCRIPT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracediff.cli import options, output
from tracediff.errors import UsageError

DIVERGED = 1


def replay(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="The trace to replay.")],
    script: options.Script,
    step: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Execute this step again and record it in full."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option("--with", metavar="A", help="Give each module the inputs of this trace."),
    ] = None,
    substitute: Annotated[
        str | None,
        typer.Option(
            metavar="STAGES",
            help="With --with: give whole stages of it instead (rendering,loading,rng).",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="TRACE", help="Where to write it; with --step beside RUN."
        ),
    ] = None,
    level: options.Level = "module",
    only: options.Only = None,
    from_start: Annotated[
        bool,
        typer.Option("--from-start", help="With --step: compute all steps, use no snapshot."),
    ] = False,
    arguments: options.ScriptArguments = None,
    rules: options.Rules = None,
    overwrite: options.Overwrite = False,
) -> int:
    """Run a recorded script again: to see one step in full, or where it errs by itself."""
    args = arguments or []
    if (step is None) == (baseline is None):
        raise UsageError(
            "give either --step K, to record a step in full, or --with A, to give modules the "
            "inputs of another trace"
        )
    if step is not None:
        if substitute is not None:
            raise UsageError("--substitute needs --with A: the trace whose stages are given")
        return _step(target, step, script, args, trace, level, only, from_start, overwrite)
    if trace is None:
        raise UsageError("--with needs -o TRACE: where to write the replay")
    if substitute is not None:
        assert baseline is not None
        return _stages(target, baseline, substitute, script, args, trace, rules, overwrite)
    from tracediff.substitution import replay as run

    assert baseline is not None
    done = run(
        script,
        args,
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


def _stages(
    target: Path,
    baseline: Path,
    substitute: str,
    script: str,
    args: list[str],
    trace: Path,
    rules: Path | None,
    overwrite: bool,
) -> int:
    from tracediff.stage_substitution import replay as run

    done, values = run(
        script,
        args,
        target=target,
        baseline=baseline,
        output=trace,
        stages=[stage.strip() for stage in substitute.split(",")],
        rules=rules,
        overwrite=overwrite,
    )
    for note in done.notes:
        output.tell(f"note: {note}")
    output.tell(f"replayed {script} with {values.told()} of {baseline}: {trace}")
    return 0


def _step(
    recorded: Path,
    step: int,
    script: str,
    args: list[str],
    trace: Path | None,
    level: str,
    only: str | None,
    from_start: bool,
    overwrite: bool,
) -> int:
    from tracediff.reexecution import reexecute
    from tracediff.trace import place

    done = reexecute(
        script,
        args,
        recorded=recorded,
        step=step,
        output=trace or recorded.with_name(f"{recorded.stem}.step{step}.zarr"),
        level=level,
        only=only,
        skip=not from_start,
        overwrite=overwrite,
    )
    for note in (*done.notes, *done.run.notes):
        output.tell(f"note: {note}")
    output.tell(f"{done.sentence()}. It is in {place(done.trace)}")
    return 0 if done.exact else DIVERGED
