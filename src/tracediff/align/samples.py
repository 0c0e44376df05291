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

    A sample is known by the earliest of its steps that was recorded: messages before template
    text before IDs, so that a sample whose text was changed is still the same sample. Those with
    no equal are paired by position between two that have one: an edited sample stays at its place.
    """
    a, b = _identities(baseline), _identities(target)
    indices_a, indices_b = list(a), list(b)
    matcher = SequenceMatcher(None, list(a.values()), list(b.values()), autojunk=False)
    mapping: dict[int, int] = {}
    for tag, a_start, a_stop, b_start, b_stop in matcher.get_opcodes():
        if tag in ("equal", "replace"):
            for i, j in zip(range(a_start, a_stop), range(b_start, b_stop), strict=False):
                mapping[indices_b[j]] = indices_a[i]
    return mapping


def _identities(events: Sequence[Event]) -> dict[int, tuple[str, bytes]]:
    """Sample index -> its first recorded step and that step's digest, in order of rendering."""
    samples: dict[int, tuple[str, bytes]] = {}
    for event in events:
        match = SAMPLE.match(event.site.path)
        if match:
            samples.setdefault(int(match[1]), (match[2], event.digest))
    return samples
