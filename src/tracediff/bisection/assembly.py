"""Puts a verdict together from judged steps: outcome, ladder, first divergence, evidence."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tracediff.bisection import missing, samples, turned
from tracediff.bisection.coverage import coverage, is_counted
from tracediff.bisection.exercise import not_exercised
from tracediff.bisection.halving import Halving
from tracediff.bisection.healing import Step, first_of, place_of
from tracediff.bisection.inheritance import Judged
from tracediff.bisection.localised import operation_options
from tracediff.bisection.options import Options
from tracediff.bisection.recorder_faults import recorder_fault
from tracediff.bisection.rendering_notes import notes, unseen
from tracediff.bisection.sentences import sentence
from tracediff.events import STAGES
from tracediff.trace import Trace
from tracediff.trace.summary import FINGERPRINT_FIELDS
from tracediff.verdict import Divergence, Neighbour, StageResult, Verdict

if TYPE_CHECKING:
    from tracediff.bisection.explain import Setting

_ALSO_LIMIT: Final = 10
_NOT_COUNTED: Final = ("environment", "rng")
_MEAN: Final = FINGERPRINT_FIELDS.index("mean")


class Assembly:
    """Puts the verdict together from the judged steps."""

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        steps: Sequence[Step],
        options: Options,
        halving: Halving,
    ) -> None:
        """
        Args:
            halving: What is known of steps that were not opened.
        """
        self._proven = {k: v for k, v in halving.proven.items() if k not in _NOT_COUNTED}
        self._course = halving.course
        left_out = halving.course.left_out if halving.course else {}
        self._close = {k: v for k, v in left_out.items() if k not in _NOT_COUNTED}
        self._traces = traces
        self._steps = steps
        self._options = options
        self._stacks = (traces[0].run.stack, traces[1].run.stack)
        self._judged = [judged for step in steps for judged in step.judged]
        self._samples = samples.counts(step.samples for step in steps)
        self._environment = _environment(self._judged)
        self._warnings = _warnings(traces)

    def verdict(self) -> Verdict:
        if self._options.noise is not None:
            self._warnings.append(self._options.noise.told())
        passed_over: list[Judged] = []
        first = next(
            (f for s in self._steps if (f := first_of(s, self._traces, passed_over)) is not None),
            None,
        )
        if self._course is not None:
            self._warnings += self._course.told()
        self._warnings += _each_once(note for step in self._steps for note in step.notes)
        self._warnings += turned.told(self._judged)
        if passed_over:
            self._warnings += [_passed_over(judged) for judged in passed_over[:3]]
        self._warnings += [warning for step in self._steps for warning in step.samples.told()]
        if self._steps:
            events = self._traces[0].events(self._steps[0].number, samples=False)
            hidden = not_exercised(self._traces[0], events)
            self._warnings += [f"not exercised: {reason}" for reason in hidden]
            self._warnings += notes(self._traces, [step.number for step in self._steps])
        covered = coverage(self._steps, self._samples)
        unmatched = missing.groups(step.alignment for step in self._steps)
        outcome, reason, found = self._outcome(first, covered)
        facts = Verdict(
            outcome=outcome,
            reason=reason,
            baseline=self._traces[0].place,
            target=self._traces[1].place,
            first=found,
            stages=tuple(self._stage(name, outcome) for name in STAGES),
            coverage=covered,
            matched_by=Counter(judged.pair.matched_by for judged in self._judged),
            unmatched=unmatched,
            environment=self._environment,
            trajectory=self._trajectory(),
            warnings=tuple(self._warnings),
        )
        if found is None:
            return replace(facts, last_agreeing=self._last_agreeing(None))
        return replace(
            facts,
            last_agreeing=self._last_agreeing(first),
            also=self._also(first),
            neighbours=self._neighbours(first),
            next_command=self._next_command(found),
        )

    # ---- outcome ---------------------------------------------------------------------------

    def _outcome(
        self, first: Judged | Divergence | None, covered: float
    ) -> tuple[str, str, Divergence | None]:
        fault = recorder_fault(self._traces, self._judged)
        if fault:
            return "incomparable", f"recorder fault: {fault}", None
        if isinstance(first, Judged):
            from tracediff.bisection.explain import explain

            step = next(s for s in self._steps if s.number == first.event.site.step)
            found = explain(first, self._traces, self._environment, step.judge.padding)
            return self._diverged(found, first)
        if first is not None:
            return self._diverged(first, first)
        counted = [j for j in self._judged if j.event.site.phase != "environment"]
        close = sum(self._close.values())
        total = len(counted) + self._samples[0] + sum(self._proven.values()) + close
        if not total:
            return (
                "incomparable",
                "nothing could be compared: no event of one is in the other",
                None,
            )
        gap = self._missing_steps()
        if gap is not None:
            return "diverged", sentence(gap), gap
        if covered < self._options.min_coverage:
            reason = (
                f"coverage: only {covered:.1%} of the events of the side that has fewer could be "
                f"compared, {self._options.min_coverage:.0%} are asked for (--min-coverage)"
            )
            if any(step.placed_differently for step in self._steps):
                reason += "; the runs place tensors differently on their meshes"
            return "incomparable", reason, None
        differing = [j for j in counted if j.mark != "identical"]
        whole = self._stacks[0] == self._stacks[1] and not any(
            is_counted(event)
            for step in self._steps
            for event, _ in (*step.alignment.baseline_only, *step.alignment.target_only)
        )
        if not differing and not close and whole:
            return "identical", f"all {total} events compared are bit-equal", None
        reason = (
            f"{total} events agree: {total - len(differing) - close} bit-equal, "
            f"{len(differing) + close} within what rounding explains{_how_closely(differing)}"
        )
        return "equivalent", reason, None

    def _diverged(
        self, found: Divergence, first: Judged | Divergence
    ) -> tuple[str, str, Divergence]:
        from tracediff.bisection import blame, circumstances

        found = circumstances.told(found, first, self._steps)
        found = blame.assign(found, first, self._traces)
        return "diverged", sentence(found), found

    def _missing_steps(self) -> Divergence | None:
        """Steps that a finished run should have and has not."""
        steps = [set(trace.steps) for trace in self._traces]
        for side, kind in enumerate(("missing", "extra")):
            lacking = sorted(steps[side] - steps[1 - side])
            if not lacking:
                continue
            other = self._traces[1 - side]
            in_the_middle = lacking[0] < max(other.steps, default=-1)
            if other.run.status == "finished" or in_the_middle:
                name = ("baseline", "target")[1 - side]
                return Divergence(
                    stage="trajectory",
                    step=lacking[0],
                    site=f"{lacking[0]}/trajectory/step",
                    path="step",
                    port="out",
                    kind=kind,
                    meaning=f"the {name} has no step {lacking[0]}"
                    f" ({len(lacking)} steps are on one side only)",
                )
            self._warnings.append(
                f"{len(lacking)} steps are on one side only: the other run was cut off "
                f"({other.run.status})"
            )
        return None

    def _stage(self, name: str, outcome: str) -> StageResult:
        judged = [j for j in self._judged if j.event.site.phase == name]
        counted, unequal, unlisted = self._samples if name == "rendering" else (0, 0, (0, 0))
        close = self._close.get(name, 0)
        compared = len(judged) + counted + self._proven.get(name, 0) + close
        only = tuple(
            sum(e.site.phase == name for s in self._steps for e, _ in getattr(s.alignment, side))
            + n
            for side, n in zip(("baseline_only", "target_only"), unlisted, strict=True)
        )
        lacking = sum(d.stage == name for s in self._steps for d in s.lacking)
        diverged = sum(j.mark == "diverged" for j in judged) + lacking
        differing = sum(j.mark != "identical" for j in judged) + unequal + close
        reason = None
        if not compared and not lacking:
            mark = "not exercised"
            reason = "recorded on neither side" if only == (0, 0) else "recorded on one side only"
        elif diverged and outcome == "diverged":
            mark = "diverged"
        else:
            mark = "equivalent" if differing or diverged else "identical"
            reason = f"{diverged} differ without effect" if diverged else None
            if name == "rendering":
                reason = reason or unseen((s.alignment, s.samples.alignment) for s in self._steps)
        return StageResult(
            stage=name,
            outcome=mark,
            compared=compared,
            differing=differing,
            diverged=diverged,
            unmatched=(only[0], only[1]),
            worst=max((j.error.rel_l2 for j in judged), default=0.0),
            reason=reason,
        )

    # ---- around the first divergence -------------------------------------------------------

    def _last_agreeing(self, first: Judged | Divergence | None) -> str | None:
        place = place_of(first) if first is not None else None
        agreeing = [
            j
            for j in self._judged
            if j.mark != "diverged"
            and j.event.site.phase != "environment"
            and (place is None or j.place < place)
        ]
        found = [(j.place, str(j.event.site)) for j in agreeing[-1:]]
        if sample := samples.last_agreeing((step.samples for step in self._steps), place):
            found.append(sample)
        return max(found)[1] if found else None

    def _also(self, first: Judged | Divergence | None) -> tuple[Divergence, ...]:
        from tracediff.bisection.explain import divergence

        others = [
            divergence(j)
            for j in self._judged
            if j.mark == "diverged" and not j.inherited and j is not first
        ]
        return tuple(others[:_ALSO_LIMIT])

    def _neighbours(self, first: Judged | Divergence | None) -> tuple[Neighbour, ...]:
        if not isinstance(first, Judged):
            return ()
        from tracediff.bisection.explain import neighbours

        site = first.event.site
        step = next(s for s in self._steps if s.number == site.step)
        return neighbours(step.stage(site.phase), first)

    def _next_command(self, found: Divergence) -> str:
        baseline, target = (trace.place for trace in self._traces)
        again = operation_options(found)
        scripts = [_script(trace) for trace in self._traces]
        if again is not None and all(scripts):
            names = [f"{side}-op.zarr" for side in ("baseline", "target")]
            commands = [
                ["tracediff", "record", "-o", name, *again[side], "--", *argv]
                for name, side, argv in zip(names, ("baseline", "target"), scripts, strict=True)
            ]
            commands.append(["tracediff", "bisect", *names])
            return " && ".join(map(shlex.join, commands))
        if found.stage in ("forward", "loss", "backward"):
            return shlex.join(["tracediff", "show", target, found.target_site or found.site])
        options = ["--stage", found.stage, "--step", str(found.step)]
        return shlex.join(["tracediff", "diff", baseline, target, *options])

    def _trajectory(self) -> tuple[tuple[int, str, float, float], ...]:
        rows = []
        for judged in self._judged:
            a, b = judged.pair.baseline, judged.pair.target
            scalars = a.shape == b.shape == () and a.fingerprint and b.fingerprint
            if a.site.phase == "trajectory" and scalars:
                values = a.fingerprint[_MEAN], b.fingerprint[_MEAN]
                rows.append((a.site.step, a.site.path, *values))
        return tuple(rows)


def _how_closely(differing: Sequence[Judged]) -> str:
    """The largest relative differences of what a user looks at: module outputs and the loss."""
    worst = {
        stage: max((j.error.rel_l2 for j in differing if j.event.site.phase == stage), default=0.0)
        for stage in ("forward", "loss")
    }
    told = [
        f"{what} by at most {worst[stage]:.1e}"
        for stage, what in (("forward", "module outputs"), ("loss", "the loss"))
        if worst[stage]
    ]
    return f"; apart are {', '.join(told)}{_growth(differing)}" if told else ""


def _growth(differing: Sequence[Judged]) -> str:
    """How an error that each block inherits grows from the first to the last of a stack of them."""
    stacks: dict[str, list[Judged]] = defaultdict(list)
    for judged in differing:
        stem, _, number = judged.event.site.path.rpartition(".")
        port = judged.event.site.phase, judged.event.site.port
        if port == ("forward", "out") and number.isdigit():
            stacks[stem].append(judged)
    blocks = max(stacks.values(), key=len, default=[])
    step = [j for j in blocks if j.event.site.step == blocks[0].event.site.step]
    if len(step) < 2 or step[-1].error.rel_l2 < 2 * step[0].error.rel_l2:
        return ""
    first, last = (f"{j.error.rel_l2:.1e} after {j.event.site.path}" for j in (step[0], step[-1]))
    return f"; inherited from block to block it grows from {first} to {last}"


def _environment(judged: Sequence[Judged]) -> tuple[Setting, ...]:
    """Settings that differ; those that one side leaves unset come last."""
    found = (
        (j.event.site.path, j.event.value, j.pair.target.value)
        for j in judged
        if j.event.site.phase == "environment" and j.mark != "identical"
    )
    return tuple(sorted(found, key=lambda setting: None in setting))


def _warnings(traces: tuple[Trace, Trace]) -> list[str]:
    warnings = []
    for name, trace in zip(("baseline", "target"), traces, strict=True):
        warnings += [f"{name}: {note}" for note in trace.run.notes]
        if trace.run.status != "finished":
            what = trace.run.error or "it was cut off while recording"
            warnings.append(f"{name}: the run did not finish ({what})")
    return warnings


def _each_once(notes: Iterable[str]) -> Iterator[str]:
    """Notes of all steps; those that recur are told once."""
    for note, count in Counter(notes).items():
        yield note if count == 1 else f"{note} ({count} steps)"


def _passed_over(judged: Judged) -> str:
    site = judged.event.site
    if site.phase == "rng":
        return f"the generators differ ({site}), with no effect on anything compared"
    if site.phase == "rendering":
        return f"{site} differs, with no effect on what is made of it"
    if judged.relayout is not None:
        return (
            f"healed: {site} {judged.relayout.told()}; a module around it has the same output, and "
            "what belongs to it is compared in the baseline's layout"
        )
    return (
        f"healed: {site} differs by {judged.error.rel_l2:.1e}, everything computed from it agrees"
    )


def _script(trace: Trace) -> list[str]:
    """The script that was recorded with its arguments; nothing for what ran inside a program."""
    argv = list(trace.run.argv)
    return argv if trace.run.source_digest else []
