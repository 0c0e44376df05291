"""Rules on the pairs of an optimizer step: does each side do what its own hyper-parameters say?

Each side's clipped gradient, moments, update and parameter are recomputed from its own recorded
gradients, its state and parameters before, and its own hyper-parameters: PyTorch's and MLX's Adam,
AdamW and SGD. Any other optimizer's are not ruled on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.held import Finding, finding, held
from tracediff.bisection.memory import History
from tracediff.bisection.trial import Values
from tracediff.compare import optimizers
from tracediff.compare.figures import unit_roundoff
from tracediff.compare.optimizers import Floats, Step
from tracediff.events import Event, Pair
from tracediff.trace import Trace
from tracediff.trace.summary import FINGERPRINT_FIELDS

CLIP: Final = "clip_grad_norm"

_KNOWN: Final = frozenset({"Adam", "AdamW", "SGD"})
_L2: Final = FINGERPRINT_FIELDS.index("l2")
_UNKNOWN: Final = ("amsgrad", "maximize")
"""Switches that change the formula."""

_SAMPLE: Final = 4096
"""Elements that are looked at where nothing looks wrong: all formulas are element by element."""

_Part = NDArray[np.intp] | None


class _Side:
    """One side's optimizer step, and what came before it."""

    def __init__(self, trace: Trace, events: Sequence[Event], history: History) -> None:
        self._trace = trace
        self._history = history
        self._now: dict[tuple[str, str], Event] = {}
        self._backward: dict[str, list[Event]] = defaultdict(list)
        self._clips: list[Event] = []
        # A tensor whose parts have partners of their own is listed more than once.
        for event in {event.site: event for event in events}.values():
            site = event.site
            if site.phase == "optimizer" and site.path == CLIP and site.port == "out":
                self._clips.append(event)
            elif site.phase == "optimizer":
                self._now[site.path, site.port] = event
            elif site.phase == "backward" and site.port == "grad":
                self._backward[site.path].append(event)

    @property
    def limits(self) -> list[float]:
        """Norms that gradients are clipped to, one by one call."""
        return [float(clip.attributes.get("max_norm", math.inf)) for clip in self._clips]

    def expected(self, event: Event, part: _Part) -> Step | None:
        """What the value of an event should be, or None where a formula or a value is missing."""
        path, port = event.site.path, event.site.port
        roundoff = unit_roundoff(event.dtype)
        if path == CLIP:
            return self._norm(event)
        if port == "grad":
            return self._clipped(event, part, roundoff)
        if event.op not in _KNOWN or (hyper := self._hyper(path)) is None:
            return None
        if port in ("state.exp_avg", "state.exp_avg_sq"):
            return self._moment(event, hyper, part, roundoff)
        if port == "state.momentum_buffer":
            given = self._decayed(event, hyper, part, roundoff)
            before = self._before(path, port, part)
            return given and optimizers.momentum(before, given, hyper, roundoff)
        if port == "update":
            return self._update(event, hyper, part, roundoff)
        return None

    def _norm(self, event: Event) -> Step | None:
        """The norm of all gradients, of those parameters that the optimizer updates."""
        updated = {path for path, port in self._now if port == "grad"}
        paths = [path for path in updated if path.rpartition("[")[0] not in updated]  # no parts
        grads = [self._backward.get(path, []) for path in paths]
        if not grads or len(self._clips) != 1 or any(e.shard for each in grads for e in each):
            return None
        squares = []
        for found in grads:
            if len(found) == 1 and found[0].fingerprint:
                squares.append(found[0].fingerprint[_L2] ** 2)
            elif (total := self._sum(found, None)) is not None:
                squares.append(float(np.square(total).sum()))
            else:
                return None
        length = sum(math.prod(found[0].shape) for found in grads)
        return optimizers.norm_of(squares, grads[0][0].dtype, length)

    def _clipped(self, event: Event, part: _Part, roundoff: float) -> Step | None:
        found = self._backward.get(event.site.path, [])
        total = self._sum(found, part)
        if total is None or len(self._clips) > 1:
            return None
        if any(e.shard != event.shard for e in found) or any(clip.shard for clip in self._clips):
            return None
        if not self._clips:
            return optimizers.clipped(total, None, math.inf, roundoff, len(found))
        if self._clips[0].payload is None:
            return None
        norm = float(self._trace.array(self._clips[0]))
        return optimizers.clipped(total, norm, self.limits[0], roundoff, len(found))

    def _moment(self, event: Event, hyper: Any, part: _Part, roundoff: float) -> Step | None:
        path, port = event.site.path, event.site.port
        coupled = event.op == "Adam"
        given = self._decayed(event, hyper if coupled else {}, part, roundoff)
        before = self._before(path, port, part)
        if given is None or (before is None and hyper.get("step") != 1):
            return None
        if before is None:
            before = np.zeros_like(given.value)
        if port == "state.exp_avg":
            return optimizers.moment(before, given, float(hyper["beta1"]), roundoff)
        square = optimizers.squared(given)
        return optimizers.moment(before, square, float(hyper["beta2"]), roundoff)

    def _update(self, event: Event, hyper: Any, part: _Part, roundoff: float) -> Step | None:
        path = event.site.path
        param = self._before(path, "param", part)
        if param is None:
            return None
        if event.op != "SGD":
            moments = [self._given(path, f"state.{n}", part) for n in ("exp_avg", "exp_avg_sq")]
            if moments[0] is None or moments[1] is None:
                return None
            settings = {**hyper, "decoupled": event.op == "AdamW"}
            return optimizers.adam_step(moments[0], moments[1], param, settings, roundoff)
        direction = self._decayed(event, hyper, part, roundoff)
        buffer = self._given(path, "state.momentum_buffer", part)
        if direction is None or (hyper.get("momentum") and buffer is None):
            return None
        if hyper.get("momentum") and buffer is not None:
            if hyper.get("nesterov"):
                direction = optimizers.ahead(direction, buffer, hyper, roundoff)
            else:
                direction = Step(buffer, np.zeros_like(buffer))
        return optimizers.sgd_step(direction, param, hyper, roundoff)

    def _decayed(self, event: Event, hyper: Any, part: _Part, roundoff: float) -> Step | None:
        """The gradient, with weight decay where that is coupled."""
        grad = self._given(event.site.path, "grad", part)
        param = self._before(event.site.path, "param", part)
        if grad is None or (param is None and hyper.get("weight_decay")):
            return None
        if param is None:
            param = np.zeros_like(grad)
        return optimizers.decayed(grad, param, hyper, roundoff)

    def _hyper(self, path: str) -> Mapping[str, Any] | None:
        event = self._now.get((path, "hyper"))
        value = event.value if event is not None else None
        if not isinstance(value, Mapping) or "lr" not in value:
            return None
        return None if any(value.get(name) for name in _UNKNOWN) else value

    def _given(self, path: str, port: str, part: _Part) -> Floats | None:
        return self._read(self._now.get((path, port)), part)

    def _before(self, path: str, port: str, part: _Part) -> Floats | None:
        return self._read(self._history.at(path, port), part)

    def _sum(self, events: Sequence[Event], part: _Part) -> Floats | None:
        arrays = [self._read(event, part) for event in events]
        if not arrays or any(array is None for array in arrays):
            return None
        total: Floats = np.sum(np.stack([a for a in arrays if a is not None]), axis=0)
        return total

    def _read(self, event: Event | None, part: _Part) -> Floats | None:
        if event is None or event.payload is None:
            return None
        array = self._trace.array(event)
        picked: Floats = (array if part is None else array.reshape(-1)[part]).astype(np.float64)
        return picked


