"""Reads one committed file of a trace, believing nothing that it says about its own size."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tracediff.errors import CorruptTraceError, TraceError
from tracediff.events import Event
from tracediff.trace import columns
from tracediff.trace.archive import Archive
from tracediff.trace.compression import (
    CHUNK_BYTES,
    LARGEST_CHUNK,
    LARGEST_PAYLOAD,
    LARGEST_TEXT,
    decompress,
    stated_size,
)
from tracediff.trace.documents import load_json
from tracediff.trace.manifest import FORMAT, MANIFEST
from tracediff.trace.metadata import STRING, ArrayInfo, chunk_keys, parse_array
from tracediff.trace.samples import COLUMNS, GROUP, POOLS, ROWS, SampleRows
from tracediff.trace.summary import SKETCHES, digest

if TYPE_CHECKING:
    from tracediff.trace.sample_table import SampleTable

_Identity = tuple[str | None, bytes, str, tuple[int, ...]]
"""Payload, digest, dtype and shape of an event."""


class HierarchyReader:
    """The arrays and attributes of one ZIP archive that holds a Zarr hierarchy."""

    kind = "file"

    def __init__(self, file: Path) -> None:
        """Opens the file.

        Raises:
            CorruptTraceError: It is no sound archive; names it.
        """
        self.file = file
        self._infos: dict[str, ArrayInfo] = {}
        with self.reading():
            self.archive = self._opened(file)

    def _opened(self, file: Path) -> Archive:
        return Archive(file)

    def reading(self) -> _Reading:
        """Turns whatever goes wrong while reading this file into one sentence that names it."""
        return _Reading(f"{self.kind} {self.file}")

    def attributes(self) -> Mapping[str, Any]:
        """Attribute `tracediff` of the root group."""
        root = self._document(MANIFEST)
        attributes = root.get("attributes") if isinstance(root, dict) else None
        found = attributes.get("tracediff") if isinstance(attributes, dict) else None
        if not isinstance(found, dict):
            raise ValueError(f"it is no {self.kind} of a trace")
        return found

    def check_metadata(self) -> None:
        """Checks that the consolidated metadata is that of the nodes.

        Raises:
            ValueError: It is not; names the first node.
        """
        root = self._document(MANIFEST)
        consolidated = root.get("consolidated_metadata")
        found = consolidated.get("metadata") if isinstance(consolidated, dict) else None
        suffix = f"/{MANIFEST}"
        nodes = {name.removesuffix(suffix) for name in self.archive.entries if suffix in name}
        if not isinstance(found, dict) or found.keys() != nodes:
            raise ValueError("its consolidated metadata does not list its nodes")
        for path in nodes:
            if found[path] != self._document(path + suffix):
                raise ValueError(f"the consolidated metadata of {path} differs from its own")

    def _document(self, name: str) -> Any:
        return load_json(self.archive.read(name))

    def _info(self, path: str) -> ArrayInfo:
        if path not in self._infos:
            try:
                self._infos[path] = _parsed(self.archive.read(f"{path}/{MANIFEST}"))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        return self._infos[path]

    def _array(self, path: str, info: ArrayInfo, checked: bool = False) -> NDArray[Any]:
        """An array of the archive; `checked` also compares the bytes with their checksums."""
        keys = [f"{path}/{key}" for key in self._chunks(info)]
        if checked:
            for key in keys:
                self.archive.check(key)
        blocks = (_block(self.archive, key, info) for key in keys)
        if len(keys) == 1 and info.chunk == info.shape:
            return next(blocks)
        return _assemble(blocks, info)

    def _payload(self, path: str, info: ArrayInfo, checked: bool = False) -> NDArray[Any]:
        """As `_array`, of an array that may be compressed as far as the format allows it."""
        size = math.prod(info.shape) * info.dtype.itemsize
        if info.compressed and size > LARGEST_PAYLOAD:
            raise ValueError(f"{path} is compressed and {size} bytes long, which is too large")
        return self._array(path, info, checked)

    def _chunks(self, info: ArrayInfo) -> list[str]:
        """Keys of the chunks, after checking that the file can hold so many."""
        count = math.prod(-(-n // part) for n, part in zip(info.shape, info.chunk, strict=True))
        least = 0 if info.compressed else math.prod(info.shape) * info.dtype.itemsize
        if (
            count > len(self.archive.entries)
            or least > self.archive.size
            or (info.compressed and info.chunk_bytes > LARGEST_CHUNK)
        ):
            raise ValueError(f"an array of shape {info.shape} does not fit into the file")
        return chunk_keys(info.shape, info.chunk)


class SegmentReader(HierarchyReader):
    """One committed step."""

    kind = "segment"

    def __init__(self, file: Path, step: int) -> None:
        """Opens the segment.

        Raises:
            CorruptTraceError: It is no sound segment of this step; names it.
        """
        super().__init__(file)
        self.step = step
        self.column_bytes = 0
        self._sound: dict[_Identity, NDArray[Any] | None] = {}
        self._samples: SampleTable | None = None
        with self.reading():
            root = self._root()
            self._count: int = root["events"]
            self._has_sketches = root.get("sketches") == SKETCHES

    def events(self) -> list[Event]:
        """All events of the columns, by order."""
        with self.reading():
            names = [name for name in columns.COLUMNS if self._has(name)]
            return columns.decode({name: self._column(name) for name in names}, self.step)

    def samples(self) -> SampleRows:
        """The rows of the table of samples; none where the segment has no table."""
        table = self._table()
        if table is None:
            return SampleRows.of_events(())

        reading = self.reading()

        def event(row: int) -> Event:
            with reading:
                return table.event(row)

        return replace(table.rows(), event=event)

    def array(self, event: Event) -> NDArray[Any]:
        """The payload of an event that has one, compared with its digest when it is first read."""
        identity = event.payload, event.digest, event.dtype, event.shape
        if (known := self._sound.get(identity)) is not None:
            return known
        array = self.payload(event)
        if identity not in self._sound:
            with self.reading():
                if digest(array) != event.digest:
                    raise ValueError(f"the payload of {event.site} does not have its digest")
            # A mapped array takes no memory of its own, so it is kept; others are read again.
            self._sound[identity] = array if _is_mapped(array) else None
        return array

    def payload(self, event: Event) -> NDArray[Any]:
        """The payload of an event as it is in the file."""
        path = event.payload or ""
        if path.startswith(f"{GROUP}/") and (table := self._table()):
            with self.reading():
                return table.array(event)
        if f"{path}/{MANIFEST}" not in self.archive.entries:
            raise TraceError(f"{self.file} holds no payload {path!r} of {event.site}")
        with self.reading():
            info = self._info(path)
            if (info.data_type, info.shape) != (event.dtype, event.shape):
                raise ValueError(
                    f"{event.site} is {event.dtype} {event.shape}, and its payload is "
                    f"{info.data_type} {info.shape}"
                )
            return self._payload(path, info)

    def _root(self) -> Mapping[str, Any]:
        """Attributes of a segment of this step."""
        found = self.attributes()
        if type(found.get("events")) is not int:
            raise ValueError("it is no segment of a trace")
        if found.get("format") != FORMAT or found.get("step") != self.step:
            raise ValueError(
                f"it holds step {found.get('step')} in format {found.get('format')}, expected "
                f"step {self.step} in format {FORMAT}"
            )
        return found

    def _table(self) -> SampleTable | None:
        """The table of samples, its columns read and checked when it is first asked for."""
        if self._samples is None and f"{GROUP}/{MANIFEST}" in self.archive.entries:
            from tracediff.trace.sample_table import SampleTable, parse_variants

            with self.reading():
                group = self._document(f"{GROUP}/{MANIFEST}")
                rows, variants = parse_variants(group)
                columns = {name: self._sample_column(name, rows) for name in COLUMNS}
                columns["digest"] = self._sample_column("digest", rows)
                pools = {name: self._pool(name) for name in POOLS}
                sizes = {name: info.shape[0] for name, info in pools.items()}

                archive = self.archive  # not self: a cycle would keep the file open

                def chunk(pool: str, number: int) -> NDArray[Any]:
                    return _block(archive, f"{GROUP}/{pool}/c/{number}", pools[pool])

                self._samples = SampleTable(self.step, columns, variants, sizes, chunk)
        return self._samples

    def _sample_column(self, name: str, rows: int) -> NDArray[Any]:
        path = f"{GROUP}/{name}"
        info = self._info(path)
        inner, data_type = ((16,), "uint8") if name == "digest" else ((), "int64")
        if (info.shape, info.chunk, info.data_type) != ((rows, *inner), (ROWS, *inner), data_type):
            raise ValueError(f"column {path} is {info.data_type} {info.shape}")
        column = self._array(path, info, checked=True)
        self.column_bytes += column.nbytes
        return column

    def _pool(self, name: str) -> ArrayInfo:
        info = self._info(f"{GROUP}/{name}")
        data_type = POOLS[name][0]
        if info.data_type != data_type or info.chunk != (CHUNK_BYTES // info.dtype.itemsize,):
            raise ValueError(f"{GROUP}/{name} is {info.data_type} in chunks of {info.chunk}")
        return info

    def _has(self, column: str) -> bool:
        """Whether a column is to be read: it is there, or it has to be, and it means something."""
        if column in columns.SKETCHES and not self._has_sketches:
            return False
        return column not in columns.OPTIONAL or (
            f"events/{column}/{MANIFEST}" in self.archive.entries
        )

    def _column(self, name: str) -> columns.Column:
        path = f"events/{name}"
        info = self._info(path)
        columns.expect(name, info, self._count)
        if info.data_type == STRING:
            if not self._count:
                return []
            data = self.archive.read(f"{path}/c/0")
            self.column_bytes += len(data)
            if info.compressed:
                data = decompress(data, min(stated_size(data), LARGEST_TEXT))
            return columns.decode_strings(data, self._count)
        if info.compressed and name not in columns.PACKED:
            raise ValueError(f"column {name} is compressed")
        array = self._payload(path, info, checked=True)
        keys = (f"{path}/{key}" for key in self._chunks(info))
        self.column_bytes += sum(self.archive.entries[key].size for key in keys)
        return array


@lru_cache(maxsize=1 << 10)
def _parsed(document: bytes) -> ArrayInfo:
    """An array's metadata: few different ones in a trace, and most of what it takes to read one."""
    return parse_array(load_json(document))


