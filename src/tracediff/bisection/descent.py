"""The descent: step by step down the ladder of stages, to the first divergent site."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tracediff.align import load_rules
from tracediff.bisection import missing
from tracediff.bisection.assembly import Assembly
from tracediff.bisection.common import common_form
from tracediff.bisection.halving import Halving, Visit
from tracediff.bisection.healing import Step, first_of
from tracediff.bisection.inheritance import State
from tracediff.bisection.judge import StepJudge
from tracediff.bisection.localised import first_operation
from tracediff.bisection.options import Options, parse_tolerances
from tracediff.bisection.ranks import over_ranks
from tracediff.bisection.samples import counts
from tracediff.trace import Trace
from tracediff.verdict import Cost, Divergence, Verdict

if TYPE_CHECKING:
    from tracediff.bisection.noise import Noise
    from tracediff.bisection.replayed import Replay
    from tracediff.bisection.site_rows import SiteRow

Progress = Callable[[str, int, int], None]
"""Called with a description, how many steps are done, and how many there are."""


def bisect(
    baseline: Path | str | Trace,
    target: Path | str | Trace,
    *,
    rules: Path | None = None,
    min_coverage: float = 0.9,
    rtol: Sequence[str] = (),
    atol: Sequence[str] = (),
    noise: Path | str | None = None,
    replayed: Path | str | None = None,
    every_step: bool = False,
    progress: Progress | None = None,
) -> Verdict:
    """Compares two traces and names the first site at which they part, over all ranks.

    Args:
        baseline, target: Traces or their paths; a Trace of a rank above 0 stands for that alone.
        rules: A rules file with names of your own, see docs/alignment.md.
        min_coverage: Fraction of events that must be compared for a clean verdict.
        rtol, atol: `PATTERN=VALUE`, tolerances that replace the bound at matching sites.
        noise: A replicate of the baseline, whose differences from it widen the bounds.
        replayed: A replay of the target with the baseline, which decides what is introduced.
        every_step: Judge every step that is not bit-equal, also those that are no further apart
            than the steps before them.

    Raises:
        TraceError: A trace cannot be read.
        UsageError, RulesError: An option is malformed.
    """
    options = replace(_options(rules, min_coverage, rtol, atol), every_step=every_step)
    return over_ranks(
        baseline, target, lambda a, b: _bisect((a, b), options, noise, replayed, progress)
    )


def _bisect(
    traces: tuple[Trace, Trace],
    options: Options,
    noise: Path | str | None,
    replayed: Path | str | None,
    progress: Progress | None,
) -> Verdict:
    """As `bisect`, of one rank."""
    started = time.perf_counter()
    with ExitStack() as stack:
        if noise is not None:
            options = replace(options, noise=_noise(traces[0], noise, stack))
        replay = _replay(traces, replayed, options, stack)
        plain = not (options.every_step or options.tolerances or noise or replayed)
        steps, halving = [], Halving(traces, by_marks=plain)
        for step in _steps(traces, options, progress, halving=halving):
            steps.append(step)
            if not step.placed_differently:  # operations on parts are not those on wholes
                step.operation = first_operation(traces, step.number, step.alignment, options)
            if replay is not None:
                replay.decide(step)
            if first_of(step, traces, []) is not None:
                break
            halving.take(step)
        verdict = Assembly(traces, steps, options, halving).verdict()
        cost = Cost(
            bytes_read=sum(trace.bytes_read for trace in traces),
            bytes_stored=sum(trace.bytes_stored for trace in traces),
            events=2
            * (sum(len(step.judged) for step in steps) + counts(s.samples for s in steps)[0]),
            seconds=time.perf_counter() - started,
        )
        decided = replay.result() if replay is not None else None
    return replace(verdict, cost=cost, replayed=decided)


def divergent_operation(
    baseline: Path | str | Trace,
    target: Path | str | Trace,
    step: int,
    *,
    rules: Path | None = None,
) -> Divergence | None:
    """The first operation that introduced a divergence at a step; None where there is none.

    Args:
        baseline, target: Traces of level `op`, which may hold the operations of one module only.
    """
    options = _options(rules, 0.0, (), ())
    with ExitStack() as stack:
        traces = _opened(baseline, stack), _opened(target, stack)
        if not all(step in trace.steps for trace in traces):
            return None
        state = State()
        common, _ = common_form(traces, step, state, options, every_sample=False)
        if state.placed_differently:
            return None
        found = first_operation(traces, step, common.alignment, options)
        return found.divergence if found else None


def diff(
    baseline: Path | str | Trace,
    target: Path | str | Trace,
    *,
    rules: Path | None = None,
    rtol: Sequence[str] = (),
    atol: Sequence[str] = (),
    noise: Path | str | None = None,
    rank: int = 0,
    operations: bool = False,
    progress: Progress | None = None,
) -> list[SiteRow]:
    """Compares two traces at every site of every common step, at one rank.

    Args:
        operations: Compare operations instead, of the steps that both recorded them in.

    Returns:
        One row per pair in the order of the ladder and of execution, then the unmatched events.

    Raises:
        UsageError: Operations are asked for, and no step has them on both sides.
    """
    from tracediff.bisection.site_rows import operation_rows, site_rows

    options = _options(rules, 0.0, rtol, atol)
    with ExitStack() as stack:
        traces = _opened(baseline, stack, rank), _opened(target, stack, rank)
        if noise is not None:
            options = replace(options, noise=_noise(traces[0], noise, stack))
        steps = _steps(traces, options, progress, every_sample=True)
        if operations:
            return operation_rows(traces, steps, options)
        return [row for step in steps for row in site_rows(step)]


def _options(
    rules: Path | None, min_coverage: float, rtol: Sequence[str], atol: Sequence[str]
) -> Options:
    tolerances = parse_tolerances(rtol, atol)
    if rules is None:
        return Options(min_coverage=min_coverage, tolerances=tolerances)
    return Options(load_rules(Path(rules)), min_coverage, tolerances)


def _opened(trace: Path | str | Trace, stack: ExitStack, rank: int = 0) -> Trace:
    if isinstance(trace, Trace):
        return trace
    whole = stack.enter_context(Trace(Path(trace)))
    return stack.enter_context(whole.of_rank(rank)) if rank else whole


# What few comparisons need is imported by those that do, here and in the modules below.


def _noise(baseline: Trace, path: Path | str, stack: ExitStack) -> Noise:
    from tracediff.bisection.noise import Noise

    return Noise(baseline, _opened(path, stack, baseline.rank))


def _replay(
    traces: tuple[Trace, Trace], path: Path | str | None, options: Options, stack: ExitStack
) -> Replay | None:
    if path is None:
        return None
    from tracediff.bisection.replayed import Replay

    trace = _opened(path, stack, traces[1].rank)
    return Replay(traces, trace, _steps((traces[0], trace), options, None))


def _steps(
    traces: tuple[Trace, Trace],
    options: Options,
    progress: Progress | None,
    every_sample: bool = False,
    halving: Halving | None = None,
) -> Iterator[Step]:
    """Judges the steps that both traces have, or those of them that may differ, in order.

    Args:
        every_sample: Whether to judge also the samples that are equal, of which there may be very
            many.
    """
    state = State()
    numbers = halving.common if halving else sorted(set(traces[0].steps) & set(traces[1].steps))
    stacks = (traces[0].run.stack, traces[1].run.stack)
    chosen = halving.visits() if halving else map(Visit, numbers)
    for visit in chosen:
        number = visit.step
        if progress:
            progress(f"step {number}", numbers.index(number), len(numbers))
        if visit.resume is not None:
            from tracediff.bisection.resuming import resume

            resume(traces, visit.resume, state, options)
        common, samples = common_form(traces, number, state, options, every_sample)
        judge = StepJudge(traces, common.alignment, common.events, state, options)
        lacking = missing.missing(common.alignment, stacks)
        judged = judge.run()
        if visit.left_out:
            state.forget_stale(common.events)
        step = Step(number, common.alignment, judged, judge, lacking, samples, common.notes)
        step.placed_differently = state.placed_differently
        yield step
    if progress:
        progress("done", len(numbers), len(numbers))
