"""Judges the pairs of one step: identical, equivalent, or diverged, and if so introduced or not.

An error is held to what rounding at the place can cause plus what its inputs already carry. Each
judged pair therefore passes two figures on to what was computed from it: `carry`, the part that
rounding explains, and `actual`, all of it. A pair beyond its bound has diverged; it is inherited
if the `actual` error of its inputs accounts for it, and introduced otherwise.

That bound is cheap and coarse. Where a pair is beyond it or not far below, and the operation has a
formula, the referee decides instead. See docs/deciding.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.align import Alignment
from tracediff.align.fingerprints import same_elements
from tracediff.bisection import carry
from tracediff.bisection.given import AsGiven, is_replay
from tracediff.bisection.inheritance import Judged, Ledger, State
from tracediff.bisection.level import Level
from tracediff.bisection.limits import Limits
from tracediff.bisection.options import Options
from tracediff.bisection.ruling import Ruling
from tracediff.bisection.values import estimate, headroom, is_float, is_sketched, read_pair
from tracediff.compare import bounds, settings
from tracediff.compare.figures import Figures, is_complex, measure, one_conversion_apart
from tracediff.compare.logits import normalised
from tracediff.compare.masks import is_mask_port, see_as_many, visible
from tracediff.compare.padding import Padding
from tracediff.events import EXACT_KINDS, STAGE_RANK, Event, Pair
from tracediff.trace import Trace
from tracediff.trace.summary import FINGERPRINT_FIELDS
from tracediff.verdict import Bound, ErrorFigures

if TYPE_CHECKING:
    from tracediff.bisection.gradients import Gradients
    from tracediff.bisection.held import Finding
    from tracediff.bisection.referee import Referee
    from tracediff.bisection.turned import Choices
    from tracediff.bisection.updates import Updates

_MEAN: Final = FINGERPRINT_FIELDS.index("mean")
_SMALLEST: Final = 1e-30
_SUSPECT: Final = 1 / 8
"""Fraction of the cheap bound above which the referee looks at the whole of a costly operation."""

_FLUSHED: Final = 2.0**-126
"""Smaller numbers may be flushed to zero: the smallest normal one of float32 and bfloat16."""

_LOADING_ULPS: Final = 2.0
"""Parameters may differ by the rounding of one conversion, and by no more."""


class StepJudge:
    """Judges the pairs of one step in the order of the ladder.

    Args:
        traces: Baseline and target, from which payloads are read where digests differ.
        state: Carried over from the step before; updated.
    """

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        alignment: Alignment,
        events: tuple[Sequence[Event], Sequence[Event]],
        state: State,
        options: Options,
    ) -> None:
        self._traces = traces
        self._alignment = alignment
        self._state = state
        self._ledger = Ledger(events, state)
        self._options = options
        self._events = events
        for memory, side in zip(state.memory, events, strict=True):
            memory.begin(side)
        replayed = is_replay(traces[1].run)
        self._given = AsGiven(*traces, alignment) if replayed else None
        if self._given is not None:
            # Masks, tables of positions: a replay could not give them, others judge their making.
            for which, only in enumerate((alignment.baseline_only, alignment.target_only)):
                for event, _ in only:
                    if event.site.phase == "forward" and event.site.port.startswith("in"):
                        self._ledger.settle(which, event)
        for history, side in zip(state.histories, events, strict=True):
            history.begin(side)
        self.padding = self._padding_of(events)
        self._limits = Limits(traces, events, self._ledger, state, self.padding)

    # What rules on values that differ is imported where there are some: it is a third of all code.

    @cached_property
    def _referee(self) -> Referee:
        from tracediff.bisection.flow import Flow
        from tracediff.bisection.referee import Referee

        flow = Flow(self._alignment.pairs, self._events)
        given = self._traces[0], self._given or self._traces[1]
        return Referee(given, self._traces, self._events, self._state.memory, flow)

    @cached_property
    def _choices(self) -> Choices:
        from tracediff.bisection.turned import Choices

        return Choices(self._traces, self._alignment.pairs, self._ledger)

    @cached_property
    def _gradients(self) -> Gradients:
        from tracediff.bisection.gradients import Gradients

        return Gradients(self._traces, self._events, self._state.memory, self._alignment.pairs)

    @cached_property
    def _updates(self) -> Updates:
        from tracediff.bisection.updates import Updates

        return Updates(self._traces, self._events, self._state.histories)

    def run(self) -> list[Judged]:
        """Judges every pair of the step.

        Returns:
            In the order of the ladder, then of execution.
        """
        pairs = sorted(
            self._alignment.pairs,
            key=lambda pair: (STAGE_RANK[pair.baseline.site.phase], pair.baseline.order),
        )
        judged = [self._ledger.remember(self._cut(self._marked(pair))) for pair in pairs]
        for memory, side in zip(self._state.memory, self._events, strict=True):
            memory.finish(side)
        for history, side in zip(self._state.histories, self._events, strict=True):
            history.finish(side)
        return judged

    def _cut(self, judged: Judged) -> Judged:
        """In a replay, a call that ran on the baseline's value passes nothing on from its input."""
        if self._given is not None and self._given.ran_on(judged.pair):
            judged.level = Level()
        return judged

    # ---- one pair --------------------------------------------------------------------------

    def _marked(self, pair: Pair) -> Judged:
        judged = self._judge(pair)
        if judged.mark == "identical" and (pair.baseline.view or pair.target.view):
            judged.mark = "equivalent"  # what is seen of them is bit-equal, not all of them
        if pair.baseline.site.phase == "loading":
            judged.relayout = self._state.relayouts.get(pair.baseline.site.path)
        if judged.relayout:
            judged.level = Level()  # what is computed from it is compared in the baseline's layout
        return judged

    def _judge(self, pair: Pair) -> Judged:
        a, b = pair.baseline, pair.target
        if a.kind == "setting" or b.kind == "setting":
            return self._judge_setting(pair)
        if a.kind == "text" or b.kind == "text":
            if a.value == b.value:
                return Judged(pair, "identical")
            return self._beyond(pair, "text", self._ledger.inherited(pair))
        if is_mask_port(a.site.port) and (judged := self._judge_mask(pair)):
            return judged
        shape = b.shape[::-1] if pair.layout == "transposed" else b.shape
        if a.shape != shape:
            return self._beyond(pair, "shape", Level())
        if a.digest == b.digest and a.dtype == b.dtype and pair.layout == "same":
            return Judged(pair, "identical")
        if a.kind in EXACT_KINDS or not (is_float(a) and is_float(b)):
            return self._judge_exact(pair)
        return self._judge_tensor(pair)

    def _judge_setting(self, pair: Pair) -> Judged:
        a, b = pair.baseline.value, pair.target.value
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            same = not settings.differing(a, b)
        else:
            same = settings.equal(a, b)
        if same:
            return Judged(pair, "identical")
        if pair.baseline.site.phase == "environment":
            return Judged(pair, "equivalent", kind="setting")
        return self._beyond(pair, "setting", Level())

    def _judge_mask(self, pair: Pair) -> Judged | None:
        """An attention mask, by what it lets be seen; None where the values cannot say."""
        values = self._values(pair)
        if pair.baseline.digest == pair.target.digest:
            return None
        if values is None:
            as_many = see_as_many(pair.baseline, pair.target)
            return Judged(pair, "equivalent") if as_many else None
        try:
            a, b = np.broadcast_arrays(*map(visible, values))
        except ValueError:
            return None  # shapes that do not broadcast are a difference of shape
        figures = measure(a, b, self.padding.counts(pair.baseline, a.shape))
        if figures.error.differing:
            return self._beyond(pair, "value", self._ledger.inherited(pair), figures)
        return Judged(pair, "equivalent")

    def _judge_exact(self, pair: Pair) -> Judged:
        kind = pair.baseline.kind if pair.baseline.kind in ("ids", "labels") else "value"
        values = self._values(pair)
        if values is None:
            a, b = pair.baseline, pair.target
            if a.dtype != b.dtype and same_elements(a.fingerprint, b.fingerprint):
                return Judged(pair, "equivalent")  # digests of int32 and int64 say nothing
            return self._turned(pair) or self._beyond(pair, kind, self._ledger.inherited(pair))
        figures = measure(*values, self.padding.counts(pair.baseline, values[0].shape))
        if not figures.error.differing and not figures.nonfinite:
            return Judged(pair, "equivalent" if figures.masked else "identical")
        return self._turned(pair) or self._beyond(pair, kind, self._ledger.inherited(pair), figures)

    def _turned(self, pair: Pair) -> Judged | None:
        """Integers that scores chose which agree: anything may be computed from them."""
        turned = self._choices.turned(pair)
        if turned is None:
            return None
        return Judged(pair, "equivalent", level=Level(1.0, 1.0), turned=turned)

    def _judge_tensor(self, pair: Pair) -> Judged:
        inherited = self._ledger.inherited(pair)
        values = self._values(pair)
        if values is not None and inherited.tainted and _are_logits(pair):
            values = normalised(values[0]), normalised(values[1])
        if values is None:
            figures = estimate(pair)
        else:
            figures = measure(*values, self.padding.counts(pair.baseline, values[0].shape))
        if figures.nonfinite:
            return self._beyond(pair, "nonfinite", inherited, figures)
        error = figures.error
        bound, explained = self._limits.of(pair, inherited, error.rel_l2), False
        within = _within(pair, error, bound)
        if pair.baseline.site.phase == "loading" and values is not None:
            within = one_conversion_apart(*values)
        ruling = self._ruling(pair, figures, bound, values)
        if isinstance(ruling, Ruling):
            passing = carry.ruled(pair, ruling, self._ledger, error.rel_l2)
            inherited = passing.inherited
            within = ruling.within
        elif values is None and not is_sketched(pair):
            cancelled = self._limits.cancelled(pair)
            passing = carry.unseen(pair, inherited, error.rel_l2, cancelled)
        else:
            passing = carry.unruled(pair, inherited, error.rel_l2)
            within = within if ruling is None or inherited.tainted else ruling.within
        within = within and passing.healed
        if ruling is not None:
            explained, bound = ruling.within, ruling.bound
            within = within and ruling.within
        level = passing.level
        noisy = self._options.widened(pair.baseline, bound, self.padding)
        if noisy is not None:
            bound, within = noisy, within or _within(pair, error, noisy)
        override = self._options.tolerance(str(pair.baseline.site))
        if override is not None and values is not None:
            within = override.accepts(*values)
            bound = Bound(rel_l2=override.rtol, derivation=f"--rtol/--atol {override.pattern}")
        if within:
            exact = not error.differing and not error.estimated and pair.layout != "same"
            mark = "identical" if exact and not figures.masked else "equivalent"
            if not inherited.tainted and (values is not None or is_sketched(pair)):
                level = Level(error.rel_l2, error.rel_l2)
            return Judged(pair, mark, error=error, bound=bound, masked=figures.masked, level=level)
        judged = self._beyond(pair, "value", inherited, figures, bound, explained)
        judged.level = replace(level, diverged=True)
        if ruling is not None and not ruling.within:
            judged.inherited = False
            judged.blame, judged.evidence, judged.note = ruling.blame, ruling.evidence, ruling.note
        return judged

    def _ruling(
        self,
        pair: Pair,
        figures: Figures,
        bound: Bound,
        values: tuple[NDArray[Any], NDArray[Any]] | None,
    ) -> Ruling | Finding | None:
        """What recomputing a pair says; a spot check will do where the cheap bound is far off."""
        error = figures.error
        clear = error.rel_l2 <= _SUSPECT * bound.rel_l2 and (
            error.max_rel <= _SUSPECT * bounds.ELEMENT_HEADROOM * bound.rel_l2
        )
        if values is None or not error.differing or any(map(is_complex, values)):
            return None  # formulas of calls are of real numbers
        if pair.baseline.site.phase == "optimizer":
            return self._updates.rule(pair, values, spot=clear)
        if pair.baseline.shard:
            return None  # formulas are of wholes
        counts = self.padding.counts(pair.baseline, values[0].shape)
        if pair.baseline.site.phase == "backward":
            return self._gradients.rule(pair, values, counts, spot=clear)
        return self._referee.rule(pair, values, counts, spot=clear)

    def _beyond(
        self,
        pair: Pair,
        kind: str,
        inherited: Level,
        figures: Figures | None = None,
        bound: Bound | None = None,
        explained: bool = False,
    ) -> Judged:
        """A pair that diverged: inherited if its inputs are beyond theirs and account for it."""
        error = figures.error if figures else ErrorFigures(rel_l2=1.0, differing=1.0)
        gain = bounds.GAIN.get(pair.baseline.site.phase, bounds.DEFAULT_GAIN)
        accounted = error.rel_l2 <= gain * inherited.actual or kind != "value" or explained
        return Judged(
            pair,
            "diverged",
            kind=kind,
            error=error,
            bound=bound,
            inherited=inherited.tainted and accounted,
            masked=figures.masked if figures else 0,
            level=Level(0.0, max(error.rel_l2, _SMALLEST)),
        )

    # ---- values ----------------------------------------------------------------------------

    def _values(self, pair: Pair) -> tuple[NDArray[Any], NDArray[Any]] | None:
        return read_pair(self._traces, pair)

    def _padding_of(self, events: tuple[Sequence[Event], Sequence[Event]]) -> Padding:
        calls = Counter(
            event.site.path
            for event in events[0]
            if event.site.phase == "forward" and event.site.port == "out"
        )
        return Padding(
            self._masks(events, "batch.attention_mask"),
            self._masks(events, "eval_batch.attention_mask"),
            calls,
            self._trained(events[0]),
        )

    def _trained(self, events: Sequence[Event]) -> dict[tuple[str, int], NDArray[np.bool_]]:
        """Which targets each loss function counts, by its path and call."""
        losses = {
            (e.site.path, e.site.call, e.site.port): e for e in events if e.site.phase == "loss"
        }
        trained = {}
        for (path, call, port), event in losses.items():
            ignored = event.attributes.get("ignore_index")
            labels = losses.get((path, call, "labels"))
            if port == "out" and isinstance(ignored, int) and labels and labels.payload:
                trained[path, call] = self._traces[0].array(labels) != ignored
        return trained

    def _masks(
        self, events: tuple[Sequence[Event], Sequence[Event]], path: str
    ) -> list[NDArray[Any]]:
        """The attention masks of a step's batches, from whichever side shows them."""
        for trace, side in zip(self._traces, events, strict=True):
            masks = [e for e in side if e.site.path == path and len(e.shape) == 2]
            if masks and all(event.payload for event in masks):
                return [trace.array(event) for event in masks]
        return []


def _within(pair: Pair, error: ErrorFigures, bound: Bound) -> bool:
    """Whether the error of the whole, and of its worst element, is what the bound allows."""
    if error.max_abs <= _FLUSHED and not error.estimated:
        return True
    if error.estimated:
        return error.rel_l2 <= headroom(pair) * bound.rel_l2
    return error.rel_l2 <= bound.rel_l2 and (
        pair.baseline.site.phase not in ("loading", "forward")
        or error.max_rel <= bounds.ELEMENT_HEADROOM * bound.rel_l2
    )


def _are_logits(pair: Pair) -> bool:
    """Whether a pair is what a cross-entropy over the last axis was given."""
    events = pair.baseline, pair.target
    return all(
        (e.site.phase, e.site.port, e.op) == ("loss", "in", "cross_entropy") and e.shape
        for e in events
    )
