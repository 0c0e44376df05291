"""Rows of `diff`: pairs of sites, or of operations, with their figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tracediff.align.fingerprints import distance
from tracediff.bisection.healing import Step, origin
from tracediff.bisection.localised import operation_judge
from tracediff.bisection.options import Options
from tracediff.compare.figures import measure
from tracediff.errors import UsageError
from tracediff.trace import Trace
from tracediff.verdict import ErrorFigures

if TYPE_CHECKING:
    from tracediff.align.flow import Value
    from tracediff.align.matching import ValuePair
    from tracediff.bisection.operations import OperationJudge


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """One row of `diff`: a pair of sites with its figures, or a site that one side lacks.

    Attributes:
        layout: How the target's value lies over the baseline's: `same` or `transposed`, and of
            operations also `reshape`, `transpose`, `head split`, `half` or `part`; "" where there
            is no pair, or no layout was found.
        mark: identical, equivalent, diverged or unmatched; see `site_rows` and `operation_rows`.
        error, bound: Nothing where sites are unmatched or parts of each other; of operations a
            bound is known where they diverge, and None elsewhere.
        origin: Of a divergence: `introduced` at the site, `inherited` by it, or `healed` after it;
            "" otherwise.
    """

    site: str
    target_site: str
    matched_by: str
    mark: str
    error: ErrorFigures = field(default_factory=ErrorFigures)
    bound: float | None = 0.0
    origin: str = ""
    layout: str = ""


def site_rows(step: Step) -> Iterator[SiteRow]:
    """The pairs of a step above the level of operations, then what has no partner."""
    for judged in step.judged:
        yield SiteRow(
            site=str(judged.event.site),
            target_site=str(judged.pair.target.site),
            matched_by=judged.pair.matched_by,
            layout=judged.pair.layout,
            mark=judged.mark,
            error=judged.error,
            bound=judged.bound.rel_l2 if judged.bound else 0.0,
            origin=origin(judged, step),
        )
    for event, reason in step.alignment.baseline_only:
        yield SiteRow(site=str(event.site), target_site="", matched_by=reason, mark="unmatched")
    for event, reason in step.alignment.target_only:
        yield SiteRow(site="", target_site=str(event.site), matched_by=reason, mark="unmatched")


def operation_rows(
    traces: tuple[Trace, Trace], steps: Iterable[Step], options: Options
) -> list[SiteRow]:
    """The pairs of operations, in the order of the baseline's execution, then those of one side.

    Diverged is what errs, given its inputs; where nothing errs and the values differ, the
    difference came in with the inputs or is rounding, and the pair is equivalent.

    Raises:
        UsageError: No step has operations on both sides.
    """
    rows: list[SiteRow] = []
    for step in steps:
        events = traces[0].events(step.number), traces[1].events(step.number)
        judge = operation_judge(traces, events, step.alignment, options)
        if all(flow.values for flow in judge.flows):
            rows += _of_step(judge)
    if not rows:
        raise UsageError(
            f"no step has operations in both {traces[0].path} and {traces[1].path}: record both "
            "with --level op"
        )
    return rows


def _of_step(judge: OperationJudge) -> Iterator[SiteRow]:
    errs = {finding.pair: finding.bound for finding in judge.findings()}
    # What one side does besides is found at a pair that alignment did not make.
    pairs = dict.fromkeys([*judge.pairs, *errs])
    for pair in sorted(pairs, key=lambda pair: pair.baseline.index):
        a, b = pair.baseline.event, pair.target.event
        equal = (a.digest, a.dtype, a.shape) == (b.digest, b.dtype, b.shape)
        yield SiteRow(
            site=str(a.site),
            target_site=str(b.site),
            matched_by=pair.matched_by,
            layout="same" if equal else judge.layout_of(pair),
            mark="diverged" if pair in errs else "identical" if equal else "equivalent",
            error=ErrorFigures() if equal else _error(judge, pair),
            bound=errs.get(pair),
            origin="introduced" if pair in errs else "",
        )
    for side, flow in enumerate(judge.flows):
        paired = {(pair.baseline, pair.target)[side] for pair in pairs}
        yield from (_alone(value, side) for value in flow.values if value not in paired)


def _error(judge: OperationJudge, pair: ValuePair) -> ErrorFigures:
    """How far a pair's values are apart, by what was kept of them."""
    if pair.layout != "whole":
        return ErrorFigures()
    values = judge.values(pair)
    if values is not None:
        return measure(*values).error
    a, b = pair.baseline.event.fingerprint, pair.target.event.fingerprint
    return ErrorFigures(rel_l2=distance(a, b) if a and b else 0.0, estimated=True)


def _alone(value: Value, side: int) -> SiteRow:
    sites = ["", ""]
    sites[side] = str(value.event.site)
    reason = "only one side computes it"
    return SiteRow(site=sites[0], target_site=sites[1], matched_by=reason, mark="unmatched")
