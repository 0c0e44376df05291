"""A Zarr v3 hierarchy in one ZIP archive, under a temporary name until it is committed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracediff.trace.archive import ArchiveWriter, Bytes
from tracediff.trace.compression import (
    CHUNK_BYTES,
    LARGEST_PAYLOAD,
    PAYLOADS,
    SMALLEST_PAYLOAD,
    TEXTS,
    compress,
)
from tracediff.trace.dtypes import DTYPES
from tracediff.trace.manifest import MANIFEST, sync_folder
from tracediff.trace.metadata import (
    CHUNK_LIMIT,
    STRING,
    array_json,
    chunk_keys,
    chunk_shape,
    group_json,
    parents,
)


class Hierarchy:
    """Writes arrays straight to the file; only their metadata is kept in memory.

    An array's metadata comes before its chunks, so that a file that was never committed tells what
    the bytes in it are.

    Attributes:
        nodes: Path of each array -> its `zarr.json`.
        groups: Path of a group -> its attributes, for those that have any.
    """

    def __init__(self, final: Path) -> None:
        """
        Args:
            final: The name that `commit` gives the file.
        """
        self._final = final
        self._archive = ArchiveWriter(final.with_name(f".{final.name}.tmp"))
        self._described: set[str] = set()
        self._held: list[tuple[str, Bytes]] | None = None
        self.nodes: dict[str, str] = {}
        self.groups: dict[str, Mapping[str, Any]] = {}

    def add_chunk(self, key: str, data: bytes) -> None:
        """Appends one encoded chunk of an array whose metadata is put into `nodes` later."""
        self._archive.add(key, data)

    def add_array(
        self,
        path: str,
        array: NDArray[Any],
        data_type: str,
        dims: tuple[str, ...] = (),
        *,
        packed: bool = False,
    ) -> None:
        """Appends an array of any layout and byte order.

        Args:
            dims: Names of the dimensions; left out unless there is one for each.
            packed: Compress it, unless it is too small to gain or too large to unpack.
        """
        little = np.asarray(array, dtype=DTYPES[data_type], order="C")
        packed = packed and SMALLEST_PAYLOAD <= little.nbytes <= LARGEST_PAYLOAD
        names = dims if len(dims) == array.ndim else ()
        document, chunk, keys = _layout(array.shape, data_type, names, packed)
        blocks = [little] if chunk == array.shape else _blocks(little, chunk)
        data = (compress(b, PAYLOADS) if packed else _bytes_of(b) for b in blocks)
        self._append(path, document, zip(keys, data, strict=True))

    def add_strings(self, path: str, data: bytes, count: int, *, packed: bool) -> None:
        """Appends a column of strings, encoded as Zarr's `vlen-utf8` codec does.

        Args:
            packed: Whether `data` is compressed.
        """
        how = TEXTS if packed else None
        document = array_json((count,), (max(1, count),), STRING, ("event",), how)
        self._append(path, document, [("c/0", data)] if count else [])

    def commit(self, attributes: Mapping[str, Any]) -> int:
        """Finishes the file, waits for the disk and renames it; returns its size in bytes.

        Args:
            attributes: Attribute `tracediff` of the root group.
        """
        for path in parents(self.nodes):
            self.nodes[path] = group_json(self.groups.get(path, {}))
        documents = {
            f"{path}/{MANIFEST}": document
            for path, document in self.nodes.items()
            if path not in self._described
        }
        documents[MANIFEST] = group_json({"tracediff": dict(attributes)}, self.nodes)
        self._archive.add_all(*((name, text.encode("ascii")) for name, text in documents.items()))
        self._archive.close()
        self._archive.path.rename(self._final)
        sync_folder(self._final.parent)
        return self._archive.size

    def _append(self, path: str, document: str, chunks: Iterable[tuple[str, Bytes]]) -> None:
        """Appends an array's metadata and its chunks, given by their keys within the array."""
        self.nodes[path] = document
        self._described.add(path)
        entries = [(f"{path}/{MANIFEST}", document.encode("ascii"))]
        for key, data in chunks:
            self._write(*entries, (f"{path}/{key}", data))
            entries = []
        if entries:  # an empty array has no chunks
            self._write(*entries)

    def _write(self, *entries: tuple[str, Bytes]) -> None:
        if self._held is None:
            self._archive.add_all(*entries)
        else:
            self._held += entries

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Writes what is appended in the block in one go at its end: many small arrays."""
        self._held = []
        yield
        held, self._held = self._held, None
        self._archive.add_all(*held)

    def abandon(self) -> None:
        """Closes and removes the file."""
        self._archive.abandon()


@lru_cache(maxsize=1 << 12)
def _layout(
    shape: tuple[int, ...], data_type: str, dims: tuple[str, ...], packed: bool
) -> tuple[str, tuple[int, ...], list[str]]:
    """Metadata, chunk shape and keys of the chunks of an array: few different ones in a run."""
    limit = CHUNK_BYTES if packed else CHUNK_LIMIT
    chunk = chunk_shape(shape, DTYPES[data_type].itemsize, limit)
    document = array_json(shape, chunk, data_type, dims, PAYLOADS if packed else None)
    return document, chunk, chunk_keys(shape, chunk)


def _bytes_of(block: NDArray[Any]) -> memoryview:
    return block.reshape(-1).view(np.uint8).data


def _blocks(array: NDArray[Any], chunk: tuple[int, ...]) -> Iterator[NDArray[Any]]:
    """The chunks of an array in C order. The last ones are padded, as Zarr wants it."""
    if not array.size:
        return  # `product` would unroll the other axes first
    starts = [range(0, size, part) for size, part in zip(array.shape, chunk, strict=True)]
    for corner in product(*starts):
        block = array[tuple(slice(at, at + part) for at, part in zip(corner, chunk, strict=True))]
        if block.shape != chunk:
            padded = np.zeros(chunk, array.dtype)
            padded[tuple(map(slice, block.shape))] = block
            block = padded
        yield block
