"""Pairs the rendered samples of two steps by content, and what they record by rendering step.

Two scripts may render in another order, in other batches, or leave a record out; by position
alone, one such difference would make every later sample look changed. All that is compared here
are digests, in columns; events are made of what differs only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tracediff.align.names import Rules
from tracediff.align.sequences import increasing, match
from tracediff.events import Event, Pair, sample_step
from tracediff.trace.samples import SampleRows

LIMIT: Final = 1000
"""Differing and unmatched rows of which events are made, each; the others are counted."""

_LIKE: Final = 0.6
"""Share of common characters from which a text may be another one's changed form."""

_COMPARED: Final = 64
"""Leftover samples on each side that are compared with each other, at most."""

Integers = NDArray[np.int64]
Read = Callable[[Event], NDArray[Any]]
Unmatched = tuple[tuple[Event, str], ...]


@dataclass(frozen=True, slots=True)
class SampleAlignment:
    """The rendered samples of one step, paired.

    Attributes:
        rows: The rows of the baseline and of the target.
        partner: For each of the baseline's samples, in order of rendering, the place among the
            target's, or -1.
        keys: What each sample of both sides is known by: equal where they render the same.
        samples: Their indices, in order of rendering, of both sides.
        pairs: All rows of the first samples in which some differ, in the baseline's order.
        differing: How many other pairs differ.
        agreeing: The baseline's rows that have an equal partner and are not among `pairs`.
        only: The first unmatched events of each side, with the reason.
        unmatched: How many there are in all.
    """

    rows: tuple[SampleRows, SampleRows]
    partner: Sequence[int]
    keys: tuple[Sequence[int], Sequence[int]]
    samples: tuple[Integers, Integers]
    pairs: tuple[Pair, ...]
    differing: int
    agreeing: Integers
    only: tuple[Unmatched, Unmatched]
    unmatched: tuple[int, int]

    @property
    def unlisted(self) -> tuple[int, int]:
        """How many unmatched rows of each side there are beyond those in `only`."""
        return self.unmatched[0] - len(self.only[0]), self.unmatched[1] - len(self.only[1])

    @property
    def compared(self) -> int:
        """How many rows were compared and are not among `pairs`."""
        return len(self.agreeing) + self.differing

    def last_agreeing(self, before: int) -> Event | None:
        """The last of the baseline's events with an equal partner and a lower order."""
        orders = self.rows[0].order[self.agreeing]
        earlier = self.agreeing[orders < before]
        if not len(earlier):
            return None
        return self.rows[0].event(int(earlier[np.argmax(self.rows[0].order[earlier])]))


def align_samples(
    baseline: SampleRows,
    target: SampleRows,
    read: tuple[Read, Read],
    rules: Rules | None = None,
    limit: int | None = LIMIT,
) -> SampleAlignment:
    """Pairs the samples of one step of two runs, then their rows.

    A sample is known by the earliest of its steps that both sides recorded: messages before
    template text before IDs, so that a sample whose text was changed is still the same sample. Of
    the others, those that stand between the same neighbours are one sample that was changed.

    Args:
        read: The payload of an event of each side.
        rules: A user's names for steps: they apply to `sample[0].<step>`.
        limit: About how many pairs and unmatched rows become events; None for all, those of equal
            samples too.
    """
    rules = rules or Rules()
    sides = (_Side(baseline, read[0], rules, "baseline"), _Side(target, read[1], rules, "target"))
    names = [name for name in dict.fromkeys(sides[0].names) if name in sides[1].names]
    digests = _digests(sides, names)
    partner = _match(sides, names, digests)
    rows = _pair_rows(sides, partner)
    same = (digests[0][rows[0]] == digests[1][rows[1]]).all(axis=1)
    listed = np.ones(len(same), bool) if limit is None else _listed(sides[0], rows[0], same, limit)
    found = rows[:, listed]
    found = found[:, np.argsort(baseline.order[found[0]], kind="stable")]
    pairs = (Pair(baseline.event(int(i)), target.event(int(j)), "name") for i, j in found.T)
    left = tuple(_others(len(side.rows), rows[which]) for which, side in enumerate(sides))
    return SampleAlignment(
        rows=(baseline, target),
        partner=partner,
        keys=_keys(sides, names, digests),
        samples=(sides[0].samples, sides[1].samples),
        pairs=tuple(pairs),
        differing=int((~same & ~listed).sum()),
        agreeing=np.sort(rows[0][same & ~listed]),
        only=tuple(  # type: ignore[arg-type]
            _unmatched(side, rest[:limit], matched)
            for side, rest, matched in zip(sides, left, _matched(partner), strict=True)
        ),
        unmatched=(len(left[0]), len(left[1])),
    )


