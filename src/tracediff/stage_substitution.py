"""Replay with whole stages of another run: its batches, its weights, its random numbers or masks.

What a run does after a stage can be compared only where the stage came out the same. With the
baseline's batches, weights or generator states put in place of the target's own, the target's
script runs on, and what still differs from the baseline comes from the stages that follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.align import Rules, align, load_rules
from tracediff.bisection.given import identity
from tracediff.errors import UsageError
from tracediff.events import Event, Pair, Run, Site
from tracediff.recording import Recorder
from tracediff.reexecution import Reexecution, reexecute
from tracediff.session import record_script
from tracediff.snapshots import set_python_generators
from tracediff.stacks import load_substituter
from tracediff.substitution import check
from tracediff.tape import Tape
from tracediff.trace import Trace

STAGES: Final = ("rendering", "loading", "rng", "masks")
SETTING: Final = "substituted"
"""Setting of the manifest that says which stages of which run took the place of the script's."""


class StageValues:
    """The baseline's values for whole stages, by the target's sites.

    The mask of a dropout is at port `mask` of its call: which elements it keeps.

    Attributes:
        stages: Those that are wanted.
        used: Sites of each stage that were asked for and given a value.
    """

    def __init__(
        self,
        baseline: Trace,
        target: Trace,
        stages: Sequence[str],
        rules: Rules | None = None,
        only: int | None = None,
    ) -> None:
        """
        Args:
            only: The step that is given anything; by default all are.

        Raises:
            UsageError: A stage cannot be substituted, or the baseline holds nothing of it.
        """
        self.stages = tuple(stages)
        self.used: defaultdict[str, set[Site]] = defaultdict(set)
        self._baseline = baseline
        self._pairs: dict[Site, Pair] = {}
        self._given: dict[Site, Event] = {}
        stacks = baseline.run.stack, target.run.stack
        steps = sorted(set(baseline.steps) & set(target.steps))
        for step in steps if only is None else [s for s in steps if s == only]:
            events = [trace.events(step, samples=False) for trace in (baseline, target)]
            self._given |= {e.site: e for e in events[0] if _is_given_to_dropout(e)}
            for pair in align(events[0], events[1], stacks, rules).pairs:
                stage = _stage_of(pair)
                if stage in stages and self._has_values(pair):
                    self._pairs[pair.target.site] = pair
        held = {_stage_of(pair) for pair in self._pairs.values()}
        if lacking := [stage for stage in stages if stage not in held]:
            raise UsageError(
                f"{baseline.path} holds nothing of {', '.join(lacking)} for {target.path}: record "
                "it at --level module; generators of two stacks have only Python's and NumPy's in "
                "common, and masks are those of dropout modules and functions, not of dropout "
                "inside a kernel"
            )

    def _has_values(self, pair: Pair) -> bool:
        given = self._given.get(replace(pair.baseline.site, port="in"))
        known = [pair.baseline, given] if _stage_of(pair) == "masks" else [pair.baseline]
        return all(event is not None and event.payload is not None for event in known)

    def __call__(self, site: Site) -> NDArray[Any] | None:
        """The baseline's value for a site of the target, in the target's layout, or None."""
        if site.port == "mask":
            return self._mask(replace(site, port="out"))
        pair = self._pairs.get(site)
        if pair is None:
            return None
        self.used[_stage_of(pair)].add(site)
        array = self._baseline.array(pair.baseline)
        return np.ascontiguousarray(array.T) if pair.layout == "transposed" else array

    def _mask(self, site: Site) -> NDArray[Any] | None:
        """Which elements the baseline's dropout keeps. Of a zero it cannot be told: it is kept."""
        pair = self._pairs.get(site)
        if pair is None:
            return None
        self.used["masks"].add(site)
        given = self._given[replace(pair.baseline.site, port="in")]
        kept, lost = self._baseline.array(pair.baseline) != 0, self._baseline.array(given) == 0
        return np.asarray(kept | lost)

    def generators(self, step: int) -> dict[str, NDArray[Any]]:
        """States of the generators before a step, by path."""
        return {
            site.path: value
            for site in self._pairs
            if (site.step, site.phase) == (step, "rng") and (value := self(site)) is not None
        }

    def told(self) -> str:
        """What was given, in words."""
        what = {
            "rendering": "fields of batches",
            "loading": "parameters",
            "rng": "generators",
            "masks": "masks",
        }
        return ", ".join(f"{len(self.used[stage])} {what[stage]}" for stage in self.stages)


