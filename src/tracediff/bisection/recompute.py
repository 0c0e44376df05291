"""Calls recomputed by the reference: whole, on a few rows, or at perturbed inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff import stacks
from tracediff.bisection.trial import Counts, Trial, Values, norm, side
from tracediff.compare.places import evenly
from tracediff.replaying import Call, Floats, Replayed, Replayer

Calls = tuple[Call, Call]

_FEW: Final = 8
"""Rows of a costly operation that are looked at where nothing looks wrong."""

_KEPT: Final = 1 << 22
"""Random numbers that are kept for a second perturbation of the same inputs."""

_SMALL: Final = (1 << 20) - 1
_LEAST: Final = (1 << 16) - 1
"""Random numbers that are kept for other inputs, at most, and drawn for that, at least."""

_Name = tuple[str, str]

_PRECISIONS: Final = {"high": 2.0**-11, "medium": 2.0**-8}
"""Unit roundoff of what torch cuts float32 operands to on a GPU: TF32 and bfloat16."""


@cache
def reference() -> Replayer:
    return stacks.load_replayer("reference")()


def replay(call: Call, settings: Mapping[str, Any]) -> Replayed | None:
    """The call with other settings; how the hardware cuts its operands stays its own."""
    cut = call.settings["operand_roundoff"]
    return reference().replay(replace(call, settings={**settings, "operand_roundoff": cut}))


def operand_roundoff(settings: Mapping[str, Any], dtype: str) -> float:
    """Roundoff of the operands of products where the hardware cuts them short, or 0."""
    if dtype != "float32" or not settings.get("torch.cuda_available"):
        return 0.0
    allowed = _PRECISIONS["high"] if settings.get("torch.cuda.matmul.allow_tf32") else 0.0
    precision = str(settings.get("torch.float32_matmul_precision"))
    return max(allowed, _PRECISIONS.get(precision, 0.0))


def trial_of(calls: Calls, values: Values, counts: Counts) -> tuple[Trial, str] | None:
    """Both sides recomputed as the baseline's operation with its settings, and the derivation, or
    None where the formula does not describe them.

    A product is of each side's own kind: stacks lay weights out differently (Conv1D and Linear).
    """
    if not all(reference().is_by_rows(call.op) for call in calls):
        calls = calls[0], replace(calls[1], op=calls[0].op)
    shared = {**calls[1].settings, **calls[0].settings}
    a, b = _together(calls, shared) or [replay(call, shared) for call in calls]
    shape = values[0].shape
    if a is None or b is None or a.value.shape != shape or b.value.shape != shape:
        return None
    trial = Trial((side(values[0], a, counts), side(values[1], b, counts)))
    return (trial, a.derivation) if trial.is_described else None


def on_few_rows(calls: Calls, values: Values, counts: Counts) -> tuple[Calls, Values] | None:
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
    rows = rows[evenly(rows.size, _FEW)]

    def pick(array: NDArray[Any]) -> NDArray[Any]:
        picked: NDArray[Any] = array.reshape(-1, array.shape[-1])[rows]
        return picked

    a, b = (replace(call, inputs={"in": pick(call.inputs["in"])}) for call in calls)
    return (a, b), (pick(values[0]), pick(values[1]))


def perturbed(call: Call, sizes: Sequence[Mapping[str, float]]) -> list[float | None]:
    """How far the output moves, relative to its norm, where the inputs move by so much.

    The direction is drawn at random, always the same: rounding errors have none.

    Args:
        sizes: For each answer, port -> relative L2 error of the input; "" for the parameters.
    """
    call = replace(call, value_only=True)
    before = replay(call, call.settings)
    if before is None:
        return [None] * len(sizes)
    scale = norm(before.value.reshape(-1))
    given = {
        **{("in", n): a for n, a in call.inputs.items()},
        **{("param", n): a for n, a in call.params.items()},
    }
    found: list[float | None] = []
    drawn: dict[tuple[_Name, ...], list[Floats]] = {}
    scales: dict[_Name, float] = {}
    for errors in sizes:
        moves = {name: size for name, a in given.items() if (size := _size(name, a, errors))}
        if not moves:
            found.append(0.0)
            continue
        moved = dict(given)
        names = tuple(moves)
        directions = drawn.get(names) or _directions([given[name] for name in names])
        if sum(direction.size for direction in directions) <= _KEPT:
            drawn[names] = directions
        for name, direction in zip(names, directions, strict=True):
            wide = given[name].astype(np.float64)
            if name not in scales:
                scales[name] = _root_mean_square(wide)
            moved[name] = wide + moves[name] * scales[name] * direction
        after = replay(
            replace(
                call,
                inputs={name: moved["in", name] for name in call.inputs},
                params={name: moved["param", name] for name in call.params},
            ),
            call.settings,
        )
        if after is None:
            found.append(None)
        else:
            found.append(norm((after.value - before.value).reshape(-1)) / scale if scale else 0.0)
    return found


def _size(name: _Name, array: NDArray[Any], errors: Mapping[str, float]) -> float:
    """How far an input (by its port) or a parameter moves, relative to its norm."""
    if array.dtype.kind in "iub" or name == ("in", "mask"):
        return 0.0
    return min(errors.get(name[1] if name[0] == "in" else "", 0.0), 1.0)


def _directions(arrays: Sequence[NDArray[Any]]) -> list[Floats]:
    """Random numbers of the shapes of some arrays, the same in every call."""
    total = sum(array.size for array in arrays)
    small = total <= _SMALL
    drawn = _drawn_before(1 << max(_LEAST, total).bit_length()) if small else _drawn(total)
    ends = list(accumulate((array.size for array in arrays), initial=0))
    return [
        drawn[start:end].reshape(array.shape)
        for array, (start, end) in zip(arrays, pairwise(ends), strict=True)
    ]


def _drawn(count: int) -> Floats:
    """The first numbers of a sequence that is always the same."""
    return np.random.default_rng(0).standard_normal(count)


_drawn_before = lru_cache(maxsize=4)(_drawn)


def _root_mean_square(array: Floats) -> float:
    """Of the elements that are finite."""
    finite = np.isfinite(array)
    some = array.reshape(-1) if finite.all() else array[finite]
    return math.sqrt(float(np.mean(np.square(some)))) if some.size else 0.0


def _together(calls: Calls, settings: Mapping[str, Any]) -> tuple[Replayed, Replayed] | None:
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
    both = replay(replace(a, inputs={"in": np.stack([x, y])}), settings)
    if both is None:
        return None
    first, second = (_part(both, index) for index in (0, 1))
    return first, second


def _part(both: Replayed, index: int) -> Replayed:
    def pick(array: Floats) -> Floats:
        part: Floats = array[index]
        return part

    return Replayed(
        pick(both.value),
        pick(both.spread),
        both.derivation,
        None if both.reach is None else pick(both.reach),
    )