class _Reading:
    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if isinstance(error, KeyError):
            what = f"entry {error} is missing"
        elif isinstance(error, ValueError | TypeError | OverflowError | OSError | RecursionError):
            what = str(error)
        else:
            return
        raise CorruptTraceError(
            f"{self._what} is damaged: {what}. Run `tracediff verify` on the trace"
        ) from error


def _block(archive: Archive, key: str, info: ArrayInfo) -> NDArray[Any]:
    """One chunk of an array."""
    if info.compressed:
        data = decompress(archive.read(key), info.chunk_bytes)
        return np.frombuffer(data, info.dtype).reshape(info.chunk)
    mapped, start, size = archive.view(key)
    if size != info.chunk_bytes:
        raise ValueError(f"entry {key} has {size} bytes, expected {info.chunk_bytes}")
    flat = np.frombuffer(mapped, info.dtype, size // info.dtype.itemsize, start)
    return flat.reshape(info.chunk)


def _is_mapped(array: NDArray[Any]) -> bool:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap)


def _corners(info: ArrayInfo) -> Iterator[tuple[int, ...]]:
    """Places of an array's chunks in its grid; of an empty array none, however long other axes."""
    if 0 not in info.shape:
        parts = zip(info.shape, info.chunk, strict=True)
        yield from product(*(range(-(-size // part)) for size, part in parts))


def _assemble(blocks: Iterable[NDArray[Any]], info: ArrayInfo) -> NDArray[Any]:
    """Puts the chunks of an array together, dropping what pads the last ones."""
    whole = np.empty(info.shape, info.dtype)
    for block, corner in zip(blocks, _corners(info), strict=True):
        start = [at * part for at, part in zip(corner, info.chunk, strict=True)]
        target = whole[
            tuple(slice(at, at + part) for at, part in zip(start, info.chunk, strict=True))
        ]
        target[...] = block[tuple(map(slice, target.shape))]
    whole.flags.writeable = False
    return whole
