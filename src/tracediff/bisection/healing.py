"""Which divergence of a judged step comes first, and which are undone by what follows them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tracediff.align import Alignment
from tracediff.bisection.inheritance import Judged, only_by_effect
from tracediff.bisection.judge import StepJudge
from tracediff.bisection.localised import Localised, earlier
from tracediff.bisection.relayouts import Relayout
from tracediff.bisection.samples import Rendered
from tracediff.events import ROOT, STAGE_RANK, Event
from tracediff.trace import Trace
from tracediff.verdict import Divergence


@dataclass(slots=True)
class Step:
    """One judged step.

    Attributes:
        notes: How its sides were brought into a common form.
        operation: The first divergent one, where operations are recorded.
        placed_differently: Whether the runs place tensors differently on their meshes.
    """

    number: int
    alignment: Alignment
    judged: list[Judged]
    judge: StepJudge
    missing: list[Divergence]
    samples: Rendered
    notes: list[str] = field(default_factory=list)
    operation: Localised | None = None
    placed_differently: bool = False

    @property
    def lacking(self) -> list[Divergence]:
        return self.missing if self.samples.first is None else [*self.missing, self.samples.first]

    def stage(self, name: str) -> list[Judged]:
        return [j for j in self.judged if j.event.site.phase == name]


def first_of(
    step: Step, traces: tuple[Trace, Trace], passed_over: list[Judged]
) -> Judged | Divergence | None:
    """The first divergence of a step that was introduced there and does not heal."""
    return earlier(_first_at_modules(step, traces, passed_over), step.operation)


def _first_at_modules(
    step: Step, traces: tuple[Trace, Trace], passed_over: list[Judged]
) -> Judged | Divergence | None:
    introduced = [j for j in step.judged if j.mark == "diverged" and not j.inherited]
    found = filter(None, (step.samples.first, _lacking(step)))
    lacking = min(found, key=place_of, default=None)
    for judged in introduced:
        rng = judged.event.site.phase == "rng"
        if (rng and not _decides(judged, step, traces)) or _healed(judged, step):
            passed_over.append(judged)
        else:
            if lacking and (lacking.step, STAGE_RANK[lacking.stage], lacking.order) < judged.place:
                return lacking
            return judged
    return lacking


def origin(judged: Judged, step: Step) -> str:
    """Where a divergence comes from, or that it is undone; "" for a pair that agrees."""
    if judged.mark != "diverged":
        return ""
    if judged.inherited:
        return "inherited"
    return "healed" if _healed(judged, step) else "introduced"


def place_of(first: Judged | Divergence) -> tuple[int, int, int]:
    """Where a divergence stands: step, rung of the ladder, order of execution."""
    if isinstance(first, Judged):
        return first.place
    return first.step, STAGE_RANK[first.stage], first.order


def _decides(judged: Judged, step: Step, traces: tuple[Trace, Trace]) -> bool:
    """Whether a generator's state can be why the runs part: one stack, and numbers were drawn.

    Whether they were is seen from the states after the step, which are recorded of generators that
    it changed, or from the state at the next step (or, at the last, from the step before). Where
    neither is there, a dropout has to have diverged. Where the masks of one run were given to the
    other, what a dropout draws has no effect.
    """
    later = [j for j in step.judged if j.mark == "diverged" and j.event.site.phase != "rng"]
    if (
        not later
        or traces[0].run.stack != traces[1].run.stack
        or any(map(_has_given_masks, traces))
    ):
        return False
    drawn = [
        _state_changes(trace, event)
        for trace, event in zip(traces, (judged.event, judged.pair.target), strict=True)
    ]
    if None in drawn:
        return any("dropout" in j.event.op.lower() for j in later)
    return any(drawn)


def _has_given_masks(trace: Trace) -> bool:
    given = trace.run.settings.get("substituted")
    stages = given.get("stages") if isinstance(given, dict) else ()
    return isinstance(stages, list) and "masks" in stages


def _state_changes(trace: Trace, event: Event) -> bool | None:
    """Whether a generator's state is another after the step; None where nothing tells."""
    site = event.site
    changed = {
        other.site.path
        for other in trace.events(site.step, samples=False)
        if (other.site.phase, other.site.port) == ("rng", "after")
    }
    if changed:
        return site.path in changed
    neighbours = [step for step in (site.step + 1, site.step - 1) if step in trace.steps]
    for step in neighbours:
        for other in trace.events(step, samples=False):
            if (other.site.phase, other.site.path, other.site.port) == ("rng", site.path, "state"):
                return other.digest != event.digest
    return None


