"""The index: what a reader wants to know of a step without opening its segment.

It holds nothing that the segments do not, so it is written without waiting for the disk, and made
again from the segment wherever it is missing or stale.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final

import xxhash

from tracediff.events import Event
from tracediff.trace.manifest import INDEX

STATE_PHASES: Final = ("loading", "rng", "optimizer")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A run up to and including a step, in short.

    Where the sums of two runs grow by the same from one step to another, they recorded equal
    values at equal sites in all steps between (but for a chance of 2**-128).

    Attributes:
        values: Sum over the `values` of all steps, each hashed with the number of its step.
        generators: The same for each generator over its states.
        counts: Number of events by phase.
    """

    MODULUS: ClassVar[int] = 1 << 128

    values: int = 0
    generators: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def then(self, index: StepIndex) -> Prefix:
        """The prefix up to the step that comes next."""
        phases = sorted(self.counts.keys() | index.counts.keys())
        return Prefix(
            values=(self.values + _number(index.step, index.values)) % self.MODULUS,
            generators={
                path: (self.generators.get(path, 0) + _number(index.step, state)) % self.MODULUS
                for path, state in index.generators.items()
            },
            counts={name: self.counts.get(name, 0) + index.counts.get(name, 0) for name in phases},
        )


@dataclass(frozen=True, slots=True)
class StepIndex:
    """One step in short.

    Attributes:
        root: Digest over all events of the step in order, hexadecimal. Two steps with equal roots
            recorded equal values at equal sites.
        values: Digest over all but the environment, which may differ between runs that compute
            the same, and the states of generators, of which some are never used.
        generators: Digest of the state of each generator before the step.
        counts: Number of events by phase.
        prefix: All steps up to this one; None where that is not known.
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
    values: str = ""
    generators: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    prefix: Prefix | None = None


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
    identities = list(map(_identity, ordered))
    by_phase: dict[str, list[bytes]] = {}
    for event, identity in zip(ordered, identities, strict=True):
        by_phase.setdefault(event.site.phase, []).append(identity)
    return StepIndex(
        step=step,
        events=len(ordered) + samples[0],
        root=_digest(identities, samples[1]),
        states={phase: _digest(by_phase[phase]) for phase in STATE_PHASES if phase in by_phase},
        scalars={
            str(event.site): event.value
            for event in ordered
            if event.value is not None and event.site.phase == "trajectory"
        },
        segment_bytes=segment_bytes,
        values=_digest(
            (
                identity
                for event, identity in zip(ordered, identities, strict=True)
                if event.site.phase not in ("environment", "rng")
            ),
            samples[1],
        ),
        generators={
            event.site.path: event.digest.hex()
            for event in ordered
            if event.site.phase == "rng" and event.site.port == "state"
        },
        counts={phase: len(found) for phase, found in sorted(by_phase.items())},
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
    """The index of a step as it was written; None where it is missing, damaged, stale or old."""
    file = index_file(root, rank, step)
    try:
        if not file.is_file():  # opening a pipe waits for ever
            return None
        found = json.loads(file.read_text(encoding="ascii"))
        if found.get("prefix") is not None:
            found["prefix"] = Prefix(**_typed(found["prefix"], _PREFIX))
        index = StepIndex(**_typed(found, _INDEX))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    current = (index.step, index.segment_bytes) == (step, segment_bytes)
    return index if current and index.values else None  # earlier releases had no `values`


_PREFIX: Final = {"values": int, "generators": int, "counts": int}
_INDEX: Final = {
    "step": int,
    "events": int,
    "segment_bytes": int,
    "root": str,
    "values": str,
    "states": str,
    "generators": str,
    "counts": int,
    "scalars": object,
    "prefix": object,
}
"""Types of the fields, and of the values of those that are objects."""

_OBJECTS: Final = ("states", "generators", "counts", "scalars")


def _typed(found: dict[str, Any], types: Mapping[str, type]) -> dict[str, Any]:
    """The fields, if each is of its type; raises TypeError otherwise."""
    for name, value in found.items():
        held = value.values() if name in _OBJECTS else [value]
        if name not in types or not all(
            type(item) is types[name] or types[name] is object for item in held
        ):
            raise TypeError(f"{name} is {value!r:.40}")
    return found


def _number(step: int, digest: str) -> int:
    return int(xxhash.xxh3_128_hexdigest(f"{step}:{digest}".encode("utf-8", "replace")), 16)


def _identity(event: Event) -> bytes:
    """Site, dtype, shape and digest of an event, without the step's number."""
    site = event.site
    return (
        _head(site.phase, site.path, site.call, site.port, event.dtype, event.shape) + event.digest
    )


@lru_cache(maxsize=1 << 14)
def _head(*fields: Any) -> bytes:
    """The same in every step."""
    return repr(fields).encode("utf-8", "backslashreplace")


def _digest(identities: Iterable[bytes], samples: bytes = b"") -> str:
    """xxh3-128 over all of them."""
    return xxhash.xxh3_128_hexdigest(b"".join((*identities, samples)))