def _stage_of(pair: Pair) -> str:
    """The stage that a pair belongs to as far as it can be substituted, or ""."""
    site = pair.target.site
    if site.phase == "loading":
        return "loading" if _fits(pair) else ""
    if site.phase == "rng":
        return "rng" if site.port == "state" else ""
    if site.phase == "forward":
        return "masks" if _is_masked(pair) else ""
    is_batch = site.phase == "rendering" and site.path.startswith("batch.")
    is_label = site.phase == "loss" and site.port == "labels"
    return "rendering" if is_batch or is_label else ""


def _is_masked(pair: Pair) -> bool:
    """Whether both are outputs of a dropout, of one shape."""
    events = pair.baseline, pair.target
    alike = pair.baseline.shape == pair.target.shape and pair.layout == "same"
    return alike and all(_is_dropout(e) and e.site.port == "out" for e in events)


def _is_dropout(event: Event) -> bool:
    return event.site.phase == "forward" and "dropout" in event.op.lower()


def _is_given_to_dropout(event: Event) -> bool:
    return event.site.port == "in" and _is_dropout(event)


def _fits(pair: Pair) -> bool:
    a, b = pair.baseline, pair.target
    shape = a.shape[::-1] if pair.layout == "transposed" else a.shape
    return b.site.port in ("param", "buffer") and shape == b.shape and b.view is None


def replay(
    script: str,
    args: Sequence[str],
    *,
    target: Path,
    baseline: Path,
    output: Path,
    stages: Sequence[str],
    rules: Path | None = None,
    overwrite: bool = False,
) -> tuple[Run, StageValues]:
    """Runs the target's script on its stack, with whole stages of the baseline in place of its own.

    Args:
        script, args: What `target` is a recording of.
        output: Where the trace of the replay is written.
        stages: Some of `STAGES`.

    Returns:
        The manifest of the replay, whose setting `substituted` says what it ran on, and the values
        that were given.

    Raises:
        UsageError: The script is not the one that was recorded, or nothing can be substituted.
        ScriptError: As `session.record_script` does.
    """
    _check_stages(stages)
    with Trace(baseline) as given, Trace(target) as own:
        check(script, own.run, given, output)
        values = StageValues(given, own, stages, load_rules(rules) if rules else None)
        run = record_script(
            script,
            args,
            output=output,
            stack=own.run.stack,
            overwrite=overwrite,
            settings=_settings(own.run, given.run, stages),
            recorder=_substituting(own.run.stack, values),
        )
    return run, values


def replay_step(
    script: str,
    args: Sequence[str],
    *,
    recorded: Path,
    baseline: Path,
    step: int,
    output: Path,
    stages: Sequence[str],
    level: str = "module",
    only: str | None = None,
    skip: bool = True,
    rules: Path | None = None,
    overwrite: bool = False,
) -> Reexecution:
    """Executes one recorded step again, as `reexecute` does, on stages of the baseline's step.

    Args:
        script, args: What `recorded` is a recording of.
        baseline: Has values of the step: a recording of level `module`, or a replay of the step.
        stages: Some of `STAGES` but `loading`, which comes before all steps.

    Raises:
        UsageError: As `replay` and `reexecute` do.
        RerunError, ScriptError: As `reexecute` does.
    """
    _check_stages(stages)
    if "loading" in stages:
        raise UsageError("--step with --substitute loading: a step loads nothing; leave out --step")
    with Trace(baseline) as given, Trace(recorded) as own:
        check(script, own.run, given, output)
        values = StageValues(given, own, stages, load_rules(rules) if rules else None, step)
        done = reexecute(
            script,
            args,
            recorded=recorded,
            step=step,
            output=output,
            level=level,
            only=only,
            skip=skip,
            overwrite=overwrite,
            recorder=_substituting(own.run.stack, values),
            settings=_settings(own.run, given.run, stages),
        )
    return replace(done, given=f"{values.told()} of {baseline}")


def _check_stages(stages: Sequence[str]) -> None:
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise UsageError(
            f"--substitute {unknown[0]!r} is unknown: give some of {', '.join(STAGES)}"
        )


def _substituting(stack: str, values: StageValues) -> Callable[[Tape], Recorder]:
    make = load_substituter(stack, "StageSubstituter")

    def recorder(tape: Tape) -> Recorder:
        made = make(tape, values)

        def set_generators() -> None:
            states = values.generators(tape.step)
            set_python_generators(states)
            made.set_generators(states)

        tape.on_step_start.insert(0, set_generators)
        return made

    return recorder


def _settings(own: Run, given: Run, stages: Sequence[str]) -> dict[str, Any]:
    return {SETTING: {"of": identity(own), "with": identity(given), "stages": list(stages)}}
