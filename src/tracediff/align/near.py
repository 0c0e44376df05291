"""Pairs the values of one scope whose fingerprints are near, as far as they can be told apart."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from tracediff.align.fingerprints import Fingerprint, Index, distance, fused, norm
from tracediff.align.flow import FEW, Value
from tracediff.align.matching import Key, Matching, grouped

_CANDIDATES: Final = 64
"""Different fingerprints near one value that are looked at."""

_CLEARLY: Final = 1 / 8
"""A match is the clear one if any other is this much further off."""

_NEARLY: Final = 64.0
"""Times the limit within which a value may still be paired, when the limit is wider."""

_Node = tuple[int, Key]


def apart(a: Value, b: Value) -> float:
    """Distance of the fingerprints of two values."""
    return distance(a.event.fingerprint, b.event.fingerprint)


def pair_near(
    matching: Matching,
    found: tuple[list[Value], list[Value]],
    limit: float,
    label: str,
    scope: str,
) -> None:
    """Pairs the values of a scope whose fingerprints are near, phase by phase."""
    sides = [grouped(values, lambda v: (v.phase,)) for values in found]
    for phase in sides[0].keys() & sides[1].keys():
        for members in _components(sides[0][phase], sides[1][phase], limit):
            for a, b in _resolved(matching, *members):
                if not matching.is_causal(a, b):
                    continue
                inside = a.module == b.module or scope in (a.module, b.module)
                matching.pair(a, b, label if inside else "across")
        for side in (0, 1):
            rest = [[v for v in sides[s][phase] if v not in matching.partner[s]] for s in (0, 1)]
            for whole, half in fused_halves(rest[side], rest[1 - side], limit):
                a, b = (half, whole) if side else (whole, half)
                matching.pair(a, b, label, "half")


def _components(
    values_a: Sequence[Value], values_b: Sequence[Value], limit: float
) -> Iterator[tuple[list[Value], list[Value]]]:
    """Sets of values that are near each other, in the order of execution.

    Equal fingerprints are looked up once, so masks and constants that repeat cost nothing.
    """
    group_a = grouped(values_a, lambda v: (v.event.fingerprint,))
    group_b = grouped(values_b, lambda v: (v.event.fingerprint,))
    keys_b = list(group_b)
    index = Index([_fingerprint(key) for key in keys_b])
    parts = _Parts()
    for key in group_a:
        for _, place in islice(index.near(_fingerprint(key), limit), _CANDIDATES):
            parts.join((0, key), (1, keys_b[place]))
    for part in parts.all():
        members: tuple[list[Value], list[Value]] = ([], [])
        for side, key in part:
            members[side].extend((group_a, group_b)[side][key])
        for each in members:
            each.sort(key=lambda v: v.index)
        yield members


class _Parts:
    """Nodes that were joined, directly or through others (disjoint sets)."""

    def __init__(self) -> None:
        self._above: dict[_Node, _Node] = {}

    def join(self, one: _Node, other: _Node) -> None:
        self._above.setdefault(one, one)
        self._above.setdefault(other, other)
        self._above[self._top(one)] = self._top(other)

    def all(self) -> list[list[_Node]]:
        parts: dict[_Node, list[_Node]] = defaultdict(list)
        for node in self._above:
            parts[self._top(node)].append(node)
        return list(parts.values())

    def _top(self, node: _Node) -> _Node:
        while self._above[node] is not node:
            self._above[node] = self._above[self._above[node]]
            node = self._above[node]
        return node


def _fingerprint(key: Key) -> Fingerprint:
    return key[0]  # type: ignore[return-value]


def _resolved(
    matching: Matching, values_a: list[Value], values_b: list[Value]
) -> Iterator[tuple[Value, Value]]:
    """Pairs of values that are all near each other, as far as they can be told apart."""
    if values_a[0].count < FEW:
        yield from _by_inputs(matching, values_a, values_b)
        return
    if len(values_a) == len(values_b) == 1:
        yield values_a[0], values_b[0]
        return
    rest_a, rest_b = list(values_a), list(values_b)
    steps: Sequence[Callable[[list[Value], list[Value]], Iterator[tuple[Value, Value]]]] = (
        _clear,
        lambda x, y: _alike(x, y, lambda v: (v.module, v.name)),
        lambda x, y: _alike(x, y, lambda v: (v.module,)),
        lambda x, y: _by_inputs(matching, x, y),
        _in_order,
    )
    for step in steps:
        found = sorted(
            step(rest_a, rest_b), key=lambda pair: apart(*pair)
        )  # a wrong pair stands in the way
        yield from found
        gone = {value for pair in found for value in pair}
        rest_a = [value for value in rest_a if value not in gone]
        rest_b = [value for value in rest_b if value not in gone]
        if not rest_a or not rest_b:
            return


def _clear(values_a: Sequence[Value], values_b: Sequence[Value]) -> Iterator[tuple[Value, Value]]:
    """Pairs that are each other's nearest by far."""
    if len(values_a) * len(values_b) > _CANDIDATES**2:
        return
    for a in values_a:
        b, clear = _nearest(a, values_b)
        if clear and _nearest(b, values_a) == (a, True):
            yield a, b


