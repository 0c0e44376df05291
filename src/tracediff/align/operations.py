"""Pairs the operations of one step of two runs, without needing their names.

Passes in order, each over what the earlier ones left. Those that look at values:

- `rule`: what a user's rules rename onto each other;
- `name`: as many operations of one canonical name in one module, in order, with near fingerprints;
- `fingerprint`: near fingerprints inside the innermost module that both sides have;
- `across`: near fingerprints further apart, up to the whole step.

And, for what follows a divergence, where values no longer tell:

- `module`: what module-level alignment paired, the output of a module being that of an operation;
- `structure`: as many operations of one canonical name and size in one module, in order;
- `flow`: what is computed from paired values, by name, by where it leaves the module, or nearest;
- `pattern`: the place at which the like was paired in another layer;
- `parts`: what one side computes on the way between paired values, with the other side's result.

Values that several others could be are paired by name, order and data flow, or not at all.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, islice
from typing import Final

from tracediff.align.fingerprints import Fingerprint, Index, distance, fused, norm, tolerance
from tracediff.align.flow import FEW, Flow, Value, is_operation
from tracediff.align.following import pair_by_flow, pair_parts
from tracediff.align.matching import Matching, ValuePair
from tracediff.align.names import Rules, canonical, parent
from tracediff.events import ROOT, Event, Pair

_CANDIDATES: Final = 64
"""Different fingerprints near one value that are looked at."""

_CLEARLY: Final = 1 / 8
"""A match is the clear one if any other is this much further off."""

_NUMBER: Final = re.compile(r"\d+")
_Key = tuple[object, ...]
_Node = tuple[int, _Key]


def align_operations(
    baseline: Sequence[Event],
    target: Sequence[Event],
    stacks: tuple[str, str],
    paths: Mapping[str, str] | None = None,
    rules: Rules | None = None,
    modules: Sequence[Pair] = (),
) -> tuple[Flow, Flow, list[ValuePair]]:
    """Pairs the operation events of one step.

    Args:
        baseline, target: Events of one step; those of module level are passed over.
        stacks: Stack of the baseline and of the target.
        paths: Target path -> baseline path of modules, as module-level alignment found them.
        modules: Pairs of module-level events of the step.

    Returns:
        Both sides' values and their pairs, in the order of the baseline's execution.
    """
    rules, known = rules or Rules(), paths or {}
    own, theirs = (
        cache(lambda p: canonical(stacks[0], p)),
        cache(lambda p: _in_baseline_names(p, stacks, known)),
    )
    flows = (
        Flow(_operations(baseline, rules), own),
        Flow(_operations(target, rules), theirs),
    )
    matching = Matching(*flows)
    limit = tolerance({value.event.dtype for flow in flows for value in flow.values})
    if rules.renames:
        _by_rule(matching, rules)
    _by_name(matching, limit, "name")
    _by_fingerprint(matching, limit)
    _by_module(matching, modules)
    _by_name(matching, None, "structure")
    pair_by_flow(matching, limit)
    _by_pattern(matching)
    pair_by_flow(matching, limit)
    pair_parts(matching)
    return *flows, sorted(matching.pairs, key=lambda pair: pair.baseline.index)


def _operations(events: Sequence[Event], rules: Rules) -> list[Event]:
    return [e for e in events if is_operation(e) and rules.ignore_reason(e.site.path) is None]


def _in_baseline_names(path: str, stacks: tuple[str, str], paths: Mapping[str, str]) -> str:
    """A target's module under the baseline's name of its innermost paired module."""
    owner, rest = path, ""
    while owner:
        if owner in paths:
            return canonical(stacks[0], paths[owner] + rest)
        owner, rest = parent(owner), path[len(parent(owner)) :]
    return canonical(stacks[1], path)


# ---- passes ------------------------------------------------------------------------------------


def _grouped(values: Iterable[Value], key: Callable[[Value], _Key]) -> dict[_Key, list[Value]]:
    groups: dict[_Key, list[Value]] = defaultdict(list)
    for value in values:
        groups[key(value)].append(value)
    return groups


def _by_rule(matching: Matching, rules: Rules) -> None:
    """Paths (module and canonical name) that a rule renames onto each other, call by call."""
    named: dict[_Key, Value] = {}
    for value in matching.unpaired(0):
        site = value.event.site
        named[site.phase, rules.rename("baseline", site.path), site.call, site.port] = value
    for value in list(matching.unpaired(1)):
        site = value.event.site
        path = rules.rename("target", site.path)
        partner = named.get((site.phase, path, site.call, site.port))
        if partner is None or partner in matching.partner[0] or partner.count != value.count:
            continue
        if path != site.path or rules.rename("baseline", partner.event.site.path) != path:
            matching.pair(partner, value, "rule")


def _by_name(matching: Matching, limit: float | None, label: str) -> None:
    """As many values of one canonical name and size in one module on both sides, in order.

    With a limit, each pair's fingerprints have to be near as well.
    """

    def key(value: Value) -> _Key:
        port = value.event.site.port
        return value.phase, value.module, value.name, port, value.count, value.event.dtype[:3]

    groups = _grouped(matching.unpaired(0), key)
    for name, found in _grouped(matching.unpaired(1), key).items():
        partners = groups.get(name, [])
        if len(partners) != len(found) or (limit is None and found[0].count < FEW):
            continue
        for a, b in zip(partners, found, strict=True):
            if limit is None or distance(a.event.fingerprint, b.event.fingerprint) <= limit:
                matching.pair(a, b, label)


def _by_fingerprint(matching: Matching, limit: float) -> None:
    """Near fingerprints, from the innermost common module of each value outwards."""
    common = _modules(matching.sides[0]) & _modules(matching.sides[1])
    waiting: dict[str, tuple[list[Value], list[Value]]] = defaultdict(lambda: ([], []))
    for side in (0, 1):
        for value in matching.unpaired(side):
            scope = next(m for m in _outwards(value.module) if m in common)
            waiting[scope][side].append(value)
    innermost = True
    for scope in sorted(common, key=lambda m: (m != "", m.count(".")), reverse=True):
        found = waiting.pop(scope, ([], []))
        label = "fingerprint" if innermost and scope else "across"
        _pair_near(matching, found, limit, label, scope)
        if not scope:
            return
        for side in (0, 1):
            rest = [v for v in found[side] if v not in matching.partner[side]]
            target = waiting[_outer(scope)][side]
            target.extend(rest)
            target.sort(key=lambda v: v.index)


def _modules(values: Iterable[Value]) -> set[str]:
    return {outer for module in {v.module for v in values} for outer in _outwards(module)} | {""}


def _outwards(module: str) -> Iterator[str]:
    """`a.b` -> `a.b`, `a`, the whole step."""
    while module and module != ROOT:
        yield module
        module = parent(module)
    yield ""


def _outer(module: str) -> str:
    return parent(module)


def _pair_near(
    matching: Matching,
    found: tuple[list[Value], list[Value]],
    limit: float,
    label: str,
    scope: str,
) -> None:
    """Pairs the values of a scope whose fingerprints are near, phase by phase."""
    sides = [_grouped(values, lambda v: (v.phase,)) for values in found]
    for phase in sides[0].keys() & sides[1].keys():
        for members in _components(sides[0][phase], sides[1][phase], limit):
            for a, b in _resolved(matching, *members):
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
    group_a = _grouped(values_a, lambda v: (v.event.fingerprint,))
    group_b = _grouped(values_b, lambda v: (v.event.fingerprint,))
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


def _fingerprint(key: _Key) -> Fingerprint:
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
        found = list(step(rest_a, rest_b))
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
    values_a: Sequence[Value], values_b: Sequence[Value], key: Callable[[Value], _Key]
) -> Iterator[tuple[Value, Value]]:
    """As many of one key on both sides, in order."""
    groups = _grouped(values_a, key)
    for name, found in _grouped(values_b, key).items():
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
    """Parameters of one side that are two of the other side by side, with each of the two."""
    by_count = _grouped((v for v in halves if v.is_leaf), lambda v: (v.count,))
    for whole in wholes:
        found = by_count.get((whole.count / 2,), [])
        if not whole.is_leaf or whole.count < 2 * FEW or len(found) > _CANDIDATES:
            continue
        wanted = whole.event.fingerprint
        for one, other in combinations(found, 2):
            a, b = one.event.fingerprint, other.event.fingerprint
            if abs(math.hypot(norm(a), norm(b)) - norm(wanted)) > 2 * limit * norm(wanted):
                continue
            if distance(wanted, fused(a, b)) <= limit:
                yield whole, one
                yield whole, other
                found.remove(one)
                found.remove(other)
                break


# ---- after a divergence ------------------------------------------------------------------------


def _by_module(matching: Matching, modules: Sequence[Pair]) -> None:
    """Values that are inputs or outputs of paired modules, bit for bit; recorded ones first."""
    holders: tuple[dict[_Key, Value], dict[_Key, Value]] = ({}, {})
    for side in (0, 1):
        for value in matching.sides[side]:
            for event in value.members:
                holders[side].setdefault((event.digest, event.dtype, event.site.phase), value)
    for pair in sorted(modules, key=lambda p: bool(p.baseline.view or p.target.view)):
        a, b = pair.baseline, pair.target
        phase = "loss" if a.site.phase == "trajectory" else a.site.phase
        found = [
            holders[side].get((event.digest, event.dtype, phase))
            for side, event in enumerate((a, b))
        ]
        if found[0] is None or found[1] is None or found[0].count != found[1].count:
            continue
        if found[0] not in matching.partner[0] and found[1] not in matching.partner[1]:
            matching.pair(found[0], found[1], "module")


def _by_pattern(matching: Matching) -> None:
    """Pairs what stands where the like was paired in another layer.

    A role is a module path without its numbers, a canonical name, and the place among the
    operations of that name in the module.
    """
    roles = tuple(_roles(values) for values in matching.sides)
    learned: dict[_Key, set[_Key]] = defaultdict(set)
    for pair in matching.pairs:
        learned[roles[1][pair.target][0]].add(roles[0][pair.baseline][0])
    places = {place: value for value, place in roles[0].items()}
    for value in list(matching.unpaired(1)):
        role, numbers = roles[1][value]
        known = learned.get(role, set())
        if len(known) != 1:
            continue
        partner = places.get((next(iter(known)), numbers))
        if partner and partner not in matching.partner[0] and partner.count == value.count:
            matching.pair(partner, value, "pattern")


def _roles(values: Sequence[Value]) -> dict[Value, tuple[_Key, tuple[str, ...]]]:
    seen: dict[_Key, int] = defaultdict(int)
    roles: dict[Value, tuple[_Key, tuple[str, ...]]] = {}
    for value in values:
        key = (value.phase, value.module, value.name, value.event.site.port)
        template = _NUMBER.sub("*", value.module)
        role = (value.phase, template, value.name, value.event.site.port, seen[key])
        roles[value] = role, tuple(_NUMBER.findall(value.module))
        seen[key] += 1
    return roles
