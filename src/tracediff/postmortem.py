"""After the fact: the step at which two long runs part, executed again on both sides in full."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tracediff.errors import RerunError, UsageError
from tracediff.verdict import Verdict

Bisect = Callable[[Path, Path], Verdict]


def split_scripts(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Reads `SCRIPT_A ARGS -- SCRIPT_B ARGS`; one script stands for both sides.

    Raises:
        UsageError: There is none, or there are more than two.
    """
    parts: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--":
            parts.append([])
        else:
            parts[-1].append(argument)
    if len(parts) > 2 or not all(parts):
        raise UsageError("--replay needs the scripts: bisect A B --replay -- SCRIPT_A -- SCRIPT_B")
    return parts[0], parts[-1]


def post_mortem(
    bisect: Bisect,
    baseline: Path,
    target: Path,
    scripts: tuple[Sequence[str], Sequence[str]],
    *,
    level: str,
    folder: Path,
) -> Verdict:
    """Bisects two runs, executes the step at which they part on both sides, and bisects that.

    Args:
        bisect: Bisects two traces.
        scripts: What each trace is a recording of, with its arguments.
        level: At which the step is recorded.
        folder: Where the replays are put, as `baseline.zarr` and `target.zarr`.

    Returns:
        The verdict on the replays if they part at that step, or else that on the runs; what came of
        each replay is among its warnings.

    Raises:
        RerunError: A script could not be executed again.
    """
    verdict = bisect(baseline, target)
    if verdict.first is None:
        return verdict
    step = verdict.first.step
    replays, told = [], []
    for name, trace, script in zip(
        ("baseline", "target"), (baseline, target), scripts, strict=True
    ):
        output = folder / f"{name}.zarr"
        told.append(f"{name}: {_replay(trace, step, script, level, output)}")
        replays.append(output)
    again = bisect(replays[0], replays[1])
    if again.first is None or again.first.step != step:
        told.append(f"the replays of step {step} do not part there: {again.reason}")
        return replace(verdict, warnings=(*verdict.warnings, *told))
    told.append(f"the runs: {verdict.reason}")
    cost = replace(
        again.cost,
        bytes_read=verdict.cost.bytes_read + again.cost.bytes_read,
        bytes_stored=verdict.cost.bytes_stored + again.cost.bytes_stored,
        seconds=verdict.cost.seconds + again.cost.seconds,
    )
    return replace(again, cost=cost, warnings=(*again.warnings, *told))


def _replay(trace: Path, step: int, script: Sequence[str], level: str, output: Path) -> str:
    """Executes a step in a process of its own; returns what the command says of it."""
    command = [sys.executable, "-Pm", "tracediff", "replay", str(trace), "--step", str(step)]
    command += ["--level", level, "-o", str(output), "--overwrite", "--", *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.removeprefix("tracediff: ") for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "no word from it"
    if done.returncode not in (0, 1) or not output.exists():
        raise RerunError(f"step {step} of {trace} could not be executed again: {last}")
    return last
