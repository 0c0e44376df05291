"""Runs of several processes: compared rank by rank, and put together to one verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tracediff.bisection.placements import REASONS
from tracediff.events import STAGE_RANK
from tracediff.trace import Trace
from tracediff.verdict import Cost, Divergence, Verdict

Compare = Callable[[Trace, Trace], Verdict]


def over_ranks(
    baseline: Path | str | Trace, target: Path | str | Trace, compare: Compare
) -> Verdict:
    """Compares the ranks that two traces share, one by one.

    A Trace of a rank above 0 stands for that rank alone.
    """
    with ExitStack() as stack:
        a, b = (
            given if isinstance(given, Trace) else stack.enter_context(Trace(given))
            for given in (baseline, target)
        )
        if a.rank or b.rank or max(len(a.ranks), len(b.ranks)) < 2:
            return compare(a, b)
        found = {0: compare(a, b)}
        for rank in sorted(set(a.ranks) & set(b.ranks) - {0}):
            with a.of_rank(rank) as one, b.of_rank(rank) as other:
                found[rank] = compare(one, other)
        return _together(found, a, b)


def _together(found: Mapping[int, Verdict], baseline: Trace, target: Trace) -> Verdict:
    """The verdict of the rank that differs first, or else of the one that agrees least."""
    rank = min(found, key=lambda rank: (_place(found[rank]), rank))
    chosen = found[rank]
    lacking = _lacking(baseline, target)
    warnings = [
        text if rank == 0 else f"rank {rank}: {text}"
        for rank, verdict in found.items()
        for text in verdict.warnings
    ]
    costs = [verdict.cost for verdict in found.values()]
    facts = replace(
        chosen,
        rank=rank,
        coverage=min(verdict.coverage for verdict in found.values()),
        warnings=tuple(dict.fromkeys([*warnings, *([lacking.meaning] if lacking else [])])),
        cost=Cost(
            bytes_read=sum(cost.bytes_read for cost in costs),
            bytes_stored=sum(cost.bytes_stored for cost in costs),
            events=sum(cost.events for cost in costs),
            seconds=sum(cost.seconds for cost in costs),
        ),
    )
    if chosen.outcome == "diverged":
        others = [str(r) for r in found if r != rank and found[r].outcome == "diverged"]
        told = f", and so do ranks {', '.join(others)}" if others else ""
        return replace(facts, reason=f"rank {rank} of {len(found)} diverges{told}: {chosen.reason}")
    if chosen.outcome == "incomparable":
        return replace(facts, reason=f"rank {rank} of {len(found)}: {chosen.reason}")
    cut_off = not (baseline.is_complete and target.is_complete)
    if lacking is not None and not cut_off and not _placed_differently(found.values()):
        return replace(
            facts,
            outcome="diverged",
            reason=lacking.meaning,
            first=lacking,
            warnings=tuple(warnings),
        )
    return replace(facts, reason=f"{len(found)} ranks agree; rank {rank}: {chosen.reason}")


def _placed_differently(verdicts: Iterable[Verdict]) -> bool:
    """Whether the runs place tensors differently, and so on another number of processes."""
    unmatched = (group for verdict in verdicts for group in verdict.unmatched)
    return any(group.reason.endswith(tuple(REASONS)) for group in unmatched)


def _place(verdict: Verdict) -> tuple[int, int, int, int]:
    """Where a verdict comes among those of all ranks: the first divergence first."""
    first = verdict.first
    order = ("diverged", "incomparable", "equivalent", "identical").index(verdict.outcome)
    if first is None:
        return order, 0, 0, 0
    return order, first.step, STAGE_RANK[first.stage], first.order


def _lacking(baseline: Trace, target: Trace) -> Divergence | None:
    """A rank that one of the two does not have."""
    ranks = [set(trace.ranks) for trace in (baseline, target)]
    for side, kind in enumerate(("missing", "extra")):
        if lacking := sorted(ranks[side] - ranks[1 - side]):
            name = ("baseline", "target")[1 - side]
            return Divergence(
                stage="trajectory",
                step=0,
                site="0/trajectory/rank",
                path="rank",
                port="out",
                kind=kind,
                meaning=f"the {name} has no rank {lacking[0]} "
                f"({len(ranks[0])} ranks against {len(ranks[1])})",
            )
    return None
