"""The index: what a reader wants to know of a step without opening its segment.

It holds nothing that the segments do not, so it is written without waiting for the disk, and made
again from the segment wherever it is missing or stale.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import xxhash

from tracediff.events import Site
from tracediff.trace.documents import load_json
from tracediff.trace.manifest import INDEX
from tracediff.trace.rows import Outline, Rows
from tracediff.trace.sums import Layout, Marks, sign

STATE_PHASES: Final = ("loading", "rng", "optimizer")

SUMS: Final = ".sums"
"""Suffix of the file with the sums of marks, beside the index of the step."""

_LARGEST_SUMS: Final = 64 << 20
_MOST_STRUCTURES: Final = 64
"""A run with more kinds of steps keeps no sums."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A run up to and including a step, in short.

    Where the sums of two runs grow by the same from one step to another, they recorded equal
    values at equal sites in all steps between (but for a chance of 2**-128).

    Attributes:
        values: Sum over the `values` of all steps, each hashed with the number of its step.
        generators: The same for each generator over its states.
        counts: Number of events by phase.
        structure: What the marks of the latest step belong to.
        structures: Sum over the structures of all steps, hashed.
        sums: Digest of the sum of the signed marks of all steps of the latest one's structure,
            hexadecimal; "" where it is not known.
        totals: These sums by structure, or None where they are not known. They are kept in a file
            of their own.
    """

    MODULUS: ClassVar[int] = 1 << 128

    values: int = 0
    generators: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    structure: str = ""
    structures: int = 0
    sums: str = ""
    totals: dict[str, Marks] | None = field(default_factory=dict, repr=False, compare=False)

    def then(self, index: StepIndex) -> Prefix:
        """The prefix up to the step that comes next."""
        phases = sorted(self.counts.keys() | index.counts.keys())
        totals = self._totals(index)
        return Prefix(
            structure=index.structure,
            structures=(self.structures + _hash(index.structure)) % self.MODULUS,
            sums=_digest_of(totals[index.structure]) if totals else "",
            totals=totals,
            values=(self.values + _number(index.step, index.values)) % self.MODULUS,
            generators={
                path: (self.generators.get(path, 0) + _number(index.step, state)) % self.MODULUS
                for path, state in index.generators.items()
            },
            counts={name: self.counts.get(name, 0) + index.counts.get(name, 0) for name in phases},
        )

    def _totals(self, index: StepIndex) -> dict[str, Marks] | None:
        if self.totals is None or index.marks is None or len(self.totals) > _MOST_STRUCTURES:
            return None
        added = sign(index.step) * index.marks
        return self.totals | {index.structure: self.totals.get(index.structure, 0.0) + added}

    def is_uniform(self, since: Prefix, steps: int) -> bool:
        """Whether all steps since another prefix have one structure, that one's latest included."""
        expected = (since.structures + steps * _hash(self.structure)) % self.MODULUS
        return self.structure == since.structure and self.structures == expected


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
        structure, marks: See `sums`; the marks are not written.
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
    structure: str = ""
    prefix: Prefix | None = None
    marks: Marks | None = field(default=None, repr=False, compare=False)


class Plan:
    """What the indices of all steps that have one outline have in common.

    Attributes:
        heads: Of each event site, dtype, shape and shard, without the step's number.
        by_phase: The places of the events of each phase.
        compared: The places of the events that `StepIndex.values` is of.
        generators: Path and place of the states of generators.
    """

    def __init__(self, outline: Outline) -> None:
        of = outline.fields
        whole = zip(of.phase, of.path, of.call, of.port, of.dtype, of.shape, strict=True)
        self.heads = [
            repr((*fields, shard) if shard else fields).encode("utf-8", "backslashreplace")
            for fields, shard in zip(whole, of.shard, strict=True)
        ]
        self.by_phase: dict[str, list[int]] = {}
        for place, phase in enumerate(of.phase):
            self.by_phase.setdefault(phase, []).append(place)
        self.counts = {phase: len(found) for phase, found in sorted(self.by_phase.items())}
        self.compared = [
            place for place, phase in enumerate(of.phase) if phase not in ("environment", "rng")
        ]
        self.generators = [
            (of.path[place], place)
            for place in self.by_phase.get("rng", ())
            if of.port[place] == "state"
        ]
        self.layout = Layout(outline)


@lru_cache(maxsize=4)
def _plan(outline: Outline) -> Plan:
    return Plan(outline)


