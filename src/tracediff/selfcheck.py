"""Is a script deterministic, and does recording leave it as it is?

A script runs three times, each in a process of its own: twice under the recorder, then once as
`python SCRIPT ARGS` with nothing of tracediff in it. The two traces are bisected; what the script
itself produced (exit status, standard output, files) is compared byte by byte between all three.
Where the unrecorded run differs from both others, it is run once more before the recorder is
blamed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tracediff.bisection import SiteRow, bisect, diff
from tracediff.errors import ScriptError, TraceError, UsageError
from tracediff.events import Site
from tracediff.session import parse_steps, record_script
from tracediff.verdict import ErrorFigures, Verdict

RUNS: Final = ("recorded-1", "recorded-2", "unrecorded")
"""The three runs in order; the last one's files are left in place, as a plain run would."""

AGAIN: Final = "unrecorded-2"
"""A fourth run, only where the recorder would be blamed: a plain run may differ from itself."""

STDOUT: Final = "standard output"
STATUS: Final = "exit status"

_EXIT: Final = {"unchanged": 0, "nondeterministic": 1, "changed": 1}

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Something the script produced, compared between the three runs.

    Attributes:
        name: `exit status`, `standard output`, or the path of a file.
        mark: `equal` in all runs; `varies` between two recorded or two unrecorded runs, which
            says nothing about the recorder; `changed` where runs of a kind agree and the kinds do
            not; `absent` where no run wrote the file.
        values: Name of the run -> a short description.
    """

    name: str
    mark: str
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wobble:
    """The first site at which two runs of one script are not bit-equal, and the worst one."""

    site: str
    error: ErrorFigures
    differing: int
    compared: int
    worst_site: str
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """What a self-check found.

    Attributes:
        outcome: `unchanged` (deterministic, and the recorder changed nothing), `nondeterministic`,
            `changed` (the recorder changed an output), or `incomparable`.
        verdict: Bisection of the two recordings, or None where they could not be read.
        wobble: Where and how far the two recordings differ, or None where they do not.
    """

    outcome: str
    reason: str
    verdict: Verdict | None = None
    wobble: Wobble | None = None
    outputs: tuple[Output, ...] = ()
    warnings: tuple[str, ...] = ()
    traces: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 deterministic and unchanged, 1 otherwise, 125 incomparable."""
        return _EXIT.get(self.outcome, 125)


@dataclass(frozen=True, slots=True)
class Job:
    """What is run: the script, its arguments, and how it is recorded.

    Attributes:
        recording: Keyword arguments of `session.record_script`, JSON types only.
        files: Files that the script writes and that are compared.
        stdout: Whether standard output is compared; a script may print timings.
    """

    script: str
    args: tuple[str, ...] = ()
    recording: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    stdout: bool = True


def selfcheck(job: Job, keep: Path | None = None, progress: Progress | None = None) -> SelfCheck:
    """Runs a script three times and says whether it is deterministic and left as it is.

    Compared files are put back to what they were before the first run in between, so that each
    run finds the same.

    Args:
        keep: Folder to keep traces and outputs in; must not hold anything.

    Raises:
        UsageError: The script is missing, a compared path is a folder, or `keep` is not empty.
    """
    _check(job, keep)
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tracediff-")))
        folder.mkdir(parents=True, exist_ok=True)
        before = {path: path.read_bytes() if path.exists() else None for path in job.files}
        found: list[_Run] = []
        for name in (*RUNS, AGAIN):
            if name == AGAIN and not any(o.mark == "changed" for o in _outputs(job, found)):
                break
            if progress:
                progress(f"run {len(found) + 1}: {name}", len(found), len(RUNS) + 1)
            if found:
                _put_back(before)
            found.append(_Run(name, job, folder))
        if progress:
            progress("comparing", len(RUNS), len(RUNS) + 1)
        result = _conclude(job, found)
    if keep is None and result.verdict is not None:  # the traces are gone: nothing to look at
        named = replace(result.verdict, baseline=RUNS[0], target=RUNS[1], next_command="")
        return replace(result, verdict=named, traces=())
    return result


class _Run:
    """One run in its own process: its exit status, standard output, and files, as bytes."""

    def __init__(self, name: str, job: Job, folder: Path) -> None:
        self.name = name
        self.trace = folder / f"{name}.zarr"
        done = subprocess.run(self._command(job), capture_output=True, check=False)
        self.status = done.returncode
        self.errors = done.stderr.decode(errors="replace").strip()
        self.stdout = done.stdout
        self.files = {p: p.read_bytes() if p.is_file() else None for p in job.files}
        outputs = folder / name
        outputs.mkdir()
        (outputs / "stdout.txt").write_bytes(done.stdout)
        (outputs / "stderr.txt").write_bytes(done.stderr)
        for number, path in enumerate(job.files):
            if path.is_file():
                shutil.copyfile(path, outputs / f"{number}-{path.name}")

    def _command(self, job: Job) -> list[str]:
        if self.name in ("unrecorded", AGAIN):
            return [sys.executable, job.script, *job.args]
        options = json.dumps(dict(job.recording) | {"output": str(self.trace)})
        # -P: without it, -m would put the working directory on the script's import path.
        return [sys.executable, "-Pm", "tracediff.selfcheck", options, job.script, *job.args]


def _record(arguments: Sequence[str]) -> int:
    """The recorded run: exits as the script by itself would."""
    options: dict[str, Any] = json.loads(arguments[0])
    output = Path(options.pop("output"))
    try:
        record_script(arguments[1], arguments[2:], output=output, **options)
    except ScriptError as error:
        print(error, file=sys.stderr)
        return error.status
    return 0


