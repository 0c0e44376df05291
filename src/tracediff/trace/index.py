"""The index: what a reader wants to know of a step without opening its segment.

It holds nothing that the segments do not, so it is written without waiting for the disk, and made
again from the segment wherever it is missing or stale.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from tracediff.events import Event
from tracediff.trace.manifest import INDEX

STATE_PHASES: Final = ("loading", "rng", "optimizer")


@dataclass(frozen=True, slots=True)
class StepIndex:
    """One step in short.

    Attributes:
        root: Digest over all events of the step in order, hexadecimal. Two steps with equal roots
            recorded equal values at equal sites.
        states: Digest over the events of each phase of `STATE_PHASES` that the step has.
        scalars: Values of the trajectory stage (loss, evaluations) by site.
        segment_bytes: Size of the segment that this was made from.
    """

    step: int
    events: int
    root: str
    states: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    segment_bytes: int = 0


def step_index(
    step: int,
    events: Sequence[Event],
    segment_bytes: int,
    samples: tuple[int, bytes] = (0, b""),
) -> StepIndex:
    """Makes the index of a step.

    Args:
        events: Those of the columns, in any order.
        samples: Number of rows in the table of samples, and their root.
    """
    ordered = sorted(events, key=lambda event: event.order)
    by_phase: dict[str, list[Event]] = {}
    for event in ordered:
        by_phase.setdefault(event.site.phase, []).append(event)
    return StepIndex(
        step=step,
        events=len(ordered) + samples[0],
        root=_digest(ordered, samples[1]),
        states={phase: _digest(by_phase[phase]) for phase in STATE_PHASES if phase in by_phase},
        scalars={
            str(event.site): event.value
            for event in by_phase.get("trajectory", [])
            if event.value is not None
        },
        segment_bytes=segment_bytes,
    )


def index_file(root: Path, rank: int, step: int) -> Path:
    return root / INDEX / str(rank) / f"{step:08d}.json"


def write_index(root: Path, rank: int, index: StepIndex) -> Path:
    """Writes the index of a step; returns its file."""
    file = index_file(root, rank, index.step)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(asdict(index)), encoding="ascii")
    temporary.replace(file)
    return file


def load_index(root: Path, rank: int, step: int, segment_bytes: int) -> StepIndex | None:
    """The index of a step as it was written; None where it is missing, damaged or stale."""
    try:
        found = json.loads(index_file(root, rank, step).read_text(encoding="ascii"))
        index = StepIndex(**found)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return index if (index.step, index.segment_bytes) == (step, segment_bytes) else None


def _digest(events: Iterable[Event], samples: bytes = b"") -> str:
    """xxh3-128 over site, dtype, shape and digest of each event, without the step's number."""
    total = xxhash.xxh3_128()
    for event in events:
        site = event.site
        head = (site.phase, site.path, site.call, site.port, event.dtype, event.shape)
        total.update(repr(head).encode("utf-8", "backslashreplace"))
        total.update(event.digest)
    total.update(samples)
    return total.hexdigest()
