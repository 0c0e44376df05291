"""Pairs rendered samples by content first, then by position between equal ones.

Two scripts may render in another order or ask for a sample more often; by position alone, one
extra call would make every later sample look changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Final

from tracediff.events import Event

SAMPLE: Final = re.compile(r"^sample\[(\d+)\]\.(.+)$")


def map_samples(baseline: Sequence[Event], target: Sequence[Event]) -> dict[int, int]:
    """Target's sample index -> baseline's, for the samples rendered in one step.

    Samples with equal content are paired in order; those left between two such pairs are paired
    by position, since an edited sample stays at its place.
    """
    a, b = _contents(baseline), _contents(target)
    indices_a, indices_b = list(a), list(b)
    matcher = SequenceMatcher(None, list(a.values()), list(b.values()), autojunk=False)
    mapping: dict[int, int] = {}
    for tag, a_start, a_stop, b_start, b_stop in matcher.get_opcodes():
        if tag in ("equal", "replace"):
            for i, j in zip(range(a_start, a_stop), range(b_start, b_stop), strict=False):
                mapping[indices_b[j]] = indices_a[i]
    return mapping


def _contents(events: Sequence[Event]) -> dict[int, tuple[tuple[str, bytes], ...]]:
    """Sample index -> digests of its steps (text, IDs ...), in order of rendering."""
    samples: dict[int, list[tuple[str, bytes]]] = {}
    for event in events:
        match = SAMPLE.match(event.site.path)
        if match and match[2] in ("text", "ids"):
            samples.setdefault(int(match[1]), []).append((match[2], event.digest))
    return {index: tuple(steps) for index, steps in samples.items()}