def _check(job: Job, keep: Path | None) -> None:
    if not Path(job.script).is_file():
        raise UsageError(f"{job.script} is not a file: give the path of a Python script after --")
    parse_steps(job.recording.get("steps"))
    for path in job.files:
        if path.is_dir():
            raise UsageError(f"--compare {path} is a folder: give the path of a file")
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"--keep {keep} holds something already: give a new or empty folder")


def _put_back(before: Mapping[Path, bytes | None]) -> None:
    for path, content in before.items():
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(content)


# ---- conclusions -------------------------------------------------------------------------------


def _conclude(job: Job, runs: Sequence[_Run]) -> SelfCheck:
    outputs = tuple(_outputs(job, runs))
    traces = tuple(str(run.trace) for run in runs[:2])
    warnings = [] if not runs[2].status else [_failed(runs[2])]
    verdict, wobble = None, None
    try:
        verdict = bisect(*traces)
        if verdict.outcome in ("equivalent", "diverged"):
            wobble = _wobble(diff(*traces))
    except TraceError as error:
        warnings += [str(error), *(_failed(run) for run in runs[:2])]
    outcome, reason = _outcome(verdict, wobble, outputs)
    return SelfCheck(
        outcome=outcome,
        reason=reason,
        verdict=verdict,
        wobble=wobble,
        outputs=outputs,
        warnings=tuple(warnings),
        traces=traces,
    )


def _outcome(
    verdict: Verdict | None, wobble: Wobble | None, outputs: Sequence[Output]
) -> tuple[str, str]:
    changed = [output.name for output in outputs if output.mark == "changed"]
    varying = [output.name for output in outputs if output.mark == "varies"]
    absent = [output.name for output in outputs if output.mark == "absent"]
    if changed:
        return "changed", f"recording changes the run: {_and(changed)} not as without it"
    if verdict is None:
        return "incomparable", "the recordings cannot be read"
    if wobble is not None:
        size = f"by {wobble.error.rel_l2:.1e}" if wobble.error.differing else "only one has it"
        return "nondeterministic", (
            f"two runs of the same script differ in {wobble.differing} of {wobble.compared} "
            f"events, first at {wobble.site} ({size})"
        )
    if verdict.outcome == "diverged":
        return "nondeterministic", verdict.reason
    if verdict.outcome == "incomparable":
        return "incomparable", verdict.reason
    if varying:
        return "nondeterministic", (
            f"the recordings are bit-equal, but {_and(varying)} not the same in two runs alike"
        )
    if absent:
        return "incomparable", f"no run wrote {_and(absent, verb='')}, so it was not compared"
    names = _and([output.name for output in outputs], verb="")
    return "unchanged", f"two recordings are bit-equal, and without the recorder {names} are too"


def _and(names: Sequence[str], verb: str = "is") -> str:
    text = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    plural = "are" if verb == "is" and len(names) > 1 else verb
    return f"{text} {plural}".rstrip()


def _wobble(rows: Sequence[SiteRow]) -> Wobble | None:
    """The first row that is not bit-equal; states of generators count by their consequences."""
    phases = {row.site: Site.parse(row.site or row.target_site).phase for row in rows}
    counted = [row for row in rows if phases[row.site] not in ("environment", "rng")]
    differing = [row for row in counted if row.mark != "identical"]
    if not differing:
        return None
    first = differing[0]
    worst = max(differing, key=lambda row: row.error.rel_l2)
    return Wobble(
        site=first.site or first.target_site,
        error=first.error,
        differing=len(differing),
        compared=len(counted),
        worst_site=worst.site or worst.target_site,
        worst=worst.error.rel_l2,
    )


def _outputs(job: Job, runs: Sequence[_Run]) -> list[Output]:
    def output(name: str, contents: Sequence[bytes | None], plain: bool = False) -> Output:
        described = [_describe(content, contents[0], plain) for content in contents]
        names = [run.name for run in runs]
        values = dict(zip(names, described, strict=True))
        return Output(name=name, mark=_mark(contents), values=values)

    found = [output(STATUS, [str(run.status).encode() for run in runs], plain=True)]
    if job.stdout:
        found.append(output(STDOUT, [run.stdout for run in runs]))
    return found + [output(str(path), [run.files[path] for run in runs]) for path in job.files]


def _mark(contents: Sequence[bytes | None]) -> str:
    """The mark of one output; the first two contents are of recorded runs."""
    if all(content is None for content in contents):
        return "absent"
    recorded, unrecorded = set(contents[:2]), set(contents[2:])
    if len(recorded) > 1 or len(unrecorded) > 1:
        return "varies"
    return "equal" if recorded == unrecorded else "changed"


def _describe(content: bytes | None, first: bytes | None, plain: bool) -> str:
    if content is None:
        return "not written"
    if plain:
        return content.decode()
    size = f"{len(content):,} bytes"
    if first is None or content == first:
        return size
    same = next((i for i, (a, b) in enumerate(zip(first, content, strict=False)) if a != b), None)
    place = min(len(first), len(content)) if same is None else same
    return f"{size}, other from byte {place:,} on"


def _failed(run: _Run) -> str:
    last = run.errors.splitlines()[-1:] or ["nothing on standard error"]
    return f"{run.name}: exit status {run.status} ({last[0]})"


if __name__ == "__main__":
    raise SystemExit(_record(sys.argv[1:]))
