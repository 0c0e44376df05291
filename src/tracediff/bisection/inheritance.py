"""How errors travel: what each pair of a step inherits from the pairs it was computed from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tracediff.bisection.level import Level, worst
from tracediff.bisection.memory import History, Memory
from tracediff.bisection.parameters import PARAM_SHARE, Parameters
from tracediff.bisection.relayouts import Relayout
from tracediff.events import ROOT, STAGE_RANK, Event, Pair
from tracediff.verdict import Bound, ErrorFigures

if TYPE_CHECKING:
    from tracediff.bisection.turned import Turned


@dataclass(slots=True)
class Judged:
    """A pair with its mark (identical, equivalent, diverged) and the figures behind it.

    Attributes:
        blame, evidence, note: What the referee says of a divergence, see `Ruling`.
        relayout: Of a loaded parameter that the target holds in another layout, else None.
        turned: Of integers, where scores chose otherwise that are apart by rounding, else None.
    """

    pair: Pair
    mark: str
    kind: str = "value"
    error: ErrorFigures = field(default_factory=ErrorFigures)
    bound: Bound | None = None
    inherited: bool = False
    masked: int = 0
    level: Level = field(default_factory=Level)
    blame: str = "undecided"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    relayout: Relayout | None = None
    turned: Turned | None = None

    @property
    def event(self) -> Event:
        return self.pair.baseline

    @property
    def place(self) -> tuple[int, int, int]:
        site = self.event.site
        return site.step, STAGE_RANK[site.phase], self.event.order


class State:
    """What is carried from step to step: how far parameters and optimizer state are apart, where
    each side's parameters and settings are recorded, and which the target lays out differently."""

    def __init__(self) -> None:
        self.memory = (Memory(), Memory())
        self.histories = (History(), History())
        self.parameters = Parameters()
        self.moments: dict[tuple[str, str], Level] = {}
        self.relayouts: dict[str, Relayout] = {}
        self.outputs = Level()
        """The most that a model's output has been apart in training."""
        self.placed_differently = False
        """Whether a tensor was seen that the runs place differently, see `placements`."""

    def forget_stale(self, events: tuple[Sequence[Event], Sequence[Event]]) -> None:
        """Forgets parameters that may have changed in steps that nobody looked at.

        Args:
            events: Of the latest step: what it updated is known.
        """
        for memory, side in zip(self.memory, events, strict=True):
            memory.forget_stale(side)