def step_index(
    step: int, rows: Rows, segment_bytes: int, samples: tuple[int, bytes] = (0, b"")
) -> StepIndex:
    """Makes the index of a step.

    Args:
        rows: The events of the columns.
        samples: Number of rows in the table of samples, and their root.
    """
    plan = _plan(rows.outline)
    identities = [head + digest for head, digest in zip(plan.heads, rows.digests, strict=True)]

    def over(places: Iterable[int], end: bytes = b"") -> str:
        return _digest([*map(identities.__getitem__, places), end])

    fields = rows.outline.fields
    return StepIndex(
        step=step,
        events=len(rows) + samples[0],
        root=_digest([*identities, samples[1]]),
        states={
            phase: over(plan.by_phase[phase]) for phase in STATE_PHASES if phase in plan.by_phase
        },
        scalars={
            str(Site(step, "trajectory", fields.path[i], fields.call[i], fields.port[i])): value
            for i in plan.by_phase.get("trajectory", ())
            if (value := rows.values[i]) is not None
        },
        segment_bytes=segment_bytes,
        values=over(plan.compared, samples[1]),
        generators={path: rows.digests[place].hex() for path, place in plan.generators},
        counts=plan.counts,
        structure=plan.layout.structure(samples[1]),
        marks=plan.layout.marks(rows),
    )


def index_file(root: Path, rank: int, step: int) -> Path:
    return Path(f"{root}/{INDEX}/{rank}/{step:08d}.json")


def write_index(root: Path, rank: int, index: StepIndex, prefix: Prefix) -> list[Path]:
    """Writes the index of a step; returns its files.

    Args:
        prefix: All steps up to this one.
    """
    file = index_file(root, rank, index.step)
    written = [file]
    document = {name: getattr(index, name) for name in _FIELDS}
    document["prefix"] = {name: getattr(prefix, name) for name in _PREFIX_FIELDS}
    if prefix.totals is not None and prefix.sums:
        sums = prefix.totals[prefix.structure].astype("<f8", copy=False)
        written.insert(0, file.with_suffix(SUMS))
        _replace(written[0], sums.tobytes())
    _replace(file, json.dumps(document).encode("ascii"))
    return written


def _replace(file: Path, data: bytes) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        temporary.write_bytes(data)
    except FileNotFoundError:  # it is the first of its rank
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
    temporary.replace(file)


def load_sums(root: Path, rank: int, step: int, prefix: Prefix) -> Marks | None:
    """The sums of marks up to a step; None where they are not there, or not those of its index."""
    file = index_file(root, rank, step).with_suffix(SUMS)
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_SUMS:
            return None
        data = file.read_bytes()
    except OSError:
        return None
    if len(data) % 8 or xxhash.xxh3_128_hexdigest(data) != prefix.sums:
        return None
    return np.frombuffer(data, "<f8")


def load_index(root: Path, rank: int, step: int, segment_bytes: int) -> StepIndex | None:
    """The index of a step as it was written; None where it is missing, damaged, stale or old."""
    file = index_file(root, rank, step)
    try:
        if not file.is_file():  # opening a pipe waits for ever
            return None
        found = load_json(file.read_text(encoding="ascii"))
        if found.get("prefix") is not None:
            prefix = Prefix(**_typed(found["prefix"], _PREFIX))
            found["prefix"] = replace(prefix, totals=None)
        index = StepIndex(**_typed(found, _INDEX))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    current = (index.step, index.segment_bytes) == (step, segment_bytes)
    return index if current and index.structure else None  # earlier releases had none


_FIELDS: Final = tuple(f.name for f in fields(StepIndex) if f.name != "marks")
_PREFIX_FIELDS: Final = tuple(f.name for f in fields(Prefix) if f.name != "totals")


def _digest_of(sums: Marks) -> str:
    return xxhash.xxh3_128_hexdigest(sums.astype("<f8", copy=False).tobytes())


@lru_cache
def _hash(text: str) -> int:
    return int(xxhash.xxh3_128_hexdigest(text.encode("utf-8", "replace")), 16)


_PREFIX: Final = {
    "values": int,
    "generators": int,
    "counts": int,
    "structure": str,
    "structures": int,
    "sums": str,
}
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
    "structure": str,
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


def _digest(parts: Iterable[bytes]) -> str:
    """xxh3-128 over all of them."""
    return xxhash.xxh3_128_hexdigest(b"".join(parts))
