"""Metadata of two traces -> pairs of events, and what is left over on each side, with reasons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tracediff.align.modules import map_by_order
from tracediff.align.names import STORED_IN_OUT, Rules, canonical, layout, parent
from tracediff.align.parts import match_parts
from tracediff.align.samples import SampleAlignment
from tracediff.events import Event, Pair, Site

_Key = tuple[str, str, int, str]


@dataclass(frozen=True, slots=True)
class Alignment:
    """Events of one step, paired.

    Attributes:
        pairs: In the order of the baseline's events.
        baseline_only, target_only: Each unmatched event with the reason that it has no partner.
        paths: Target path -> baseline path, for the modules that matched.
    """

    pairs: tuple[Pair, ...]
    baseline_only: tuple[tuple[Event, str], ...]
    target_only: tuple[tuple[Event, str], ...]
    paths: dict[str, str]

    def with_samples(self, samples: SampleAlignment, rules: Rules) -> Alignment:
        """The same with the pairs of samples that differ, and those of one side only."""
        pairs = (pair for pair in samples.pairs if not rules.ignore_reason(pair.baseline.site.path))
        only = (
            tuple((event, rules.ignore_reason(event.site.path) or why) for event, why in side)
            for side in samples.only
        )
        baseline, target = only
        return Alignment(
            pairs=tuple(sorted((*self.pairs, *pairs), key=lambda pair: pair.baseline.order)),
            baseline_only=(*self.baseline_only, *baseline),
            target_only=(*self.target_only, *target),
            paths=self.paths,
        )


def align(
    baseline: Sequence[Event],
    target: Sequence[Event],
    stacks: tuple[str, str],
    rules: Rules | None = None,
) -> Alignment:
    """Pairs the events of one step of two runs.

    Passes in order: a user's rules, equal names, the built-in vocabulary (peft and mlx-lm names),
    order of calls inside matched parents, parts of fused tensors. Events are never paired by shape
    alone. Rendered samples are paired by `align_samples`.

    Args:
        stacks: Stack of the baseline and of the target, which decide the built-in names.
    """
    rules = rules or Rules()
    state = _Matching(stacks, rules)
    ignored: tuple[list[tuple[Event, str]], list[tuple[Event, str]]] = ([], [])
    sides: tuple[list[Event], list[Event]] = ([], [])
    for side, events in enumerate((baseline, target)):
        for event in events:
            reason = rules.ignore_reason(event.site.path)
            (ignored[side].append((event, reason)) if reason else sides[side].append(event))
    state.load(*sides)
    state.run(*sides)
    return Alignment(
        pairs=tuple(sorted(state.pairs, key=lambda pair: pair.baseline.order)),
        baseline_only=(*ignored[0], *state.leftover(0)),
        target_only=(*ignored[1], *state.leftover(1)),
        paths=state.paths,
    )


class _Matching:
    """The passes, each over what the earlier ones left."""

    def __init__(self, stacks: tuple[str, str], rules: Rules) -> None:
        self.stacks = stacks
        self.rules = rules
        self.pairs: list[Pair] = []
        self.paths: dict[str, str] = {}
        self.rest: tuple[list[Event], list[Event]] = ([], [])

    def load(self, baseline: list[Event], target: list[Event]) -> None:
        self.rest = (list(baseline), list(target))

    def run(self, baseline: Sequence[Event], target: Sequence[Event]) -> None:
        rules, stacks = self.rules, self.stacks
        if rules.renames:
            self._match(
                "rule",
                lambda path: rules.rename("baseline", path),
                lambda path: rules.rename("target", path),
                renamed_only=True,
            )
        self._match("name", str, str)
        self._match(
            "alias",
            lambda path: canonical(stacks[0], path),
            lambda path: canonical(stacks[1], path),
        )
        by_order = map_by_order(baseline, target, self.paths)
        if by_order:
            self._match(
                "order",
                lambda path: canonical(self.stacks[0], path),
                lambda path: self._through(by_order, path),
            )
        parts, self.rest = match_parts(self.rest, lambda side, path: canonical(stacks[side], path))
        for a, b in parts:
            self._pair(a, b, "parts")

    def _through(self, by_order: dict[str, str], path: str) -> str:
        """A target path under the baseline's name of its innermost mapped module."""
        owner, rest = path, ""
        while owner:
            if owner in by_order:
                return canonical(self.stacks[0], by_order[owner] + rest)
            owner, rest = parent(owner), path[len(parent(owner)) :]
        return canonical(self.stacks[1], path)

    def _match(
        self,
        label: str,
        key_a: Callable[[str], str],
        key_b: Callable[[str], str],
        renamed_only: bool = False,
    ) -> None:
        """Pairs what has equal keys; with `renamed_only`, only where a key changed a name."""
        pool = self._index(self.rest[0], key_a)
        rest_b: list[Event] = []
        taken: set[int] = set()
        for event in self.rest[1]:
            candidates = pool.get(self._key(event, key_b))
            if not candidates or (
                renamed_only
                and key_a(candidates[0].site.path) == candidates[0].site.path
                and key_b(event.site.path) == event.site.path
            ):
                rest_b.append(event)
                continue
            partner = candidates.pop(0)
            taken.add(id(partner))
            self._pair(partner, event, label)
        self.rest = ([e for e in self.rest[0] if id(e) not in taken], rest_b)

    def _index(self, events: Sequence[Event], key: Callable[[str], str]) -> dict[_Key, list[Event]]:
        index: dict[_Key, list[Event]] = defaultdict(list)
        for event in events:
            index[self._key(event, key)].append(event)
        return index

    def _key(self, event: Event, name: Callable[[str], str]) -> _Key:
        site = event.site
        return site.phase, name(site.path), site.call, site.port

    def _pair(self, a: Event, b: Event, label: str) -> None:
        name = canonical(self.stacks[0], a.site.path)
        by_name = layout(*self.stacks, name) == "transposed"
        by_dims = (a.dims == STORED_IN_OUT) != (b.dims == STORED_IN_OUT)
        flipped = self.rules.is_transposed(a.site.path) or by_name != by_dims
        kind = "transposed" if flipped else "same"
        self.pairs.append(Pair(a, b, label, kind if len(a.shape) == 2 else "same"))
        if a.site.phase in ("forward", "trajectory"):
            self.paths.setdefault(b.site.path, a.site.path)

    def leftover(self, side: int) -> list[tuple[Event, str]]:
        """The unmatched events of a side, each with why it has no partner."""
        matched = set(self.paths.values() if side == 0 else self.paths)
        other = self.stacks[1 - side]
        return [(event, _reason(event, matched, other)) for event in self.rest[side]]


def _reason(event: Event, matched: set[str], other: str) -> str:
    site: Site = event.site
    if site.phase == "environment":
        return "setting of one side only"
    if site.phase == "rng":
        return f"generator that {other} does not have"
    if site.phase == "rendering":
        return "rendering step seen on one side only"
    if site.phase == "loading" or (site.phase in ("optimizer", "backward") and not event.op):
        return f"no {site.port} of this name on the other side"
    if site.path in matched:
        return f"the other side has no port {site.port} here"
    return f"no such call of a {event.op or 'value'} on the other side"