class _Side:
    """One side's rows, with names as the rules have them, and its samples in order of rendering."""

    def __init__(self, rows: SampleRows, read: Read, rules: Rules, side: str) -> None:
        self.rows = rows
        self.read = read
        self.names = [_renamed(rules, side, name) for name, _ in rows.steps]
        found, first, inverse = np.unique(rows.sample, return_index=True, return_inverse=True)
        by_order = np.argsort(rows.order[first], kind="stable")
        self.samples: Integers = found[by_order]
        places = np.empty(len(found), np.int64)
        places[by_order] = np.arange(len(found))
        self.place: Integers = places[inverse]
        """Place of each row's sample in `samples`."""
        self._rows: dict[str, Integers] = {}

    def rows_of(self, name: str) -> Integers:
        """The first row of each sample that records this step, by place; -1 where none does."""
        if name not in self._rows:
            self._rows[name] = self._find_rows(name)
        return self._rows[name]

    def _find_rows(self, name: str) -> Integers:
        rows = np.flatnonzero(np.isin(self.rows.step, self.codes(name)))
        found = np.full(len(self.samples), -1, np.int64)
        found[self.place[rows][::-1]] = rows[::-1]
        return found

    def codes(self, name: str) -> list[int]:
        """The codes in `rows.step` of a step's name."""
        return [code for code, other in enumerate(self.names) if other == name]

    def dtypes_of(self, name: str) -> set[str]:
        return {self.rows.steps[code][1] for code in self.codes(name)}

    def text(self, place: int, name: str) -> str:
        """What a sample records at a step, as text to compare."""
        event = self.rows.event(int(self.rows_of(name)[place]))
        if event.payload is not None:
            return "".join(map(chr, np.clip(self.read(event).reshape(-1), 0, 0xD7FF)))
        return str(event.value)


def _renamed(rules: Rules, side: str, name: str) -> str:
    renamed = sample_step(rules.rename(side, f"sample[0].{name}"))
    return renamed[1] if renamed else name


