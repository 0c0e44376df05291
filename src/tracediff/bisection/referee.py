"""The referee: recomputes both sides of a pair in float64 and says what rounding does not explain.

The test is on the **explained difference**. With F the exact operation, each side's own recorded
inputs and parameters, and the baseline's settings on both sides,

    (out_A - out_B) - (F(in_A) - F(in_B))

is what the operation itself added to the difference. In a correct pair it is rounding alone, held
to the spread that the replayer derives; how far the inputs are apart does not matter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff import stacks
from tracediff.compare import settings as settings_of
from tracediff.events import Event, Pair
from tracediff.replaying import Call, Floats, Replayed, Replayer
from tracediff.trace import Trace
from tracediff.verdict import Bound

_LARGEST: Final = 6.0
"""Spreads that no element exceeds by chance: once in 1e9 for normal errors."""

_TYPICAL: Final = 2.0
"""Spreads that the root mean square of many elements stays below: 1 by derivation."""

_GLOBAL: Final = ("config.", "torch.", "mlx.", "operand_roundoff")
"""Settings that are not a module's own."""

_PRECISIONS: Final = {"high": 2.0**-11, "medium": 2.0**-8}
"""Unit roundoff of what torch cuts float32 operands to on a GPU: TF32 and bfloat16."""


_FEW: Final = 8
"""Rows of a costly operation that are looked at where nothing looks wrong."""

_Place = tuple[str, str, int]
_Calls = tuple[Call, Call]
_Values = tuple[NDArray[Any], NDArray[Any]]
_Counts = NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the referee found.

    Attributes:
        within: Whether inputs, parameters and rounding explain the difference.
        bound: What they explain, relative to the baseline.
        blame: baseline, target, both or undecided.
        evidence: Figures for the report: each side's distance to the reference.
        note: One sentence for the report, or "".
    """

    within: bool
    bound: Bound
    blame: str = "undecided"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


class Memory:
    """Parameters and settings of one side, as they stand before a step."""

    def __init__(self) -> None:
        self._params: dict[str, dict[str, Event]] = defaultdict(dict)
        self._aliases: dict[str, Sequence[str]] = {}
        self._settings: dict[str, dict[str, Any]] = defaultdict(dict)
        self._configuration: dict[str, Any] = {}

    def begin(self, events: Iterable[Event]) -> None:
        """Takes in what a step finds: parameters as loaded, and settings."""
        for event in events:
            if event.site.phase == "loading" and event.site.port == "param":
                self._aliases[event.site.path] = event.attributes.get("aliases", ())
                self._remember(event)
            elif event.site.phase == "environment":
                self._remember_setting(event.site.path, event.value)

    def finish(self, events: Iterable[Event]) -> None:
        """Takes in what a step leaves: updated parameters."""
        for event in events:
            if event.site.phase == "optimizer" and event.site.port == "param":
                self._remember(event)

    def params(self, path: str) -> Mapping[str, Event]:
        return self._params.get(path, {})

    def settings(self, path: str) -> dict[str, Any]:
        return self._configuration | self._settings.get(path, {})

    def _remember(self, event: Event) -> None:
        for path in (event.site.path, *self._aliases.get(event.site.path, ())):
            for owner, name in _owners(path):
                self._params[owner][name] = event

    def _remember_setting(self, path: str, value: Any) -> None:
        if path.startswith(("config.", "torch.", "mlx.")):
            self._configuration[path] = value
        for owner, name in _owners(path):
            self._settings[owner][name] = value


class Referee:
    """Rules on the pairs of one step.

    Args:
        memory: Of both sides; the step's own parameters and settings are in it already.
    """

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        events: tuple[Sequence[Event], Sequence[Event]],
        memory: tuple[Memory, Memory],
    ) -> None:
        self._traces = traces
        self._memory = memory
        self._inputs: tuple[dict[_Place, list[Event]], dict[_Place, list[Event]]] = ({}, {})
        for side, found in zip(self._inputs, events, strict=True):
            for event in found:
                if event.site.port == "labels" or event.site.port.startswith("in"):
                    side.setdefault(_place(event), []).append(event)

    def knows(self, pair: Pair) -> bool:
        """Whether it may be worth asking: an output of an operation that both sides name."""
        replayer = _reference()
        return (
            pair.baseline.site.port == "out"
            and pair.baseline.site.phase in ("forward", "loss")
            and replayer.supports(pair.baseline.op)
            and replayer.supports(pair.target.op)
        )

    def rule(
        self,
        pair: Pair,
        values: _Values,
        counts: _Counts = None,
        *,
        spot: bool = False,
    ) -> Ruling | None:
        """Rules on a pair of outputs, or returns None where it cannot be recomputed.

        Nor is it ruled on where the formula describes neither side: where it is further from both
        of them than they are from each other, they compute something else than it does.

        Args:
            values: Both payloads, finite, in the baseline's layout.
            counts: False where an element is padding, broadcastable to the shape.
            spot: Nothing looks wrong: look at a few rows of a costly operation, and return None
                if they are in order.
        """
        calls = self._call(0, pair.baseline), self._call(1, pair.target)
        if calls[0] is None or calls[1] is None:
            return None
        found = calls[0], calls[1]
        if self._have_equal_params(pair):
            found = found[0], replace(found[1], params=found[0].params)
        if spot and _reference().is_by_rows(pair.baseline.op):
            few = _few_rows(found, values, counts)
            if few is not None and not _is_suspicious(*few):
                return None
        case = _case(found, values, counts)
        if case is None:
            return None
        ratio = case.ratio
        bound = Bound(rel_l2=case.explained(ratio), derivation=case.derivation)
        if ratio <= 1:
            return Ruling(True, bound)
        return _blame(found, values, counts, bound)

    def _have_equal_params(self, pair: Pair) -> bool:
        a, b = (
            memory.params(event.site.path)
            for memory, event in zip(self._memory, (pair.baseline, pair.target), strict=True)
        )
        return a.keys() == b.keys() and all(
            (a[name].digest, a[name].dtype) == (b[name].digest, b[name].dtype) for name in a
        )

    def _call(self, side: int, event: Event) -> Call | None:
        """One side's call with everything recorded of it, or None where a payload is missing."""
        trace, memory = self._traces[side], self._memory[side]
        inputs = self._inputs[side].get(_place(event), [])
        params = memory.params(event.site.path)
        if any(e.payload is None for e in (*inputs, *params.values())):
            return None
        settings = memory.settings(event.site.path) | dict(event.attributes)
        settings["operand_roundoff"] = _operand_roundoff(settings, event.dtype)
        return Call(
            op=event.op,
            inputs={e.site.port: trace.array(e) for e in inputs},
            params={name: trace.array(e) for name, e in params.items()},
            settings=_reference().resolve(event.op, settings),
            dtype=event.dtype,
        )


