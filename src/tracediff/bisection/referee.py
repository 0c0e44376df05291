"""The referee: recomputes both sides of a pair in float64 and says what rounding does not explain.

The test is on the **explained difference**. With F the exact operation, each side's own recorded
inputs and parameters, and the baseline's settings on both sides,

    (out_A - out_B) - (F(in_A) - F(in_B))

is what the operation itself added to the difference. In a correct pair it is rounding alone, held
to the spread that the replayer derives; how far the inputs are apart does not matter. Where a
formula knows every rounding, each side is held to F of its own inputs instead.

What no module computes (a residual, attention) is recomputed by a relation, see `relations`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.flow import Flow
from tracediff.bisection.memory import Memory
from tracediff.bisection.recompute import (
    Calls,
    on_few_rows,
    operand_roundoff,
    reference,
    replay,
    trial_of,
)
from tracediff.bisection.relation import Attempt, Relation
from tracediff.bisection.relations import relations
from tracediff.bisection.ruling import Ruling
from tracediff.bisection.trial import Counts, Trial, Values, counted, limit, norm, side
from tracediff.bisection.views import around
from tracediff.compare import settings as settings_of
from tracediff.events import Event, Pair
from tracediff.replaying import Call
from tracediff.trace import Trace
from tracediff.verdict import Bound

_GLOBAL: Final = ("config.", "torch.", "mlx.", "operand_roundoff")
"""Settings that are not a module's own."""

_NO_CUT: Final[Mapping[str, Any]] = {"operand_roundoff": 0.0}

_SIDES: Final = ("baseline", "target")

_Place = tuple[str, str, int]


class Referee:
    """Rules on the pairs of one step.

    Args:
        traces: In a replay, with what its calls ran on in place of what they would have been given.
        recorded: As they were recorded.
        memory: Of both sides; the step's own parameters and settings are in it already.
        flow: What the pairs of the step were computed from.
    """

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        recorded: tuple[Trace, Trace],
        events: tuple[Sequence[Event], Sequence[Event]],
        memory: tuple[Memory, Memory],
        flow: Flow,
    ) -> None:
        self._traces = traces
        self._recorded = recorded
        self._memory = memory
        self._flow = flow
        self._inputs: tuple[dict[_Place, list[Event]], dict[_Place, list[Event]]] = ({}, {})
        for found, of_side in zip(self._inputs, events, strict=True):
            for event in of_side:
                if event.site.port == "labels" or event.site.port.startswith("in"):
                    found.setdefault(_place(event), []).append(event)

    def rule(
        self,
        pair: Pair,
        values: Values,
        counts: Counts = None,
        *,
        spot: bool = False,
    ) -> Ruling | None:
        """Rules on a pair, or returns None where it cannot be recomputed.

        Nor is it ruled on where the formula describes neither side: where it is further from both
        of them than they are from each other, they compute something else than it does.

        Args:
            values: Both payloads, finite, in the baseline's layout.
            counts: False where an element is padding, broadcastable to the shape.
            spot: Nothing looks wrong: look at a few rows of a costly operation, and return None
                if they are in order.
        """
        if _has_formula(pair):
            return self._rule_by_formula(pair, values, counts, spot)
        if pair.baseline.site.phase == "forward":
            return self._rule_by_relation(pair, values, counts, spot)
        return None

    def _rule_by_formula(
        self, pair: Pair, values: Values, counts: Counts, spot: bool
    ) -> Ruling | None:
        calls = self._call(0, pair.baseline), self._call(1, pair.target)
        if calls[0] is None or calls[1] is None:
            return None
        found = _with_masks((calls[0], calls[1]), values)
        if self._have_equal_params(pair):
            found = found[0], replace(found[1], params=found[0].params)
        if spot and reference().is_by_rows(pair.baseline.op):
            few = on_few_rows(found, values, counts)
            if few is not None and not _is_suspicious(*few):
                return None
        case = trial_of(found, values, counts)
        if case is None:
            return None
        ruling = _ruling(*case, found[0])
        if ruling.within and not _follow_their_own(found, values, counts):
            return ruling
        return _blamed(replace(ruling, within=False), found, values, counts)

    def _rule_by_relation(
        self, pair: Pair, values: Values, counts: Counts, spot: bool
    ) -> Ruling | None:
        """A relation that holds on both sides explains the pair; where each that is found holds on
        one side only, the other side has broken it. Two of one rank may contradict each other."""
        source = self._flow.copied(pair)
        if source is not None:
            return _copied(source, values, counts)
        settings = self._settings(0, pair.baseline), self._settings(1, pair.target)
        if around(pair.target) is not pair.target:
            values = values[0], self._recorded[1].array(around(pair.target))
        attempt = Attempt(pair, values, counts, settings, spot)
        broken: list[tuple[int, Ruling]] = []
        for relation in relations(attempt, self._flow, self._array):
            ruling = _by_relation(relation)
            if ruling.within:
                return ruling
            broken.append((relation.rank, ruling))
        if not broken:
            return None
        lowest = min(rank for rank, _ in broken)
        found = [ruling for rank, ruling in broken if rank == lowest]
        if len({ruling.blame for ruling in found}) > 1:
            return replace(
                found[0], blame="undecided", note="each side follows a formula of its own"
            )
        return found[0]

    def _array(self, which: int, event: Event, of: Event) -> NDArray[Any]:
        """A value as the code had it that computed `of`: a call inside it may run on another."""
        traces = self._traces if event.order in of.inputs else self._recorded
        return traces[which].array(around(event))

    def _settings(self, which: int, event: Event) -> dict[str, Any]:
        settings = self._memory[which].settings(event.site.path) | dict(event.attributes)
        settings["operand_roundoff"] = operand_roundoff(settings, event.dtype)
        return settings

    def _have_equal_params(self, pair: Pair) -> bool:
        a, b = (
            memory.params(event.site.path)
            for memory, event in zip(self._memory, (pair.baseline, pair.target), strict=True)
        )
        return a.keys() == b.keys() and all(
            (a[name].digest, a[name].dtype) == (b[name].digest, b[name].dtype) for name in a
        )

    def _call(self, which: int, event: Event) -> Call | None:
        """One side's call with everything recorded of it, or None where a payload is missing."""
        trace = self._traces[which]
        inputs = self._inputs[which].get(_place(event), [])
        params = self._memory[which].params(event.site.path)
        if any(e.payload is None for e in (*inputs, *params.values())):
            return None
        if self._memory[which].holds_parts(event.site.path) or any(e.shard for e in inputs):
            return None
        return Call(
            op=event.op,
            inputs={e.site.port: trace.array(e) for e in inputs},
            params={name: trace.array(e) for name, e in params.items()},
            settings=reference().resolve(event.op, self._settings(which, event)),
            dtype=event.dtype,
        )