class Ledger:
    """The levels of the pairs judged so far in a step, and what a further pair inherits."""

    def __init__(self, events: tuple[Sequence[Event], Sequence[Event]], state: State) -> None:
        self._events = tuple({event.order: event for event in side} for side in events)
        self._state = state
        self._of_order: tuple[dict[int, Level], dict[int, Level]] = ({}, {})
        self._memo: tuple[dict[int, Level], dict[int, Level]] = ({}, {})
        self._by_site: dict[tuple[str, str, str], Judged] = {}
        self._stage: dict[str, Level] = {}
        self._turned = Level()
        """What choices that went another way may do to gradients: those of so many rows."""
        self.outputs: dict[int, Judged] = {}
        """Output of the first root module by call."""

    def at(self, stage: str, path: str, port: str) -> Judged | None:
        """The last judged pair at a site of the baseline."""
        return self._by_site.get((stage, path, port))

    def settle(self, side: int, event: Event) -> None:
        """Has an unmatched event pass nothing on, whatever it was computed from."""
        self._of_order[side][event.order] = Level()

    def level(self, pair: Pair) -> Level:
        """How far a pair is apart that was judged before."""
        return self._of_order[0].get(pair.baseline.order, Level())

    def of_edges(self, pair: Pair) -> Level:
        """How far what a pair was computed from is apart, parameters left out."""
        return worst(
            self._level(side, order)
            for side, event in enumerate((pair.baseline, pair.target))
            for order in event.inputs
        )

    def of_params(self, pair: Pair) -> Level:
        """How far the parameters of a pair's module are apart."""
        events = enumerate((pair.baseline, pair.target))
        return worst(self._state.parameters.below(side, event.site.path) for side, event in events)

    def inherited(self, pair: Pair) -> Level:
        level = self._stage_level(pair.baseline)
        if pair.baseline.site.phase == "backward":
            level |= self._turned
        for side, event in enumerate((pair.baseline, pair.target)):
            level |= worst(self._level(side, order) for order in event.inputs)
            if event.site.phase in ("forward", "trajectory") and event.site.port.startswith("out"):
                share = PARAM_SHARE * self._state.parameters.selected(side, event)
                level |= self._state.parameters.below(side, event.site.path).share(share)
            elif event.site.phase == "forward":  # code around it computes with its own parameters
                parent = event.site.path.rpartition(".")[0]
                level |= self._state.parameters.own(side, parent).share(PARAM_SHARE)
        return level

    def _level(self, side: int, order: int) -> Level:
        """How far an earlier event is apart; through unmatched ones to what they came from.

        Inputs come before what is computed from them, so a walk along ever smaller orders ends,
        also in a trace that was tampered with.
        """
        waiting = [order]
        known, memo = self._of_order[side], self._memo[side]
        while waiting:
            current = waiting[-1]
            event = self._events[side].get(current)
            inputs = [i for i in event.inputs if i < current] if event else []
            unknown = [i for i in inputs if i not in known and i not in memo]
            if unknown and current not in known:
                waiting += unknown
                continue
            waiting.pop()
            if current not in known and current not in memo:
                below = self._state.parameters.below(side, event.site.path) if event else Level()
                below = below.share(PARAM_SHARE)
                memo[current] = worst(known.get(i) or memo[i] for i in inputs) | below
        return known.get(order) or memo[order]

    def _stage_level(self, event: Event) -> Level:
        """What is inherited where the recorder knows no data flow: from the stage before."""
        site = event.site
        stage, port = site.phase, site.port
        if site.path.startswith("sample["):
            return Level()  # samples have nothing to do with each other
        if stage == "rendering" or (stage == "forward" and not event.inputs):
            return self._stage.get("rendering", Level())
        if stage == "loss":
            return self._stage.get("forward.last", Level()) | self._stage.get("rendering", Level())
        if stage == "backward" and not event.inputs:
            return self._stage.get("forward", Level()) | self._stage.get("loss", Level())
        if stage == "optimizer":
            if port.startswith("state."):
                grad = self._level_at("optimizer", site.path, "grad")
                return grad | self._state.moments.get((site.path, port), Level())
            if port in ("update", "param"):
                ports = ("grad", "state.exp_avg", "state.exp_avg_sq", "hyper", "update")
                return worst(self._level_at("optimizer", site.path, p) for p in ports if p != port)
            if not event.inputs:
                unknown = event.shard and ("backward", site.path, "grad") not in self._by_site
                return (
                    self._level_at("backward", site.path, "grad")
                    # A norm is of all gradients; what FSDP reduces to a part is not recorded.
                    | (
                        self._stage.get("backward", Level())
                        if port == "out" or unknown
                        else Level()
                    )
                    | self._clipped(port)
                )
        if stage == "trajectory" and site.path == "loss":
            return self._stage.get("loss", Level())
        if stage == "trajectory" and site.path == "grad_norm":
            return self._stage.get("backward", Level()) | self._level_at(
                "optimizer", "clip_grad_norm", "out"
            )
        if stage == "trajectory":  # evaluations, on the weights as they are
            before = self._stage.get("rendering", Level()) | self._state.outputs
            if site.path.startswith("eval."):
                before |= self._level_at(stage, ROOT, "out")
            return before | self._state.parameters.below(0, ROOT).share(PARAM_SHARE)
        return Level()

    def _clipped(self, port: str) -> Level:
        """A clipped gradient is divided by the norm of all of them."""
        return self._level_at("optimizer", "clip_grad_norm", "out") if port == "grad" else Level()

    def _level_at(self, stage: str, path: str, port: str) -> Level:
        judged = self._by_site.get((stage, path, port))
        return judged.level if judged else Level()

    def remember(self, judged: Judged) -> Judged:
        a, b = judged.pair.baseline, judged.pair.target
        stage, path, port = a.site.phase, a.site.path, a.site.port
        level = judged.level
        for side, event in enumerate((a, b)):  # parts of a fused tensor are of one order
            known = self._of_order[side].get(event.order, Level())
            self._of_order[side][event.order] = known | level
        self._by_site[stage, path, port] = judged
        if judged.turned is not None:
            part = math.sqrt(judged.turned.count / judged.turned.rows)
            self._turned |= Level(part, part)
        if stage not in ("environment", "rng") and not (only_by_effect(a) or judged.turned):
            self._stage[stage] = self._stage.get(stage, Level()) | level
        if stage == "forward" and a.site.port.startswith("out"):
            self._stage["forward.last"] = level
        if (stage, path, port) == ("forward", ROOT, "out"):
            self.outputs[a.site.call] = judged
            self._state.outputs |= level
        if stage in ("loading", "optimizer") and port in ("param", "buffer"):
            self._state.parameters.learn(judged.pair, level)
        if (stage, port) == ("optimizer", "update") and judged.mark != "diverged":
            grad = self._level_at(stage, path, "grad")
            self._state.parameters.keep_update(path, judged.error.rel_l2, grad)
        if stage == "optimizer" and port.startswith("state."):
            self._state.moments[path, port] = level
        return judged


def only_by_effect(event: Event) -> bool:
    """Whether an event matters only by what is made of it: a text, by the IDs that it becomes;
    a sampler's places in its data set, by the samples that lie there; positions, by the attention.
    """
    site = event.site
    fields = (".indices", ".position_ids")
    return site.phase == "rendering" and (event.kind == "text" or site.path.endswith(fields))