class _Case:
    """Both outputs and both recomputed ones, flat, over the elements that count."""

    def __init__(
        self,
        values: _Values,
        replayed: tuple[Replayed, Replayed],
        counts: _Counts,
    ) -> None:
        self.derivation = replayed[0].derivation
        shape = values[0].shape
        self._keep = None if counts is None else np.broadcast_to(counts, shape)
        self._rows = max(1, self._count_rows(shape))
        self._out = [self._counted(v.astype(np.float64)) for v in values]
        self._reference = [self._counted(r.value) for r in replayed]
        spreads = [self._counted(r.spread) for r in replayed]
        self._spread = np.hypot(*spreads)
        self._unexplained = (self._out[0] - self._out[1]) - (
            self._reference[0] - self._reference[1]
        )

    def _counted(self, array: Floats) -> Floats:
        return array.reshape(-1) if self._keep is None else array[self._keep]

    def _count_rows(self, shape: tuple[int, ...]) -> int:
        if self._keep is None or not shape:
            return math.prod(shape[:-1])
        return int(self._keep.any(axis=-1).sum())

    @property
    def ratio(self) -> float:
        """The unexplained difference over what rounding allows, by element and in the mean."""
        return _ratio(self._unexplained, self._spread, self._rows)

    @property
    def is_described(self) -> bool:
        apart = _norm(self._out[0] - self._out[1])
        allowed = max(apart, _LARGEST * _norm(self._spread))
        distances = (_norm(o - r) for o, r in zip(self._out, self._reference, strict=True))
        return min(distances) <= allowed

    def explained(self, ratio: float) -> float:
        """What inputs and rounding explain, relative to the baseline's norm.

        Where a single element gives the case away and the norm does not, the error is told as
        `ratio` times the bound all the same.
        """
        scale = _norm(self._out[0]) or 1.0
        inputs = _norm(self._reference[0] - self._reference[1])
        rounding = _limit(self._rows) * _norm(self._spread)
        total = (inputs + rounding) / scale
        apart = _norm(self._out[0] - self._out[1]) / scale
        return min(total, apart / ratio) if ratio > 1 else total


def _case(calls: _Calls, values: _Values, counts: _Counts) -> _Case | None:
    """Both sides recomputed as the baseline's operation with its settings, or None where the
    formula does not describe them.

    A product is of each side's own kind: stacks lay weights out differently (Conv1D and Linear).
    """
    if not all(_reference().is_by_rows(call.op) for call in calls):
        calls = calls[0], replace(calls[1], op=calls[0].op)
    shared = {**calls[1].settings, **calls[0].settings}
    a, b = _replay_together(calls, shared) or [_replay(call, shared) for call in calls]
    shape = values[0].shape
    if a is None or b is None or a.value.shape != shape or b.value.shape != shape:
        return None
    case = _Case(values, (a, b), counts)
    return case if case.is_described else None