def _ruling(trial: Trial, derivation: str, call: Call) -> Ruling:
    """What a trial says, without blame."""
    ratio = trial.ratio
    bound = Bound(rel_l2=trial.explained(ratio), derivation=derivation)
    spreads = limit(trial.sides[0].rows)
    return Ruling(ratio <= 1, bound, call, trial.rounding, spreads)


def _copied(source: Pair, values: Values, counts: Counts) -> Ruling:
    """The value of another pair: it is as far apart as that one."""
    a, b = (counted(value, counts) for value in values)
    bound = Bound(
        rel_l2=norm(a - b) / (norm(a) or 1.0), derivation=f"copy of {source.baseline.site}"
    )
    call = Call(op="copy", inputs={"in": values[0]}, settings=_NO_CUT, dtype=values[0].dtype.name)
    return Ruling(True, bound, call, 0.0, 1.0, sources={"in": source})


def _by_relation(relation: Relation) -> Ruling:
    """What a relation says: it holds on both sides, or one of them broke it."""
    trial = relation.trial
    within = all(trial.holding)
    bound = Bound(
        rel_l2=trial.explained(0.0 if within else trial.ratio), derivation=relation.derivation
    )
    spreads = limit(trial.sides[0].rows)
    found = Ruling(within, bound, relation.call, trial.rounding, spreads, sources=relation.sources)
    if within:
        return found
    distances = {
        f"distance_{name}": of.distance for name, of in zip(_SIDES, trial.sides, strict=True)
    }
    wrong = trial.holding.index(False)
    blame = _SIDES[wrong]
    sources = " and ".join(
        str((pair.baseline, pair.target)[1 - wrong].site) for pair in relation.sources.values()
    )
    note = (
        f"in the {_SIDES[1 - wrong]} it is what {relation.derivation} makes of {sources}, "
        f"in the {blame} it is not"
    )
    return replace(found, blame=blame, evidence=distances, note=note)


