"""After the fact: the step at which two long runs part, executed again on both sides in full, and
once more with the operations of the place where they part."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tracediff.bisection import generator_parting, operation_modules, sentence
from tracediff.deepening import SIDES, named
from tracediff.errors import RerunError, UsageError
from tracediff.verdict import Divergence, Verdict

Bisect = Callable[[Path, Path], Verdict]

_WITH_OPERATIONS: Final = ("op", "op-digest")


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


@dataclass(frozen=True, slots=True)
class _Runs:
    """Two recorded runs, and where their replays are put."""

    traces: tuple[Path, Path]
    scripts: tuple[Sequence[str], Sequence[str]]
    folder: Path

    def replay(
        self, step: int, options: Mapping[str, Sequence[str]], suffix: str = ""
    ) -> tuple[tuple[Path, Path], list[str]]:
        """Executes a step again on both sides; returns the traces, and what came of each."""
        outputs = [self.folder / f"{side}{suffix}.zarr" for side in SIDES]
        told = [
            f"{side}: {replay(trace, step, script, options[side], output)}"
            for side, trace, script, output in zip(
                SIDES, self.traces, self.scripts, outputs, strict=True
            )
        ]
        return (outputs[0], outputs[1]), told


def post_mortem(
    bisect: Bisect,
    baseline: Path,
    target: Path,
    scripts: tuple[Sequence[str], Sequence[str]],
    *,
    level: str,
    keep: Path | None = None,
    rules: Path | None = None,
) -> Verdict:
    """Bisects two runs, executes the step at which they part on both sides, and bisects that. The
    place where the replays part is executed once more with its operations, to name the one.

    Args:
        bisect: Bisects two traces.
        scripts: What each trace is a recording of, with its arguments.
        level: At which the step is recorded.
        keep: Where the replays are kept, as `baseline.zarr` and `target.zarr`, and those with
            operations as `baseline-operations.zarr` and `target-operations.zarr`.
        rules: As `bisect` takes them.

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
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(TemporaryDirectory(prefix="tracediff-")))
        folder.mkdir(parents=True, exist_ok=True)
        runs = _Runs((baseline, target), scripts, folder)
        replays, told = runs.replay(step, dict.fromkeys(SIDES, ("--level", level)))
        again = bisect(*replays)
        if again.first is None or again.first.step != step:
            told.append(f"the replays of step {step} do not part there: {again.reason}")
            return replace(verdict, warnings=(*verdict.warnings, *told))
        if level not in _WITH_OPERATIONS:
            again = _deepened(again, again.first, runs, rules)
    told.append(f"the runs: {verdict.reason}")
    cost = replace(
        again.cost,
        bytes_read=verdict.cost.bytes_read + again.cost.bytes_read,
        bytes_stored=verdict.cost.bytes_stored + again.cost.bytes_stored,
        seconds=verdict.cost.seconds + again.cost.seconds,
    )
    # Traces that are gone cannot be looked at.
    command = again.next_command if keep else ""
    return replace(again, cost=cost, next_command=command, warnings=(*again.warnings, *told))


def _deepened(verdict: Verdict, first: Divergence, runs: _Runs, rules: Path | None) -> Verdict:
    """The verdict on the replays, with the operation in place of the module or the generator."""
    if first.stage == "rng":
        return _drawing(verdict, first, runs)
    modules = operation_modules(first)
    if modules is None:
        return verdict
    options = {
        side: ("--level", "op", *(("--only", path) if path else ()))
        for side, path in modules.items()
    }
    deep, _ = runs.replay(first.step, options, "-operations")
    return named(verdict, deep, rules)


def _drawing(verdict: Verdict, first: Divergence, runs: _Runs) -> Verdict:
    """The same with the operation that draws from a generator on one side only."""
    place = generator_parting(*runs.traces, first.path, first.step)
    if place.step < 0:
        return verdict
    options = dict.fromkeys(SIDES, ("--level", "op-digest"))
    deep, _ = runs.replay(place.step, options, "-operations")
    place = generator_parting(*runs.traces, first.path, first.step, deep)
    merged = replace(first, meaning=place.told, op=place.op, where=place.where or first.where)
    return replace(verdict, first=merged, reason=sentence(merged))


def replay(
    trace: Path, step: int, script: Sequence[str], options: Sequence[str], output: Path
) -> str:
    """Executes a step in a process of its own; returns what the command says of it.

    Args:
        options: Further ones of `tracediff replay`.

    Raises:
        RerunError: It could not be executed.
    """
    command = [sys.executable, "-Pm", "tracediff", "replay", str(trace), "--step", str(step)]
    command += [*options, "-o", str(output), "--overwrite", "--", *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.removeprefix("tracediff: ") for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "no word from it"
    if done.returncode not in (0, 1) or not output.exists():
        raise RerunError(f"step {step} of {trace} could not be executed again: {last}")
    return last