def _few_rows(calls: _Calls, values: _Values, counts: _Counts) -> tuple[_Calls, _Values] | None:
    """The same calls on a few rows spread over those that count; None where rows do not match."""
    shape = values[0].shape
    if any(call.inputs.keys() != {"in"} for call in calls):
        return None
    if any(call.inputs["in"].shape[:-1] != shape[:-1] for call in calls):
        return None
    rows = np.arange(math.prod(shape[:-1]))
    if counts is not None:
        rows = rows[np.broadcast_to(counts, shape).any(axis=-1).reshape(-1)]
    if not rows.size:
        return None
    rows = rows[np.unique(np.linspace(0, rows.size - 1, _FEW).astype(int))]

    def pick(array: NDArray[Any]) -> NDArray[Any]:
        picked: NDArray[Any] = array.reshape(-1, array.shape[-1])[rows]
        return picked

    a, b = (replace(call, inputs={"in": pick(call.inputs["in"])}) for call in calls)
    return (a, b), (pick(values[0]), pick(values[1]))


def _is_suspicious(calls: _Calls, values: _Values) -> bool:
    case = _case(calls, values, None)
    return case is not None and case.ratio > 1


def _blame(calls: _Calls, values: _Values, counts: _Counts, bound: Bound) -> Ruling:
    """Which side is further from the reference, each by its own inputs and settings, than rounding
    takes it."""
    wrong, evidence = [], {}
    for name, value, call in zip(("baseline", "target"), values, calls, strict=True):
        replayed = _replay(call, call.settings)
        if replayed is None:
            return Ruling(False, bound)
        keep = None if counts is None else np.broadcast_to(counts, value.shape)
        out, exact, spread = (
            array.reshape(-1) if keep is None else array[keep]
            for array in (value.astype(np.float64), replayed.value, replayed.spread)
        )
        rows = max(1, out.size // max(1, value.shape[-1] if value.ndim else 1))
        if _ratio(out - exact, spread, rows) > 1:
            wrong.append(name)
        scale = _norm(exact) or 1.0
        evidence[f"distance_{name}"] = _norm(out - exact) / scale
    blame = "both" if len(wrong) == 2 else wrong[0] if wrong else "undecided"
    note = ""
    differing = _differing(calls[0].settings, calls[1].settings)
    if not wrong and differing:
        what = ", ".join(f"{name} {a!r} against {b!r}" for name, (a, b) in differing.items())
        note = f"each side follows its own setting ({what})"
    return Ruling(False, bound, blame, evidence, note)


def _ratio(error: Floats, spread: Floats, rows: int) -> float:
    """An error over what rounding allows it, by element and in the mean."""
    if not error.size:
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        largest = np.nanmax(np.where(error == 0, 0.0, np.abs(error) / spread)) / _LARGEST
    scale = _norm(spread)
    mean = _norm(error) / (_limit(rows) * scale) if scale else 0.0
    return max(float(largest), mean)


def _norm(x: Floats) -> float:
    """Not by BLAS, which would wake all its threads for every small array."""
    return math.sqrt(float(np.einsum("i,i->", x, x)))


def _limit(rows: int) -> float:
    """How far the root mean square may be above the spread: errors of a row have a common part (a
    norm's divisor), so it is the number of rows that averages them."""
    return _TYPICAL + (_LARGEST - _TYPICAL) / math.sqrt(rows)


def _replay(call: Call, settings: Mapping[str, Any]) -> Replayed | None:
    cut = call.settings["operand_roundoff"]
    return _reference().replay(replace(call, settings={**settings, "operand_roundoff": cut}))


def _replay_together(
    calls: _Calls, settings: Mapping[str, Any]
) -> tuple[Replayed, Replayed] | None:
    """Both calls as one of twice the size, where they differ in their input alone: parameters are
    then widened and squared once."""
    a, b = calls
    alike = (a.op, a.dtype) == (b.op, b.dtype) and a.params is b.params
    cut = a.settings["operand_roundoff"] == b.settings["operand_roundoff"]
    if not (alike and cut and a.inputs.keys() == b.inputs.keys() == {"in"}):
        return None
    x, y = a.inputs["in"], b.inputs["in"]
    if x.shape != y.shape or x.dtype != y.dtype:
        return None
    both = _replay(replace(a, inputs={"in": np.stack([x, y])}), settings)
    if both is None:
        return None
    first, second = (replace(both, value=both.value[i], spread=both.spread[i]) for i in (0, 1))
    return first, second


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of the module itself that differ; those of the configuration act through them."""
    found = settings_of.differing(a, b)
    return {name: pair for name, pair in found.items() if not name.startswith(_GLOBAL)}


def _operand_roundoff(settings: Mapping[str, Any], dtype: str) -> float:
    """Roundoff of the operands of products where the hardware cuts them short, or 0."""
    if dtype != "float32" or not settings.get("torch.cuda_available"):
        return 0.0
    allowed = _PRECISIONS["high"] if settings.get("torch.cuda.matmul.allow_tf32") else 0.0
    precision = str(settings.get("torch.float32_matmul_precision"))
    return max(allowed, _PRECISIONS.get(precision, 0.0))


def _place(event: Event) -> _Place:
    return event.site.phase, event.site.path, event.site.call


def _owners(path: str) -> Iterable[tuple[str, str]]:
    """`a.b.c` -> (a.b, c), (a, b.c)."""
    owner, _, name = path.rpartition(".")
    while owner:
        yield owner, name
        owner, _, last = owner.rpartition(".")
        name = f"{last}.{name}"


@cache
def _reference() -> Replayer:
    return stacks.load_replayer("reference")()
