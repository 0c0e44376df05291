"""What happened to a sequence of samples, or of rows of batches, besides changes of single ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tracediff.align.sequences import increasing

_LISTED: Final = 10


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One way in which two sequences are arranged differently.

    Attributes:
        kind: `order`, `missing` (from the second) or `extra` (only in the second).
        pattern: `shuffled`, `dropped`, `duplicated` or `inserted`.
        place: The first place that it concerns: of the first sequence, or of the second where the
            kind is `extra`.
        detail: `count`, and the first places: `places`, and where the same element is also
            elsewhere in its sequence, or in the other one, `other`.
    """

    kind: str
    pattern: str
    place: int
    detail: Mapping[str, Any] = field(default_factory=dict)


def arrangements(
    partner: Sequence[int], keys: tuple[Sequence[Any], Sequence[Any]]
) -> list[Arrangement]:
    """How the second sequence is arranged otherwise than the first.

    Args:
        partner: Place in the second of each element of the first, or -1.
        keys: Of all elements of both: equal where they are the same.
    """
    extra = sorted(set(range(len(keys[1]))) - set(partner))
    missing = [i for i, j in enumerate(partner) if j < 0]
    return [
        *_order(partner),
        *_lacking("missing", missing, keys[0], ("dropped", "dropped")),
        *_lacking("extra", extra, keys[1], ("duplicated", "inserted")),
    ]


def _order(partner: Sequence[int]) -> Iterator[Arrangement]:
    matched = [i for i, j in enumerate(partner) if j >= 0]
    places = [partner[i] for i in matched]
    moved = len(places) - len(increasing(places))
    if moved:
        at = next(
            k for k, (j, k_th) in enumerate(zip(places, sorted(places), strict=True)) if j != k_th
        )
        detail = {"count": moved, "of": len(places), "other": places[at]}
        yield Arrangement("order", "shuffled", matched[at], detail)


def _lacking(
    kind: str, places: Sequence[int], keys: Sequence[Any], patterns: tuple[str, str]
) -> Iterator[Arrangement]:
    """Elements of one sequence only; the first pattern is for those that it has elsewhere too."""
    if not places:
        return
    lacking = set(places)
    first = {}
    for place in range(len(keys) - 1, -1, -1):
        if place not in lacking:
            first[keys[place]] = place
    again = [place for place in places if keys[place] in first]
    new = [place for place in places if keys[place] not in first]
    for found, pattern in ((again, patterns[0]), (new, patterns[1])):
        if found:
            detail: dict[str, Any] = {"count": len(found), "places": found[:_LISTED]}
            if found is again:
                detail["other"] = first[keys[found[0]]]
            yield Arrangement(kind, pattern, found[0], detail)
