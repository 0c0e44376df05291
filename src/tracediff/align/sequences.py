"""Matches two sequences by content: what stayed in order, what moved, what only one side has.

Near-linear, where a general differ is quadratic: elements that occur once on both sides are
anchors (as in patience diff), runs of equal elements grow from them, and the rest is matched
wherever it stands.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence


def match(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[int]:
    """For each element of `a` the place in `b` of the equal one that it is matched with, or -1.

    Equal elements are matched in order as far as they can be; no place is given twice.
    """
    partner = [-1] * len(a)
    taken = [False] * len(b)

    def grow(i: int, j: int, step: int) -> None:
        """Matches equal neighbours from a place on, in one direction."""
        while 0 <= i < len(a) and 0 <= j < len(b) and a[i] == b[j]:
            if partner[i] >= 0 or taken[j]:
                return
            partner[i], taken[j] = j, True
            i, j = i + step, j + step

    grow(0, 0, 1)
    grow(len(a) - 1, len(b) - 1, -1)
    anchors = _once_in_both(a, b, partner, taken)
    for place in increasing([j for _, j in anchors]):
        i, j = anchors[place]
        grow(i, j, 1)
        grow(i - 1, j - 1, -1)
    waiting: dict[Hashable, deque[int]] = defaultdict(deque)
    for j, element in enumerate(b):
        if not taken[j]:
            waiting[element].append(j)
    for i, element in enumerate(a):
        if partner[i] < 0 and waiting.get(element):
            partner[i] = waiting[element].popleft()
    return partner


def _once_in_both(
    a: Sequence[Hashable], b: Sequence[Hashable], partner: Sequence[int], taken: Sequence[bool]
) -> list[tuple[int, int]]:
    """Places of the unmatched elements that occur once on each side, in the order of `a`."""
    left = Counter(element for i, element in enumerate(a) if partner[i] < 0)
    right = Counter(element for j, element in enumerate(b) if not taken[j])
    place = {element: j for j, element in enumerate(b) if not taken[j] and right[element] == 1}
    return [
        (i, place[element])
        for i, element in enumerate(a)
        if partner[i] < 0 and left[element] == 1 and element in place
    ]


def increasing(values: Sequence[int]) -> list[int]:
    """Places of a longest increasing subsequence of distinct values, in O(n log n)."""
    ends: list[int] = []  # smallest last value of a subsequence of each length
    last: list[int] = []  # its place
    before = [-1] * len(values)
    for place, value in enumerate(values):
        length = bisect_left(ends, value)
        before[place] = last[length - 1] if length else -1
        ends[length : length + 1] = [value]
        last[length : length + 1] = [place]
    found = []
    place = last[-1] if last else -1
    while place >= 0:
        found.append(place)
        place = before[place]
    return found[::-1]
