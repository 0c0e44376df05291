"""`tracediff replay RUN --step K -- SCRIPT` and `replay B --with A -o TRACE -- SCRIPT`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracediff.cli import options, output
from tracediff.errors import UsageError

if TYPE_CHECKING:
    from tracediff.reexecution import Reexecution

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
        typer.Option(
            "--with",
            metavar="A",
            help="Give each module the inputs of this trace; with --step, see --substitute.",
        ),
    ] = None,
    substitute: Annotated[
        str | None,
        typer.Option(
            metavar="STAGES",
            help="With --with: give whole stages of it instead (rendering,loading,rng,masks).",
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
    stages = [stage.strip() for stage in substitute.split(",")] if substitute is not None else []
    if step is None and baseline is None:
        raise UsageError(
            "give --step K, to record a step in full, or --with A, to give modules the inputs of "
            "another trace"
        )
    if stages and baseline is None:
        raise UsageError("--substitute needs --with A: the trace whose stages are given")
    if step is not None:
        if baseline is not None and not stages:
            raise UsageError("--step with --with A needs --substitute: what the step is given of A")
        beside = target.with_name(f"{target.stem}.step{step}.zarr")
        chosen = {
            "recorded": target,
            "step": step,
            "output": trace or beside,
            "level": level,
            "only": only,
            "skip": not from_start,
            "overwrite": overwrite,
        }
        if baseline is not None:
            chosen |= {"baseline": baseline, "stages": stages, "rules": rules}
        return _step(script, args, chosen)
    assert baseline is not None
    if trace is None:
        raise UsageError("--with needs -o TRACE: where to write the replay")
    chosen = {
        "target": target,
        "baseline": baseline,
        "output": trace,
        "rules": rules,
        "overwrite": overwrite,
    }
    return _whole(script, args, chosen, stages)


def _whole(script: str, args: list[str], chosen: dict[str, Any], stages: list[str]) -> int:
    """The whole run, with inputs or stages of another one."""
    from tracediff import stage_substitution, substitution

    if stages:
        run, values = stage_substitution.replay(script, args, stages=stages, **chosen)
        what = values.told()
    else:
        run, what = substitution.replay(script, args, **chosen), "the inputs"
    for note in run.notes:
        output.tell(f"note: {note}")
    output.tell(f"replayed {script} with {what} of {chosen['baseline']}: {chosen['output']}")
    return 0


def _step(script: str, args: list[str], chosen: dict[str, Any]) -> int:
    """One step, which may be given stages of another run."""
    from tracediff.reexecution import reexecute
    from tracediff.stage_substitution import replay_step
    from tracediff.trace import place

    execute = replay_step if "baseline" in chosen else reexecute
    done: Reexecution = execute(script, args, **chosen)
    for note in (*done.notes, *done.run.notes):
        output.tell(f"note: {note}")
    output.tell(f"{done.sentence()}. It is in {place(done.trace)}")
    return 0 if done.exact else DIVERGED
