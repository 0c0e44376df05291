"""A Zarr v3 hierarchy in one ZIP archive, under a temporary name until it is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.trace.archive_writer import ArchiveWriter
from tracediff.trace.compression import (
    CHUNK_BYTES,
    LARGEST_PAYLOAD,
    PAYLOADS,
    SMALLEST_PAYLOAD,
    TEXTS,
    compress,
)
from tracediff.trace.direct import LONG, Bytes
from tracediff.trace.dtypes import DTYPES
from tracediff.trace.manifest import MANIFEST, sync_folder
from tracediff.trace.metadata import (
    CHUNK_LIMIT,
    STRING,
    array_json,
    chunk_keys,
    chunk_shape,
    consolidated,
    group_json,
    parents,
)
from tracediff.trace.template import Encoded, Template

_SMALL: Final = 1 << 16
"""Bytes of a column that is kept in case the next step has it, too."""


class Hierarchy:
    """Writes arrays straight to the file; only their metadata is kept in memory.

    An array's metadata comes before its chunks, so that a file that was never committed tells what
    the bytes in it are.

    Attributes:
        nodes: Path of each array -> its `zarr.json`.
    """

    def __init__(self, final: Path, template: Template | None = None) -> None:
        """
        Args:
            final: The name that `commit` gives the file.
            template: What is known of the file before, if there was one of its kind.
        """
        self._final = final
        self._template = template = template or Template()
        self._archive = ArchiveWriter(
            final.with_name(f".{final.name}.tmp"), long=template.long, directory=template.directory
        )
        self._late: dict[str, str] = {}
        self._groups: dict[str, Mapping[str, Any]] = {}
        self.nodes: dict[str, str] = {}

    def add_chunk(self, key: str, data: bytes) -> None:
        """Appends one encoded chunk of an array that is described later."""
        self._archive.add(key, data)

    def describe(self, nodes: Mapping[str, str], group: str, attributes: Mapping[str, Any]) -> None:
        """Gives the metadata of arrays whose chunks were added one by one, to be written last.

        Args:
            nodes: `zarr.json` text by path.
            group: Path of the group that they are in.
            attributes: Its attributes.
        """
        self.nodes.update(nodes)
        self._late.update(nodes)
        self._groups[group] = attributes

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
        layout = None if packed else self._template.layout(path, (data_type, array.shape, dims))
        if layout is not None:
            little = np.asarray(array, layout.dtype, order="C")
            self._archive.place(layout.fixed, little if layout.has_buffer else _bytes_of(little))
            self.nodes[path] = layout.document
            return
        self._append(path, *_encoded(array, data_type, dims, packed))

    def add_constant(
        self, path: str, array: NDArray[Any], data_type: str, dims: tuple[str, ...]
    ) -> None:
        """As `add_array` with `packed`, of an array that nobody ever changes: it is encoded once
        for all steps that have the same one."""
        self._add_known(path, array, lambda: _encoded(array, data_type, dims, packed=True))

    def add_strings(self, path: str, data: bytes, count: int, *, packed: bool) -> None:
        """Appends a column of strings, encoded as Zarr's `vlen-utf8` codec does.

        Args:
            packed: Whether `data` is compressed.
        """
        how = TEXTS if packed else None

        def encoded() -> Encoded:
            document = array_json((count,), (max(1, count),), STRING, ("event",), how)
            return document, [("c/0", data)] if count else []

        if len(data) <= _SMALL:
            self._add_known(path, data, encoded)
        else:
            self._append(path, *encoded())

    def _add_known(self, path: str, source: object, encoded: Callable[[], Encoded]) -> None:
        """Appends an array whose bytes follow from an object that nobody changes."""
        known = self._template.known(path, source, encoded)
        self._archive.place(known.fixed, None)
        self.nodes[path] = known.document

    def commit(self, attributes: Mapping[str, Any]) -> int:
        """Finishes the file, waits for the disk and renames it; returns its size in bytes.

        Args:
            attributes: Attribute `tracediff` of the root group.
        """
        own = {"tracediff": dict(attributes)}
        if self._late:
            root = self._add_groups(own)
        else:
            groups = self._template.groups(self.nodes)
            self._archive.place(groups.fixed, None)
            root = group_json(own, groups.metadata)
        self._archive.add(MANIFEST, root.encode("ascii"))
        self._archive.close()
        self._archive.path.rename(self._final)
        sync_folder(self._final.parent)
        self._template.long = self._archive.size > LONG
        return self._archive.size

    def _add_groups(self, attributes: Mapping[str, Any]) -> str:
        """Writes what has no metadata yet; returns that of the root group."""
        documents = dict(self._late)
        for path in sorted(parents(self.nodes)):
            documents[path] = group_json(self._groups.get(path, {}))
        for path, document in documents.items():
            self._archive.add(f"{path}/{MANIFEST}", document.encode("ascii"))
        return group_json(attributes, consolidated({**self.nodes, **documents}))

    def _append(self, path: str, document: str, chunks: Iterable[tuple[str, Bytes]]) -> None:
        """Appends an array's metadata and its chunks, given by their keys within the array."""
        self.nodes[path] = document
        self._archive.add(f"{path}/{MANIFEST}", document.encode("ascii"))
        for key, data in chunks:
            self._archive.add(f"{path}/{key}", data)

    def abandon(self) -> None:
        """Closes and removes the file."""
        self._archive.abandon()


def _encoded(array: NDArray[Any], data_type: str, dims: tuple[str, ...], packed: bool) -> Encoded:
    little = np.asarray(array, dtype=DTYPES[data_type], order="C")
    packed = packed and SMALLEST_PAYLOAD <= little.nbytes <= LARGEST_PAYLOAD
    names = dims if len(dims) == array.ndim else ()
    document, chunk, keys = _layout(array.shape, data_type, names, packed)
    blocks = [little] if chunk == array.shape else _blocks(little, chunk)
    data = (compress(b, PAYLOADS) if packed else _bytes_of(b) for b in blocks)
    return document, zip(keys, data, strict=True)


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