def _has_formula(pair: Pair) -> bool:
    """Whether a pair is the output of an operation that both sides name, with a formula."""
    return (
        pair.baseline.site.port == "out"
        and pair.baseline.site.phase in ("forward", "loss")
        and reference().supports(pair.baseline.op)
        and reference().supports(pair.target.op)
    )


def _with_masks(calls: Calls, values: Values) -> Calls:
    """Dropouts that dropped the same elements on both sides, with that mask: what is zero was
    dropped, as far as it was not zero before. Others as they are."""
    if not all("Dropout" in call.op and call.settings.get("p") for call in calls):
        return calls
    a, b = (
        (value != 0) | (call.inputs["in"] == 0) for value, call in zip(values, calls, strict=True)
    )
    if not np.array_equal(a, b):
        return calls
    first, second = (replace(call, inputs={**call.inputs, "mask": a}) for call in calls)
    return first, second


def _is_suspicious(calls: Calls, values: Values) -> bool:
    case = trial_of(calls, values, None)
    return case is not None and case[0].ratio > 1


def _blamed(ruling: Ruling, calls: Calls, values: Values, counts: Counts) -> Ruling:
    """Which side is further from the reference, each by its own inputs and settings, than rounding
    takes it."""
    wrong, evidence = [], {}
    for name, value, call in zip(_SIDES, values, calls, strict=True):
        replayed = replay(call, call.settings)
        if replayed is None:
            return ruling
        found = side(value, replayed, counts)
        if not found.holds:
            wrong.append(name)
        evidence[f"distance_{name}"] = found.distance
    if not wrong and (departing := _departing(calls, values, counts)):
        return replace(ruling, blame=departing[0], evidence=evidence, note=departing[1])
    blame = "both" if len(wrong) == 2 else wrong[0] if wrong else "undecided"
    note = ""
    differing = _differing(calls[0].settings, calls[1].settings)
    if not wrong and differing:
        what = ", ".join(f"{name} {a!r} against {b!r}" for name, (a, b) in differing.items())
        note = f"each side follows its own setting ({what})"
    return replace(ruling, blame=blame, evidence=evidence, note=note)


def _departing(calls: Calls, values: Values, counts: Counts) -> tuple[str, str] | None:
    """The side whose result follows from its own settings and not from what its own type of model
    fixes, where the other side's follows from that; and a sentence."""
    holding = []
    for call, value in zip(calls, values, strict=True):
        fixed = reference().conventions(call.op, call.settings)
        replayed = replay(call, {**call.settings, **fixed}) if fixed else None
        if replayed is None:
            return None
        holding.append(side(value, replayed, counts).holds)
    if all(holding) or not any(holding):
        return None
    wrong = holding.index(False)
    settings = calls[wrong].settings
    what = ", ".join(
        f"{name} {settings.get(name)!r} where {settings.get('config.model_type')} has {right!r}"
        for name, right in reference().conventions(calls[wrong].op, settings).items()
    )
    return _SIDES[wrong], f"the {_SIDES[wrong]} follows a setting of its own ({what})"


def _follow_their_own(calls: Calls, values: Values, counts: Counts) -> bool:
    """Whether a setting in which the sides differ shows in the bits, below what 16-bit formulas
    allow for: all results of a side are the formula by its own setting, rounded once, and not all
    are that by the other's."""
    if not _differing(calls[0].settings, calls[1].settings):
        return False
    for call, other, value in zip(calls, calls[::-1], values, strict=True):
        found = [replay(call, settings) for settings in (call.settings, other.settings)]
        once = [replace(f, reach=f.once) for f in found if f is not None and f.once is not None]
        holding = [side(value, replayed, counts).holds for replayed in once]
        if holding == [True, False]:
            return True
    return False


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of the module itself that differ; those of the configuration act through them."""
    found = settings_of.differing(a, b)
    return {name: pair for name, pair in found.items() if not name.startswith(_GLOBAL)}


def _place(event: Event) -> _Place:
    return event.site.phase, event.site.path, event.site.call
