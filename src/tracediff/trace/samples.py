"""The rendered samples of a step as columns: a row per sample and rendering step.

A data set has more samples than a process could hold events of. Their rows stand in a table of
their own, compressed, whose values lie end to end in two pools: bytes of text, and integers. See
docs/trace-format.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tracediff.events import Event, Site, sample_step

GROUP: Final = "samples"
ROWS: Final = 1 << 15
"""Rows of a chunk of a column."""

DIGEST_SIZE: Final = 16
TEXT: Final = "text"
INTEGERS: Final = "int32"
ATTRIBUTES: Final = "attributes"
POOLS: Final = {
    TEXT: ("uint8", "text_byte"),
    INTEGERS: ("int32", "value"),
    ATTRIBUTES: ("uint8", "attributes_byte"),
}
"""Data type and dimension of the pools: of values, and of the JSON of a row's own attributes."""

COLUMNS: Final = ("sample", "order", "variant", "start", "length", "attributes_length")
"""Integer columns beside the digest. `variant` counts the entries of the group's attributes."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rendered samples of one step, a row per sample and rendering step, by order.

    Attributes:
        sample: Index of each row's sample, int64 (rows,).
        step: What each row records, as an index into `steps`, int32 (rows,).
        steps: Name of the rendering step and dtype of the value ("" for text).
        order: Place in the execution order, int64 (rows,).
        digest: uint8 (rows, 16).
        event: Makes the event of a row; its payload is read when that is asked for.
        having: Finds the rows whose event has an attribute of that name, int64.
    """

    sample: NDArray[np.int64]
    step: NDArray[np.int32]
    steps: Sequence[tuple[str, str]]
    order: NDArray[np.int64]
    digest: NDArray[np.uint8]
    event: Callable[[int], Event]
    having: Callable[[str], NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.sample)

    def __iter__(self) -> Iterator[Event]:
        return map(self.event, range(len(self)))

    @property
    def root(self) -> bytes:
        """Digest over all rows: two steps with equal roots rendered equal samples alike."""
        root = Root()
        names = [name for name, _ in self.steps]
        root.add(self.sample, self.step, names, self.digest)
        return root.value(len(self))

    @classmethod
    def of_events(cls, events: Sequence[Event]) -> SampleRows:
        """Rows of the events that record a sample, for traces that hold them one by one."""
        found = [(event, place) for event in events if (place := place_of(event))]
        steps: dict[tuple[str, str], int] = {}
        codes = [steps.setdefault((name, event.dtype), len(steps)) for event, (_, name) in found]
        digests = b"".join(event.digest or bytes(DIGEST_SIZE) for event, _ in found)
        return cls(
            np.array([index for _, (index, _) in found], np.int64),
            np.array(codes, np.int32),
            list(steps),
            np.array([event.order for event, _ in found], np.int64),
            np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_SIZE),
            lambda row: found[row][0],
            lambda name: np.array(
                [row for row, (event, _) in enumerate(found) if name in event.attributes], np.int64
            ),
        )


class Root:
    """Digest over samples, names of their steps, and digests, fed in pieces of any size."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._parts = [xxhash.xxh3_128() for _ in range(3)]

    def add(
        self,
        sample: NDArray[np.int64],
        step: NDArray[np.int32],
        names: Sequence[str],
        digest: NDArray[np.uint8],
    ) -> None:
        """Adds rows; `names[step]` is what each records."""
        by_first = dict.fromkeys(step.tolist())
        for code in by_first:
            self._codes.setdefault(names[code], len(self._codes))
        table = np.array([self._codes.get(name, -1) for name in names] or [0], "<i4")
        for part, column in zip(
            self._parts, (sample.astype("<i8"), table[step], digest), strict=True
        ):
            part.update(np.ascontiguousarray(column).view(np.uint8).data)

    def value(self, rows: int) -> bytes:
        """The digest of all rows so far; empty where there are none."""
        if not rows:
            return b""
        total = xxhash.xxh3_128(json.dumps(list(self._codes)).encode())
        for part in self._parts:
            total.update(part.digest())
        return total.digest()


def place_of(event: Event) -> tuple[int, str] | None:
    """Sample and rendering step of an event; None where it records something else."""
    return place_at(event.site)


def place_at(site: Site) -> tuple[int, str] | None:
    """As `place_of`, of what is recorded at a site."""
    if site.phase != "rendering" or site.call or site.port != "out":
        return None
    return sample_step(site.path)
