"""Pairs the operations of one step of two runs, without needing their names.

Passes in order, each over what the earlier ones left. Those that look at values:

- `rule`: what a user's rules rename onto each other;
- `name`: as many operations of one canonical name in one module, in order, with near fingerprints;
  all operations of a parameter's update, where they are the same in the same order;
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

import gc
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Final

from tracediff.align.fingerprints import tolerance
from tracediff.align.flow import FEW, Flow, Value, is_operation
from tracediff.align.following import pair_by_flow, pair_parts
from tracediff.align.matching import Key, Matching, ValuePair, grouped
from tracediff.align.names import Rules, canonical, parent
from tracediff.align.near import apart, pair_near
from tracediff.events import ROOT, Event, Pair

_CLOSE: Final = 4
"""Units of roundoff within which values are paired first: a few roundings apart. What is further
apart might also be another value of the like."""

_NAMED: Final = 256
"""As many, within which values of one name are, before any other is taken: Adam's root of a second
moment is a few roundings from itself plus `eps`, where gradients are further apart."""
_LEAST: Final = 1e-4
"""No further: in 16 bits a value is as near to itself times a weight near one."""

_INDEX: Final = attrgetter("index")

_NUMBER: Final = re.compile(r"\d+")


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
    with _no_collection():
        return _aligned(baseline, target, stacks, paths or {}, rules or Rules(), modules)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Holds the collector of cyclic garbage back: it would walk over a growing graph of values, in
    which there is none, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _aligned(
    baseline: Sequence[Event],
    target: Sequence[Event],
    stacks: tuple[str, str],
    known: Mapping[str, str],
    rules: Rules,
    modules: Sequence[Pair],
) -> tuple[Flow, Flow, list[ValuePair]]:
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
    _by_sequence(matching)
    close = _CLOSE * limit**2
    for near in (close, max(close, min(_NAMED * limit**2, _LEAST))):
        _by_name(matching, near, "name")
    _by_fingerprint(matching, close)
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
            return canonical(stacks[0], paths[owner] + canonical(stacks[1], rest))
        owner, rest = parent(owner), path[len(parent(owner)) :]
    return canonical(stacks[1], path)


# ---- passes ------------------------------------------------------------------------------------


def _by_rule(matching: Matching, rules: Rules) -> None:
    """Paths (module and canonical name) that a rule renames onto each other, call by call."""
    named: dict[Key, Value] = {}
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


def _by_sequence(matching: Matching) -> None:
    """The operations of an update, where both sides run the same ones of a parameter in one order:
    where gradients are rounding alone, their values say nothing."""
    sides = [
        grouped(
            (v for v in matching.unpaired(side) if v.phase == "optimizer"), lambda v: (v.module,)
        )
        for side in (0, 1)
    ]
    for module, found in sides[1].items():
        partners = sides[0].get(module, [])
        if list(map(_kind_of, partners)) != list(map(_kind_of, found)):
            continue
        for a, b in zip(partners, found, strict=True):
            if matching.is_causal(a, b):
                matching.pair(a, b, "name")


def _kind_of(value: Value) -> Key:
    return value.name, value.event.site.port, value.count, value.event.dtype


def _by_name(matching: Matching, limit: float | None, label: str) -> None:
    """As many values of one canonical name and size in one module on both sides, in order.

    With a limit, each pair's fingerprints have to be near as well.
    """

    def key(value: Value) -> Key:
        port = value.event.site.port
        return value.phase, value.module, value.name, port, value.count, value.event.dtype[:3]

    groups = grouped(matching.unpaired(0), key)
    for name, found in grouped(matching.unpaired(1), key).items():
        partners = groups.get(name, [])
        if len(partners) != len(found) or (limit is None and found[0].count < FEW):
            continue
        for a, b in zip(partners, found, strict=True):
            near = limit is None or apart(a, b) <= limit
            if near and matching.is_causal(a, b):
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
        pair_near(matching, found, limit, label, scope)
        if not scope:
            return
        for side in (0, 1):
            rest = [v for v in found[side] if v not in matching.partner[side]]
            target = waiting[_outer(scope)][side]
            target.extend(rest)
            target.sort(key=_INDEX)


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


# ---- after a divergence ------------------------------------------------------------------------


def _by_module(matching: Matching, modules: Sequence[Pair]) -> None:
    """Values that are inputs or outputs of paired modules, bit for bit; recorded ones first."""
    holders: tuple[dict[Key, Value], dict[Key, Value]] = ({}, {})
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
    learned: dict[Key, set[Key]] = defaultdict(set)
    for pair in matching.pairs:
        learned[roles[1][pair.target][0]].add(roles[0][pair.baseline][0])
    places = {place: value for value, place in roles[0].items()}
    for value in list(matching.unpaired(1)):
        role, numbers = roles[1][value]
        known = learned.get(role, set())
        if len(known) != 1:
            continue
        partner = places.get((next(iter(known)), numbers))
        if partner is None or partner in matching.partner[0] or partner.count != value.count:
            continue
        if matching.is_causal(partner, value):
            matching.pair(partner, value, "pattern")


def _roles(values: Sequence[Value]) -> dict[Value, tuple[Key, tuple[str, ...]]]:
    seen: dict[Key, int] = defaultdict(int)
    roles: dict[Value, tuple[Key, tuple[str, ...]]] = {}
    for value in values:
        key = (value.phase, value.module, value.name, value.event.site.port)
        template = _NUMBER.sub("*", value.module)
        role = (value.phase, template, value.name, value.event.site.port, seen[key])
        roles[value] = role, tuple(_NUMBER.findall(value.module))
        seen[key] += 1
    return roles