def _digests(
    sides: tuple[_Side, _Side], names: Sequence[str]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The digests of each side's rows; of the values as int64 where the dtypes are not the same."""
    found = tuple(
        np.ascontiguousarray(side.rows.digest).view("<u8").reshape(-1, 2).copy() for side in sides
    )
    for name in names:
        dtypes = {dtype for side in sides for dtype in side.dtypes_of(name)}
        if len(dtypes) == 1 or "" in dtypes:
            continue
        for side, digests in zip(sides, found, strict=True):
            for row in np.flatnonzero(np.isin(side.rows.step, side.codes(name))):
                values = side.read(side.rows.event(int(row))).astype("<i8")
                digests[row] = np.frombuffer(xxhash.xxh3_128_digest(values.tobytes()), "<u8")
    return found  # type: ignore[return-value]


def _classes(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> tuple[list[int], list[int]]:
    """A number for each digest, equal where and only where the digests are."""
    both = np.concatenate([a, b])
    order = np.lexsort(both.T)
    new = np.ones(len(both), np.int64)
    new[1:] = (both[order][1:] != both[order][:-1]).any(axis=1)
    classes = np.empty(len(both), np.int64)
    classes[order] = np.cumsum(new)
    return classes[: len(a)].tolist(), classes[len(a) :].tolist()


def _keys(
    sides: tuple[_Side, _Side],
    names: Sequence[str],
    digests: tuple[NDArray[np.uint64], NDArray[np.uint64]],
) -> tuple[Sequence[int], Sequence[int]]:
    """A number for what each sample records first of the steps that both sides have."""
    firsts = []
    for side, found in zip(sides, digests, strict=True):
        first = np.zeros((len(side.samples), 2), np.uint64)
        for name in reversed(names):
            rows = side.rows_of(name)
            first[rows >= 0] = found[rows[rows >= 0]]
        firsts.append(first)
    return _classes(*firsts)


def _match(
    sides: tuple[_Side, _Side],
    names: Sequence[str],
    digests: tuple[NDArray[np.uint64], NDArray[np.uint64]],
) -> list[int]:
    """Place of each of the baseline's samples among the target's, or -1."""
    partner = np.full(len(sides[0].samples), -1, np.int64)
    for name in names:
        rows = [side.rows_of(name).copy() for side in sides]
        taken = partner[partner >= 0]
        rows[1][taken] = -1
        rows[0][partner >= 0] = -1
        left, right = (np.flatnonzero(row >= 0) for row in rows)
        classes = _classes(digests[0][rows[0][left]], digests[1][rows[1][right]])
        for i, j in enumerate(match(*classes)):
            if j >= 0:
                partner[left[i]] = right[j]
    found: list[int] = partner.tolist()
    for i, j in _changed(found, len(sides[1].samples), lambda i, j: _alike(sides, names, i, j)):
        found[i] = j
    return found


def _changed(
    partner: Sequence[int], size: int, alike: Callable[[int, int], float]
) -> Iterator[tuple[int, int]]:
    """Leftover samples that are one sample, changed: by place where as many stand between the same
    neighbours on both sides, else by likeness."""
    matched = [i for i, j in enumerate(partner) if j >= 0]
    chain = [matched[place] for place in increasing([partner[i] for i in matched])]
    left = _by_gap([i for i, j in enumerate(partner) if j < 0], chain)
    right = _by_gap(sorted(set(range(size)) - set(partner)), [partner[i] for i in chain])
    groups = [(left.get(gap, []), right.get(gap, [])) for gap in left.keys() | right.keys()]
    for a, b in groups:
        if len(a) == len(b):
            yield from zip(a, b, strict=True)
    uneven = [(a, b) for a, b in groups if len(a) != len(b)]
    if len(chain) < len(matched):  # in another order, a changed sample may stand anywhere
        whole = ([i for a, _ in uneven for i in a], [j for _, b in uneven for j in b])
        uneven = [whole]
    for a, b in uneven:
        if max(len(a), len(b)) <= _COMPARED:
            yield from _likest(a, b, alike)


def _likest(
    a: Sequence[int], b: Sequence[int], alike: Callable[[int, int], float]
) -> Iterator[tuple[int, int]]:
    """Pairs of places that are alike, the likest first, each place once."""
    scored = sorted((-alike(i, j), i, j) for i in a for j in b)
    used: tuple[set[int], set[int]] = (set(), set())
    for score, i, j in scored:
        if -score >= _LIKE and i not in used[0] and j not in used[1]:
            used[0].add(i)
            used[1].add(j)
            yield i, j


def _by_gap(places: Sequence[int], chain: Sequence[int]) -> dict[int, list[int]]:
    """Places by how many of the chain stand before them."""
    gaps: dict[int, list[int]] = {}
    for place, gap in zip(places, np.searchsorted(chain, places).tolist(), strict=True):
        gaps.setdefault(gap, []).append(place)
    return gaps


def _alike(sides: tuple[_Side, _Side], names: Sequence[str], i: int, j: int) -> float:
    """Share of the characters that two samples have in common at the first step of both."""
    for name in names:
        if sides[0].rows_of(name)[i] >= 0 and sides[1].rows_of(name)[j] >= 0:
            a, b = sides[0].text(i, name), sides[1].text(j, name)
            return SequenceMatcher(None, a, b, autojunk=False).quick_ratio()
    return 0.0


def _pair_rows(sides: tuple[_Side, _Side], partner: Sequence[int]) -> Integers:
    """Rows of the baseline and of the target that record the same step of the same sample."""
    codes: dict[str, int] = {}
    keys = []
    back = np.full(len(sides[1].samples) + 1, -1, np.int64)
    matched = np.array([(i, j) for i, j in enumerate(partner) if j >= 0], np.int64).reshape(-1, 2)
    back[matched[:, 1]] = matched[:, 0]
    count = 1 + sum(len(side.names) for side in sides)
    for side, places in zip(sides, (sides[0].place, back[sides[1].place]), strict=True):
        table = np.array([codes.setdefault(name, len(codes)) for name in side.names] or [0])
        key = np.where(places < 0, -1, places * count + table[side.rows.step])
        keys.append(_numbered(key))
    known = [np.flatnonzero(key[:, 0] >= 0) for key in keys]
    weights = np.array([1 + max(int(key[:, 1].max(initial=0)) for key in keys), 1])
    a, b = (key[rows] @ weights for key, rows in zip(keys, known, strict=True))
    _, left, right = np.intersect1d(a, b, assume_unique=True, return_indices=True)
    return np.stack([known[0][left], known[1][right]])


def _numbered(keys: Integers) -> Integers:
    """Each key with how many equal ones stand before it: (rows, 2)."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else order
    sizes = np.diff(np.r_[starts, len(keys)])
    numbers = np.empty(len(keys), np.int64)
    numbers[order] = np.arange(len(keys)) - np.repeat(starts, sizes)
    return np.stack([keys, numbers], axis=1)


def _others(count: int, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """The rows of so many that are not among these. (NumPy's sets import its masked arrays.)"""
    left = np.ones(count, bool)
    left[rows] = False
    return np.flatnonzero(left)


def _listed(side: _Side, rows: Integers, same: NDArray[np.bool_], limit: int) -> NDArray[np.bool_]:
    """Which pairs of rows become events: all of a sample in which some differ.

    Of many such samples the first ones, as many of those that differ in one set of steps as of
    those that differ in another: a common harmless difference must not hide a rare one.
    """
    names = {name: code for code, name in enumerate(dict.fromkeys(side.names))}
    code = np.array([names[name] for name in side.names] or [0])[side.rows.step[rows]] % 62
    place, unequal = side.place[rows], rows[~same]
    which = np.zeros(len(side.samples), np.int64)
    np.bitwise_or.at(which, side.place[unequal], np.int64(1) << code[~same])
    first = np.full(len(side.samples), np.iinfo(np.int64).max)
    np.minimum.at(first, side.place[unequal], side.rows.order[unequal])
    sizes = np.bincount(place, minlength=len(side.samples))
    listed = np.zeros(len(side.samples), bool)
    groups = sorted(set(which.tolist()) - {0})
    for group in groups:
        members = np.flatnonzero(which == group)
        members = members[np.argsort(first[members], kind="stable")]
        fitting = np.cumsum(sizes[members]) - sizes[members] < limit / len(groups)
        listed[members[fitting]] = True
    return listed[place]


def _matched(partner: Sequence[int]) -> tuple[set[int], set[int]]:
    """Places of the matched samples of both sides."""
    return {i for i, j in enumerate(partner) if j >= 0}, {j for j in partner if j >= 0}


def _unmatched(side: _Side, rows: Integers, matched: set[int]) -> Unmatched:
    reasons = ("sample rendered on one side only", "rendering step seen on one side only")
    return tuple(
        (side.rows.event(int(row)), reasons[int(side.place[row]) in matched]) for row in rows
    )
