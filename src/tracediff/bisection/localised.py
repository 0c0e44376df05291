"""The first divergent operation of a step, as a divergence that a verdict can hold."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.align import Alignment
from tracediff.align.flow import is_operation, module_of, name_of
from tracediff.align.names import parent
from tracediff.bisection.inheritance import Judged
from tracediff.bisection.options import Options
from tracediff.compare.figures import largest_deviations, measure
from tracediff.events import ROOT, STAGE_RANK, Event, Site
from tracediff.trace import Trace
from tracediff.verdict import Bound, Divergence, OperationSpan, SpanOperation

if TYPE_CHECKING:
    from tracediff.bisection.findings import Finding
    from tracediff.bisection.operations import OperationJudge
    from tracediff.bisection.spans import Check, Span

OPERATION_STAGES: Final = ("forward", "loss", "backward", "optimizer")

SIDES: Final = ("baseline", "target")


@dataclass(frozen=True, slots=True)
class Localised:
    """A divergence at an operation, and the orders of the operations of both sides."""

    divergence: Divergence
    orders: tuple[int, int]


def first_operation(
    traces: tuple[Trace, Trace],
    step: int,
    alignment: Alignment,
    options: Options,
) -> Localised | None:
    """The first operation of a step that introduced a divergence; None where there is none, or a
    side recorded no operations.

    Args:
        alignment: Of the module-level events of the step, which says which modules are the same.
    """
    events = traces[0].events(step), traces[1].events(step)
    if not all(any(is_operation(event) for event in side) for side in events):
        return None
    from tracediff.bisection.drawing import first_draw

    draw = first_draw(traces, events)
    found = _first_wrong(traces, events, alignment, options)
    if draw is not None and (found is None or draw[1] <= found.orders):
        return Localised(*draw)
    return found


def operation_judge(
    traces: tuple[Trace, Trace],
    events: tuple[list[Event], list[Event]],
    alignment: Alignment,
    options: Options,
) -> OperationJudge:
    """What judges the operations of one step, of which these are all events."""
    from tracediff.bisection.operations import OperationJudge

    padding = next(
        (m for t, e in zip(traces, events, strict=True) if (m := _mask(t, e)) is not None), None
    )
    return OperationJudge(traces, events, alignment, options.rules, padding)


def _first_wrong(
    traces: tuple[Trace, Trace],
    events: tuple[list[Event], list[Event]],
    alignment: Alignment,
    options: Options,
) -> Localised | None:
    """The first operation whose result differs by more than its inputs explain."""
    judge = operation_judge(traces, events, alignment, options)
    for finding in judge.findings():
        found = _divergence(finding, judge)
        override = options.tolerance(found.site)
        values = judge.values(finding.pair)
        if override is None or values is None or not override.accepts(*values):
            return Localised(found, _orders(finding))
    return None


def earlier(
    first: Judged | Divergence | None, operation: Localised | None
) -> Judged | Divergence | None:
    """Whichever comes first: what module level found, or an operation inside of it.

    A module's output is recorded after its operations, so that the operation is the earlier one,
    on the side that it is on.
    """
    if first is None or operation is None:
        return first if operation is None else operation.divergence
    found = operation.divergence
    stage = found.step, STAGE_RANK[found.stage]
    of_first = first.place if isinstance(first, Judged) else (first.step, STAGE_RANK[first.stage])
    if stage != of_first[:2]:
        before = stage < of_first[:2]
    elif isinstance(first, Judged):
        orders = first.event.order, first.pair.target.order
        before = any(a < b for a, b in zip(operation.orders, orders, strict=True))
    else:
        before = operation.orders[0] < first.order
    return found if before else first


def _orders(finding: Finding) -> tuple[int, int]:
    """When each side executes what a finding is about."""
    exits = finding.pair.baseline.event, finding.pair.target.event
    found = [culprit or exit_ for culprit, exit_ in zip(finding.culprits, exits, strict=True)]
    orders = [event.order for event in found]
    if finding.lacking is not None:
        orders[finding.lacking] = finding.user.order if finding.user else sys.maxsize
    return orders[0], orders[1]


def _errs(finding: Finding) -> Event | None:
    """The operation that errs, on the earlier side if both do: it may be of an earlier stage than
    the exit of its span, as a parameter's gradient that an optimizer reads."""
    found = [culprit for culprit in finding.culprits if culprit is not None]
    return min(found, key=lambda event: STAGE_RANK[event.site.phase], default=None)