class Updates:
    """Rules on the pairs of the optimizer stage of one step.

    Args:
        histories: Of both sides; the step's own loaded values are in them already.
    """

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        events: tuple[Sequence[Event], Sequence[Event]],
        histories: tuple[History, History],
    ) -> None:
        self._sides = tuple(_Side(*given) for given in zip(traces, events, histories, strict=True))

    def rule(self, pair: Pair, values: Values, *, spot: bool = False) -> Finding | None:
        """Rules on a pair, or returns None where one side cannot be recomputed, or neither holds.

        Args:
            values: Both payloads, finite, in the baseline's layout.
            spot: Nothing looks wrong: look at a part of the elements, and return None if they are
                in order.
        """
        if spot and pair.layout == "same" and values[0].size > _SAMPLE:
            part = np.linspace(0, values[0].size - 1, _SAMPLE).astype(np.intp)
            few = values[0].reshape(-1)[part], values[1].reshape(-1)[part]
            found = self._rule(pair, few, part)
            if found is None or found.within:
                return None
        return self._rule(pair, values, None)

    def _rule(self, pair: Pair, values: Values, part: _Part) -> Finding | None:
        steps = [
            side.expected(event, part)
            for side, event in zip(self._sides, (pair.baseline, pair.target), strict=True)
        ]
        if steps[0] is None or steps[1] is None:
            return None
        if pair.layout == "transposed":
            steps[1] = Step(steps[1].value.T, steps[1].spread.T)
        if any(step.value.shape != v.shape for step, v in zip(steps, values, strict=True) if step):
            return None
        sides = [
            held(value, step.value, step.spread)
            for value, step in zip(values, steps, strict=True)
            if step is not None
        ]
        ruling = finding(sides[0], sides[1], _derivation(pair.baseline))
        if ruling is not None and ruling.within and self._is_told_otherwise(pair):
            return None  # each does what it was told, which is no excuse for the difference
        return ruling

    def _is_told_otherwise(self, pair: Pair) -> bool:
        """Whether the two sides use other optimizers, or clip to another norm."""
        limits = self._sides[0].limits != self._sides[1].limits
        return pair.baseline.op != pair.target.op or (pair.baseline.site.port == "grad" and limits)


def _derivation(event: Event) -> str:
    if event.site.path == CLIP:
        return "norm of each side's own gradients"
    if event.site.port == "grad":
        return "each side's own gradients, summed and clipped"
    return f"{event.op} formula on each side's own state"
