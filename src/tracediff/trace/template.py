"""What a file of a trace has in common with the one before it: names, metadata, its
directory.

Steps are alike. What is the same in the next one is made once: the processor's caches are full of
the values of the program that is recorded, so that each look at what was known before costs more
than it seems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from tracediff.trace.archive_writer import Directory, Fixed
from tracediff.trace.direct import Bytes
from tracediff.trace.dtypes import DTYPES
from tracediff.trace.manifest import MANIFEST
from tracediff.trace.metadata import (
    CHUNK_LIMIT,
    array_json,
    chunk_keys,
    chunk_shape,
    consolidated,
    group_json,
    parents,
)
from tracediff.trace.rows import Head, Outline

Kind = tuple[str, tuple[int, ...], tuple[str, ...]]
"""Data type, shape and names of the dimensions of an array."""

Encoded = tuple[str, Iterable[tuple[str, Bytes]]]
"""An array's `zarr.json`, and the names within the array and the bytes of its chunks."""

_MOST: Final = 1 << 14
"""Arrays that are remembered: those of a step, unless it has more of them."""


class Layout(NamedTuple):
    """How an array is stored that is one chunk, as it stands.

    Attributes:
        dtype: Little-endian.
        has_buffer: Whether Python knows the dtype; the bytes of others are looked at as integers.
        document: Its `zarr.json`.
        fixed: That, and the name and size of the chunk.
    """

    kind: Kind
    dtype: np.dtype[Any]
    has_buffer: bool
    document: str
    fixed: Fixed


class Known(NamedTuple):
    """How an array is stored that came before.

    Attributes:
        source: What it was made of.
        document: Its `zarr.json`.
        fixed: That, and its chunks.
    """

    source: object
    document: str
    fixed: Fixed


class Groups(NamedTuple):
    """The groups above arrays, and the metadata of all in one.

    Attributes:
        arrays: Path and `zarr.json` of each array, in the order of writing.
        fixed: The groups' own entries.
        metadata: See `metadata.consolidated`.
    """

    arrays: list[tuple[str, str]]
    fixed: Fixed
    metadata: str


class Template:
    """What is known of the files of one writer, each of which is like the one before.

    Attributes:
        directory: Writes their directories.
        long: Whether the latest one was long.
    """

    def __init__(self) -> None:
        self.directory = Directory()
        self.long = False
        self._layouts: dict[str, Layout] = {}
        self._groups: Groups | None = None
        self._outline: Outline | None = None
        self._known: dict[str, Known] = {}

    def outline(self, heads: list[Head]) -> Outline:
        """The outline of a step: that of the latest one, where it has the same heads."""
        if self._outline is None or self._outline.heads != heads:
            self._outline = Outline(heads)
        return self._outline

    def known(self, path: str, source: object, encoded: Callable[[], Encoded]) -> Known:
        """How to store an array whose bytes follow from an object that nobody changes.

        Args:
            encoded: Encodes it, where the latest array at the path was made of another object.
        """
        found = self._known.get(path)
        if found is None or found.source is not source:
            document, chunks = encoded()
            entries = [(MANIFEST, document.encode("ascii")), *chunks]
            fixed = Fixed([(f"{path}/{name}", bytes(data)) for name, data in entries], None)
            found = self._known[path] = Known(source, document, fixed)
        return found

    def layout(self, path: str, kind: Kind) -> Layout | None:
        """How to store an array at a path; None where it is empty, or too large for one chunk."""
        found = self._layouts.get(path)
        if found is None or found.kind != kind:
            found = _layout(path, kind)
            if found is not None:
                if len(self._layouts) >= _MOST:
                    self._layouts.clear()
                self._layouts[path] = found
        return found

    def groups(self, arrays: Mapping[str, str]) -> Groups:
        """The groups above arrays, without attributes.

        Args:
            arrays: Path -> `zarr.json`.
        """
        found, items = self._groups, list(arrays.items())
        if found is None or found.arrays != items:
            documents = {path: group_json({}) for path in sorted(parents(arrays))}
            entries = [
                (f"{path}/{MANIFEST}", text.encode("ascii")) for path, text in documents.items()
            ]
            fixed = Fixed(entries, None)
            found = self._groups = Groups(items, fixed, consolidated({**arrays, **documents}))
        return found


def _layout(path: str, kind: Kind) -> Layout | None:
    data_type, shape, dims = kind
    dtype = DTYPES[data_type]
    if has_buffer := dtype.isbuiltin != 2:
        dtype = np.dtype(dtype.str)  # the same object as that of most arrays, which are not cast
    if 0 in shape or chunk_shape(shape, dtype.itemsize, CHUNK_LIMIT) != shape:
        return None
    document = array_json(shape, shape, data_type, dims if len(dims) == len(shape) else ())
    size = dtype.itemsize * int(np.prod(shape, dtype=object))
    (key,) = chunk_keys(shape, shape)
    fixed = Fixed([(f"{path}/{MANIFEST}", document.encode("ascii"))], (f"{path}/{key}", size))
    return Layout(kind, dtype, has_buffer, document, fixed)