def _healed(judged: Judged, step: Step) -> bool:
    """Whether everything computed from a divergent value agrees again, sooner or later.

    A consistent re-layout (queries and keys permuted alike, positions shifted alike) leaves the
    scores as they were, a shift of all logits of a row leaves the probabilities; labels that
    differ only where the loss ignores them leave the loss. What a loss does not look at, or
    averages away, is not healed: the logits are a result in themselves. A record or a message that
    differs matters only if the text or the token IDs do.
    """
    site = judged.event.site
    if site.phase == "backward" and judged.blame != "undecided":
        return False  # a side broke the chain rule; that Adam undoes a factor is no excuse
    if judged.relayout is not None:
        return _undone(judged.relayout, site.path, step)
    computed = judged.kind in ("value", "labels") and site.phase in ("forward", "loss", "backward")
    if not computed and not only_by_effect(judged.event):
        return False
    if site.phase == "loss" and any(
        j.mark == "diverged" for j in step.stage("trajectory") if j.event.site.path == "loss"
    ):
        return False  # the loss is a result in itself, also where its gradients agree
    users: dict[int, list[Judged]] = defaultdict(list)
    for user in step.judged:
        for order in user.event.inputs:
            users[order].append(user)
    reached, waiting = {judged.event.order}, [judged]
    while waiting:
        following = users[waiting.pop().event.order]
        if (judged.kind, site.phase) == ("value", "forward"):
            following = [user for user in following if _can_undo(user)]
        if not following:
            return False  # what nothing is computed from is a result
        for user in following:
            # A fault diluted below a bound has not healed: more than rounding is left of it.
            ignored = judged.kind == "value" and user.event.site.phase == "loss" and user.masked
            unsound = user.mark == "diverged" or user.level.tainted or ignored
            if unsound and user.event.site.port.startswith("state."):
                return False  # an update may hide it (Adam's first has no scale), the next will not
            if unsound and user.event.order not in reached:
                reached.add(user.event.order)
                waiting.append(user)
    return True


def _can_undo(user: Judged) -> bool:
    """Whether a divergence of the forward pass may be undone in a value computed from it.

    Not in a total, which averages it away, nor in a gradient, which is zero where labels are
    ignored.
    """
    phase = user.event.site.phase
    return phase == "forward" or (phase == "loss" and user.event.shape != ())


def _undone(relayout: Relayout, path: str, step: Step) -> bool:
    """Whether a module around a parameter in another layout has the same output all the same."""
    outputs: dict[str, list[Judged]] = defaultdict(list)
    for judged in step.judged:
        if (judged.event.site.phase, judged.event.site.port) == ("forward", "out"):
            outputs[judged.event.site.path].append(judged)
    owner = path.rpartition(".")[0]
    around = [*_ancestors(owner)] if relayout.axis is not None else [owner, *_ancestors(owner)]
    return any(
        outputs[block] and all(j.mark != "diverged" and not j.level.tainted for j in outputs[block])
        for block in around
    )


def _lacking(step: Step) -> Divergence | None:
    """The first event that one side lacks, unless what it is part of comes out the same.

    A module that one side computes in another way (two products fused into one) is no divergence
    if the module around it has the same output.
    """
    outputs = {
        j.event.site.path: j
        for j in step.judged
        if (j.event.site.phase, j.event.site.port) == ("forward", "out")
    }
    excused: set[str] = set()
    for lacking in step.missing:
        if lacking.stage == "backward" and lacking.path in excused:
            continue
        around = next((outputs[p] for p in _ancestors(lacking.path) if p in outputs), None)
        if lacking.stage != "forward" or around is None or around.mark == "diverged":
            return lacking
        excused.add(lacking.path)
    return None


def _ancestors(path: str) -> Iterator[str]:
    """`a.b.c` -> `a.b`, `a`, and the root."""
    while path := path.rpartition(".")[0]:
        yield path
    yield ROOT
