"""One step of a recorded run, executed once more and recorded in full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracediff.errors import UsageError
from tracediff.events import Run, Site
from tracediff.recording import Recorder
from tracediff.rerun import Rerun, differing_sites
from tracediff.session import record_script
from tracediff.tape import Tape
from tracediff.trace import Trace

SETTING = "rerun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reexecution:
    """What came of executing a step again.

    Attributes:
        trace: Where it was recorded: the steps from `start` on, with all values at `step`.
        start: The first step that was computed: that of a snapshot, or 0.
        compared: How many recorded events were held against it.
        differing: The first sites that are not bit-equal, with what is wrong there.
        given: What the step was given of another run, in words; then only the steps before it are
            compared.
        run: The manifest of the re-execution.
    """

    trace: Path
    step: int
    start: int
    compared: int
    differing: tuple[tuple[Site, str], ...]
    run: Run
    notes: tuple[str, ...]
    given: str = ""

    @property
    def exact(self) -> bool:
        """Whether every digest that is compared is that of the recording."""
        return bool(self.compared or self.given) and not self.differing

    def sentence(self) -> str:
        """The outcome in one sentence."""
        since = f"from the snapshot of step {self.start}" if self.start else "from the beginning"
        if self.given and not self.differing:
            before = f", after {self.compared} bit-equal events" if self.compared else ""
            return f"replay of step {self.step} with {self.given}, {since}{before}"
        if not self.compared:
            return f"step {self.step}, {since}: nothing to compare"
        if self.exact:
            return (
                f"bit-exact replay of step {self.step}, {since}: all {self.compared} recorded "
                "events are bit-equal"
            )
        site, what = self.differing[0]
        return (
            f"no bit-exact replay of step {self.step}, {since}: {site} {what}. Where nothing else "
            "changed, the run is not deterministic: see `tracediff selfcheck`"
        )


def reexecute(
    script: str,
    args: Sequence[str],
    *,
    recorded: Path,
    step: int,
    output: Path,
    level: str = "module",
    only: str | None = None,
    skip: bool = True,
    overwrite: bool = False,
    recorder: Callable[[Tape], Recorder] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Reexecution:
    """Runs a script up to a step that was recorded, and checks every digest on the way.

    Args:
        script, args: What `recorded` is a recording of.
        step: The step that is recorded in full; the script is left after it.
        only: Module path or pattern, to which payloads and operations are restricted.
        skip: Compute only from the latest snapshot at or before the step on.
        recorder: Makes one that gives the step values of another run; then the step itself is not
            compared with the recording.
        settings: Further settings of the manifest.

    Raises:
        UsageError: The script is not the one that was recorded.
        RerunError: Neither are its data or its objects.
        ScriptError: As `session.record_script` does.
    """
    with Trace(recorded) as trace:
        check_script(script, trace.run)
        if output.resolve() == recorded.resolve():
            raise UsageError(f"-o {output} is the recording: give another path for the replay")
        rerun = Rerun(trace, step, skip=skip)
        run = record_script(
            script,
            args,
            output=output,
            stack=trace.run.stack,
            level=level,
            steps=f"{step}",
            only=only,
            rerun=rerun,
            overwrite=overwrite,
            settings={
                SETTING: {"of": trace.run.started, "start": rerun.start, "step": step},
                **(settings or {}),
            },
            recorder=recorder,
        )
        with Trace(output) as again:
            steps = [s for s in again.steps if recorder is None or s < step]
            differing = tuple(differing_sites(trace, again, steps))
            compared = sum(len(trace.events(s)) for s in steps)
    return Reexecution(
        trace=output,
        step=step,
        start=rerun.start,
        compared=compared,
        differing=differing,
        run=run,
        notes=tuple(rerun.notes),
    )


def check_script(script: str, run: Run) -> None:
    """Refuses another script than the one that was recorded, by its name.

    Raises:
        UsageError: It is another one.
    """
    recorded = Path(run.argv[0]).name if run.argv else ""
    if recorded and Path(script).name != recorded:
        raise UsageError(
            f"{script} is not what was recorded: the trace is of {recorded}; give that script with "
            "the arguments it had then"
        )
