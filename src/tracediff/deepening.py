"""From scripts to the divergent operation: record both, bisect, record again where they part.

The first recording is of module level. If the runs part inside a module, only that module is
recorded again, with every operation and at that step alone, which costs little and says which
operation it is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tracediff.bisection import bisect, divergent_operation, operation_options, sentence
from tracediff.errors import ScriptError, UsageError
from tracediff.verdict import Verdict

SIDES: Final = ("baseline", "target")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Script:
    """A script with its arguments."""

    path: str
    args: tuple[str, ...] = ()


def scripts(arguments: Sequence[str]) -> tuple[Script, Script]:
    """Reads `SCRIPT_A ARGS -- SCRIPT_B ARGS`.

    Raises:
        UsageError: There are not two scripts, or one is no file.
    """
    parts: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--":
            parts.append([])
        else:
            parts[-1].append(argument)
    found = [part for part in parts if part]
    if len(found) != 2:
        raise UsageError(
            f"--deepen takes two scripts, found {len(found)}: "
            "write tracediff bisect --deepen -- SCRIPT_A ARGS -- SCRIPT_B ARGS"
        )
    for path, *_ in found:
        if not Path(path).is_file():
            raise UsageError(f"{path} is not a file: give the path of a Python script")
    a, b = (Script(path, tuple(args)) for path, *args in found)
    return a, b


def deepen(
    baseline: Script,
    target: Script,
    *,
    keep: Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Verdict:
    """Names the operation at which two scripts part.

    Args:
        keep: Folder to keep the traces in; must not hold anything.
        options: As `bisect` takes them.

    Returns:
        The verdict at module level, its first divergence replaced by the operation where one was
        found, and a warning where the second recording found none.

    Raises:
        UsageError: `keep` holds something.
        ScriptError: A script failed.
    """
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"--keep {keep} holds something already: give a new or empty folder")
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tracediff-")))
        folder.mkdir(parents=True, exist_ok=True)
        both = baseline, target
        traces = [folder / f"{side}.zarr" for side in SIDES]
        for done, (side, script, trace) in enumerate(zip(SIDES, both, traces, strict=True)):
            _tell(progress, f"recording the {side}", done)
            record(script, trace, ())
        _tell(progress, "comparing", 2)
        verdict = bisect(*traces, **options)
        extra = operation_options(verdict.first)
        if extra is not None:
            deep = [folder / f"{side}-operations.zarr" for side in SIDES]
            sides = zip(SIDES, both, deep, strict=True)
            for done, (side, script, trace) in enumerate(sides, start=2):
                _tell(progress, f"recording the operations of the {side}", done)
                record(script, trace, extra[side])
            _tell(progress, "comparing operations", 4)
            verdict = named(verdict, deep, options.get("rules"))
    # Traces that are gone cannot be looked at.
    return verdict if keep else replace(verdict, next_command="")


def record(script: Script, trace: Path, options: Sequence[str]) -> None:
    """Records a script in a process of its own, with options of `tracediff record`.

    Raises:
        ScriptError: It failed; the message is the last line that it wrote.
    """
    # -P: without it, -m would put the working directory on the script's import path.
    command = [sys.executable, "-Pm", "tracediff", "record", "-o", str(trace), *options]
    command += ["--", script.path, *script.args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ScriptError(lines[-1], status=done.returncode)


def named(verdict: Verdict, deep: Sequence[Path], rules: Path | None) -> Verdict:
    """The verdict with the operation in place of its first divergence, or a warning without one.

    Args:
        deep: Recordings of the same step of both sides, with operations.
    """
    first = verdict.first
    assert first is not None
    found = divergent_operation(deep[0], deep[1], first.step, rules=rules)
    if found is None:
        note = f"no operation of {first.path} errs by itself at step {first.step}"
        return replace(verdict, warnings=(*verdict.warnings, note))
    merged = replace(found, settings=(*found.settings, *first.settings))
    return replace(verdict, first=merged, reason=sentence(merged))


def _tell(progress: Progress | None, what: str, done: int) -> None:
    if progress:
        progress(what, done, 5)