def _nearest(value: Value, others: Sequence[Value]) -> tuple[Value, bool]:
    ranked = sorted(
        (distance(value.event.fingerprint, other.event.fingerprint), i)
        for i, other in enumerate(others)
    )
    clear = len(ranked) == 1 or ranked[0][0] < _CLEARLY * ranked[1][0]
    return others[ranked[0][1]], clear


def _alike(
    values_a: Sequence[Value], values_b: Sequence[Value], key: Callable[[Value], Key]
) -> Iterator[tuple[Value, Value]]:
    """As many of one key on both sides, in order."""
    groups = grouped(values_a, key)
    for name, found in grouped(values_b, key).items():
        partners = groups.get(name, [])
        if len(partners) == len(found):
            yield from zip(partners, found, strict=True)


def _by_inputs(
    matching: Matching, values_a: Sequence[Value], values_b: Sequence[Value]
) -> Iterator[tuple[Value, Value]]:
    """Pairs that are computed from partners and stand alone in that, or share name and module."""
    if len(values_a) * len(values_b) > _CANDIDATES**2:
        return
    for b in values_b:
        fits = [a for a in values_a if matching.agree_on_inputs(a, b)]
        if len(fits) == 1 and sum(matching.agree_on_inputs(fits[0], o) for o in values_b) == 1:
            yield fits[0], b


def _in_order(
    values_a: Sequence[Value], values_b: Sequence[Value]
) -> Iterator[tuple[Value, Value]]:
    """As many on both sides, in the order of execution."""
    if len(values_a) == len(values_b):
        yield from zip(values_a, values_b, strict=True)


def fused_halves(
    wholes: Sequence[Value], halves: Sequence[Value], limit: float
) -> Iterator[tuple[Value, Value]]:
    """Values of one side that are two of the other side by side, with each of the two: a fused
    parameter, its gradient and its update. Not those that may be a single one of the other side,
    whose halves have between them its fingerprint."""
    by_count = grouped(halves, lambda v: (v.count, v.is_leaf))
    for whole in wholes:
        found = by_count.get((whole.count / 2, whole.is_leaf), [])
        wanted = whole.event.fingerprint
        if not norm(wanted) or whole.count < 2 * FEW or not 2 <= len(found) <= _CANDIDATES:
            continue
        alike = by_count.get((whole.count, whole.is_leaf), ())
        if any(distance(wanted, v.event.fingerprint) <= _NEARLY * limit for v in alike):
            continue
        for half in _halves_of(wanted, found, limit):
            yield whole, half
            found.remove(half)


def _halves_of(wanted: Fingerprint, found: Sequence[Value], limit: float) -> Sequence[Value]:
    """The first two values that have a fingerprint between them, or none.

    The squares of their norms add up, so few of the others can belong to the first.
    """
    low, high = ((1 + sign * 2 * limit) * norm(wanted) for sign in (-1, 1))
    ranked = sorted((norm(v.event.fingerprint), place) for place, v in enumerate(found))
    for place, one in enumerate(found):
        own = norm(one.event.fingerprint)
        if own > high:
            continue
        start = bisect_left(ranked, (math.sqrt(max(low**2 - own**2, 0.0)),))
        stop = bisect_left(ranked, (math.sqrt(high**2 - own**2), math.inf))
        for other in sorted(other for _, other in ranked[start:stop] if other > place):
            both = fused(one.event.fingerprint, found[other].event.fingerprint)
            if distance(wanted, both) <= limit:
                return one, found[other]
    return ()
