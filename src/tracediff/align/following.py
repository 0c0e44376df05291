"""The pass that follows the flow of data: what is computed from paired values."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from tracediff.align.fingerprints import distance, norm, rescaled
from tracediff.align.flow import FEW, Value
from tracediff.align.matching import Matching

_REACH: Final = 64
"""Unpaired values that are walked through, up to the paired ones or down from them."""

_CLEARLY: Final = 1 / 2
"""The nearest candidate is taken if any other is this much further off."""

_KINDS: Final[Mapping[str, frozenset[str]]] = {
    "exponential": frozenset(
        {
            *("exp", "exp2", "expm1", "log", "log1p", "logaddexp", "tanh", "erf", "sigmoid"),
            *("softmax", "log_softmax", "logsumexp", "softplus", "silu", "gelu", "swiglu"),
            *("mish", "elu", "attention"),
        }
    ),
    "root": frozenset({"sqrt", "rsqrt", "norm", "std", "rms_norm", "layer_norm"}),
    "product": frozenset(
        {"matmul", "addmm", "einsum", "convolution", "gather_matmul", "attention"}
    ),
}
"""What a chain of operations cannot do without if it is to equal one of these."""

_LIKE: Final = 0.2
"""Largest distance of two values that are paired by their fingerprints alone. Two values of one
meaning may be as far apart as an error is large; values of different meaning are further."""


def pair_by_flow(matching: Matching, limit: float) -> None:
    """Pairs each value, in the order of execution, with one that is computed from the partners of
    what it was computed from itself.

    Args:
        limit: Distance that values of a few elements have to be within.
    """
    for value in matching.sides[1]:
        if value in matching.partner[1] or value.is_leaf:
            continue
        frontier = paired_ancestors(value, matching.partner[1])
        candidates = _candidates(matching, value, frontier)
        if value.count < FEW:
            own = value.event.fingerprint
            candidates = [c for c in candidates if distance(c.event.fingerprint, own) <= limit]
        near = candidates if _is_disturbed(frontier, matching, limit) else []
        partner = _choose(value, candidates, _of_one_kind(matching, value, near))
        if partner is not None:
            matching.pair(partner, value, "flow")


def paired_ancestors(value: Value, partner: dict[Value, Value]) -> list[Value]:
    """The nearest paired values that a value was computed from, through unpaired ones."""
    found, seen, waiting = [], {value}, deque(value.inputs)
    while waiting and len(seen) < _REACH:
        each = waiting.popleft()
        if each in seen:
            continue
        seen.add(each)
        if each in partner:
            found.append(each)
        else:
            waiting.extend(each.inputs)
    return found


def _candidates(matching: Matching, value: Value, frontier: list[Value]) -> list[Value]:
    """Unpaired values of the same size that are computed from the partners, through unpaired ones.

    Parameters and constants reach everywhere; only what was computed itself is followed, where
    there is any.
    """
    computed = [each for each in frontier if not each.is_leaf] or frontier
    found: list[Value] = []
    seen: set[Value] = set()
    waiting = deque(u for each in computed for u in matching.partner[1][each].users)
    while waiting and len(seen) < _REACH:
        each = waiting.popleft()
        if each in seen or each in matching.partner[0]:
            continue
        seen.add(each)
        waiting.extend(each.users)
        if each.count == value.count and each.phase == value.phase:
            ancestors = paired_ancestors(each, matching.partner[0])
            theirs = {matching.partner[0][x] for x in ancestors}
            if all(x in theirs for x in computed):
                found.append(each)
    return sorted(found, key=lambda v: v.index)


def _is_disturbed(frontier: list[Value], matching: Matching, limit: float) -> bool:
    """Whether the values that one is computed from are apart themselves."""
    return any(
        distance(each.event.fingerprint, matching.partner[1][each].event.fingerprint) > limit
        for each in frontier
    )


def _of_one_kind(matching: Matching, value: Value, candidates: list[Value]) -> list[Value]:
    """Candidates that are made of the same kinds of functions as a value: logits less their largest
    are near their logarithmic softmax, and are something else."""
    if value.phase == "backward":  # what a gradient is computed by may not be shown
        return candidates
    kinds = _kinds(value, matching.partner[1])
    return [each for each in candidates if _kinds(each, matching.partner[0]) == kinds]


def _kinds(value: Value, partner: dict[Value, Value]) -> set[str]:
    """Kinds of the functions between a value and the nearest paired ones."""
    found: set[str] = set()
    seen, waiting = {value}, [value]
    while waiting and len(seen) < _REACH:
        each = waiting.pop()
        found |= {kind for kind, names in _KINDS.items() if each.name in names}
        inner = [v for v in each.inputs if v not in partner and v not in seen]
        seen.update(inner)
        waiting.extend(inner)
    return found


def _choose(value: Value, candidates: list[Value], near: list[Value]) -> Value | None:
    """The candidate of the same name, or that which leaves the module as the value does (the last
    operation of a chain that is one operation on the other stack), or by far the nearest.

    Args:
        near: Candidates that may be taken for being the nearest: none where the inputs of the value
            agree, from which the same value would have been nearer than that.
    """
    for alike in (
        [c for c in candidates if c.name == value.name],
        [c for c in candidates if c.module == value.module and _leaves(c) and _leaves(value)],
    ):
        if len(alike) == 1:
            return alike[0]
    ranked = sorted(((_apart(c, value), c.index, c) for c in near), key=lambda r: r[:2])
    if not ranked or ranked[0][0] > _LIKE:
        return None
    clear = len(ranked) == 1 or ranked[0][0] < _CLEARLY * ranked[1][0]
    return ranked[0][2] if clear else None


def _leaves(value: Value) -> bool:
    """Whether nothing but what is outside of its module uses a value in the same stage."""
    users = [user for user in value.users if user.phase == value.phase]
    return bool(users) and all(user.module != value.module for user in users)


def _apart(a: Value, b: Value) -> float:
    """Distance of two fingerprints, a common factor left aside if that brings them nearer."""
    x, y = a.event.fingerprint, b.event.fingerprint
    return min(distance(x, y), distance(rescaled(x, norm(y)), y))


def pair_parts(matching: Matching) -> None:
    """Pairs what one side computes on the way to a value with the other side's value, where that is
    computed from the same: `square, mul` before `add` with one `addcmul`.

    Both have to start from the same paired values, so that nothing else can be meant.
    """
    for side in (0, 1):
        partner = matching.partner[side]
        known: set[Value] = set()
        for value in matching.sides[side]:
            if value not in partner or all(x in partner for x in _made_of(value)):
                continue
            inner, starts = _way_to(matching, side, value)
            new = [x for x in inner if x not in known]
            if new and starts == _way_to(matching, 1 - side, partner[value])[1]:
                known.update(new)
                for each in new:
                    pair = (each, partner[value]) if side == 0 else (partner[value], each)
                    matching.is_part(*pair, "parts")


def _way_to(matching: Matching, side: int, value: Value) -> tuple[list[Value], set[Value]]:
    """The unpaired values that one is computed through, and the paired ones that it starts from, as
    the baseline's; both halves of a value as the same one."""
    partner, back = matching.partner[side], matching.partner[1]
    inner, starts, waiting = [], set(), _made_of(value)
    seen = {value}
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        is_zero = not norm(each.event.fingerprint)  # an optimizer's state before the first update
        if each in partner:
            starts |= set() if is_zero else {back[each] if side else back[partner[each]]}
        elif not each.is_leaf:
            inner.append(each)
            waiting.extend(() if is_zero else each.inputs)
    return inner, starts


def _made_of(value: Value) -> list[Value]:
    return [*value.inputs, *value.zeros]