def _divergence(finding: Finding, judge: OperationJudge) -> Divergence:
    exits = finding.pair.baseline.event, finding.pair.target.event
    named = [judge.counterpart(finding, side) for side in (0, 1)]
    a, b = (event or exit_ for event, exit_ in zip(named, exits, strict=True))
    issued = [a, b]  # the side that lacks the operation has the one that would use its result
    if finding.lacking is not None and finding.user is not None:
        issued[finding.lacking] = finding.user
    has = [side for side in (0, 1) if side != finding.lacking]
    errs = _errs(finding) or (a, b)[has[0]]
    found = Divergence(
        stage=errs.site.phase,
        step=a.site.step,
        site=str(a.site),
        path=module_of(errs),
        port=a.site.port,
        kind="value",
        call=a.site.call,
        order=a.order,
        target_site=str(b.site),
        op={SIDES[side]: (a, b)[side].op for side in has},
        meaning=finding.note,
        origin="introduced",
        blame=finding.blame,
        settings=_arguments(a, b),
        bound=Bound(rel_l2=finding.bound, derivation=finding.derivation),
        where={"baseline": issued[0].source, "target": issued[1].source},
        shapes={"baseline": a.shape, "target": b.shape},
        span=OperationSpan(
            baseline=_operations(finding.spans[0], 0, finding.checks),
            target=_operations(finding.spans[1], 1, finding.checks),
            inputs=tuple((str(x.event.site), str(y.event.site)) for x, y in finding.inputs),
            matched_by=finding.pair.matched_by,
            layout=judge.layout_of(finding.pair),
        ),
    )
    values = judge.values(finding.pair)
    if values is None:
        return replace(found, error=replace(found.error, rel_l2=finding.error))
    figures = measure(*values)
    error = replace(figures.error, rel_l2=finding.error)
    if figures.nonfinite:
        found = replace(found, kind="nonfinite")
    from tracediff.compare.patterns import recognise

    pattern = recognise(*values)
    if pattern is not None:
        meaning = "; ".join(part for part in (finding.note, pattern.meaning) if part)
        found = replace(found, pattern=pattern.name, detail=dict(pattern.detail), meaning=meaning)
    return replace(found, error=error, deviations=largest_deviations(*values))


def _arguments(a: Event, b: Event) -> tuple[tuple[str, Any, Any], ...]:
    """Arguments of one operation that the two sides give other values."""
    if name_of(a) != name_of(b):
        return ()
    args = [event.attributes.get("args", {}) for event in (a, b)]
    operands = [event.attributes.get("operands", ()) for event in (a, b)]
    found = [(name, value, args[1][name]) for name, value in args[0].items() if name in args[1]]
    if len(operands[0]) == len(operands[1]):
        found += [
            (f"operand {number}", *pair)
            for number, pair in enumerate(zip(*operands, strict=True), start=1)
            if None not in pair
        ]
    return tuple(
        (f"{name_of(a)} {name}", before, after) for name, before, after in found if before != after
    )


def _operations(
    span: Span, side: int, checks: Mapping[tuple[int, int], Check]
) -> tuple[SpanOperation, ...]:
    rows = []
    for event in span.operations:
        check = checks.get((side, event.order))
        rows.append(
            SpanOperation(
                site=str(event.site),
                op=event.op,
                where=event.source,
                shape=event.shape,
                dtype=event.dtype,
                error=check.error if check else None,
                bound=check.bound if check else None,
                errs=bool(check and check.ratio > 1),
            )
        )
    return tuple(rows)


def _mask(trace: Trace, events: Sequence[Event]) -> NDArray[Any] | None:
    """The attention mask of a step with one batch, None where there is none or there are more."""
    masks = [e for e in events if e.site.path == "batch.attention_mask" and len(e.shape) == 2]
    if len(masks) != 1 or masks[0].payload is None:
        return None
    return np.asarray(trace.array(masks[0]))


def operation_options(first: Divergence | None) -> dict[str, list[str]] | None:
    """Options of `tracediff record`, for each side, that record the operations around a divergence
    and nothing else; None where no operation can be named."""
    modules = operation_modules(first)
    if first is None or modules is None:
        return None
    options = ["--level", "op", "--steps", str(first.step)]
    return {s: [*options, "--only", path] if path else options for s, path in modules.items()}


def operation_modules(first: Divergence | None) -> dict[str, str] | None:
    """The module, for each side, that holds the operations around a divergence, "" for all of them;
    None where no operation can be named.

    A value that a module is given was made around it, and what has no module runs outside of all.
    """
    if first is None or first.span is not None or first.stage not in OPERATION_STAGES:
        return None
    if first.kind not in ("value", "nonfinite"):
        return None
    sites = {"baseline": first.site, "target": first.target_site or first.site}
    return {side: _module(Site.parse(site)) for side, site in sites.items()}


def _module(site: Site) -> str:
    if site.phase not in ("forward", "backward") or site.path.startswith(ROOT):
        return ""
    inside = site.port.startswith(("in", "grad_in")) or site.port == "grad"
    return parent(site.path) if inside else site.path
