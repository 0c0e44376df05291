"""Writes the rendered samples of a step into the table that `samples` describes.

Chunks are written as they fill up, so that memory does not grow with the values.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.events import Event
from tracediff.trace.compression import CHUNK_BYTES, NUMBERS, TEXTS, compress
from tracediff.trace.dtypes import DTYPES
from tracediff.trace.metadata import array_json
from tracediff.trace.samples import (
    ATTRIBUTES,
    COLUMNS,
    DIGEST_SIZE,
    GROUP,
    INTEGERS,
    POOLS,
    ROWS,
    TEXT,
    Root,
    place_of,
)
from tracediff.trace.summary import plain

_REMEMBERED: Final = 1 << 17
"""Values of one kind that a later equal one can refer to."""

_LIMITS: Final = np.iinfo(np.int32)

Add = Callable[[str, bytes], None]
"""Appends an entry to the archive."""


class SampleWriter:
    """Collects rows and writes them chunk by chunk.

    Args:
        add: Where finished chunks go.
    """

    def __init__(self, add: Add) -> None:
        self.rows = 0
        self._columns = {name: array("q") for name in COLUMNS}
        self._digests = bytearray()
        self._chunks = 0
        self._pools = {name: _Pool(name, add) for name in POOLS}
        self._variants: dict[Any, int] = {}
        self._documents: list[dict[str, Any]] = []
        self._root = Root()
        self._add = add

    def take(self, event: Event, payload: NDArray[Any] | None) -> bool:
        """Adds an event as a row, if it is one of a sample whose value fits the table."""
        place = place_of(event)
        if place is None or event.sketch is not None or len(event.digest) != DIGEST_SIZE:
            return False
        value = _data(event, payload)
        if value is None:
            return False
        pool, data, tail = value
        start = self._pools[pool].put(data, event.digest, event.dtype)
        index, name = place
        variant, own = self._variant(event, name, pool, tail)
        self._pools[ATTRIBUTES].append(own)
        row = (index, event.order, variant, start, len(data), len(own))
        for column, number in zip(self._columns.values(), row, strict=True):
            column.append(number)
        self._digests += event.digest
        self.rows += 1
        if len(self._columns["sample"]) == ROWS:
            self._flush()
        return True

    def finish(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Writes what is left.

        Returns:
            The metadata of the arrays by path, and the attributes of their group.
        """
        if self._columns["sample"]:
            self._flush()
        nodes = {pool.path: pool.finish() for pool in self._pools.values()}
        for name in COLUMNS:
            nodes[f"{GROUP}/{name}"] = array_json((self.rows,), (ROWS,), "int64", ("row",), NUMBERS)
        shape, chunk = (self.rows, DIGEST_SIZE), (ROWS, DIGEST_SIZE)
        nodes[f"{GROUP}/digest"] = array_json(shape, chunk, "uint8", ("row", "byte"), TEXTS)
        return nodes, {"rows": self.rows, "variants": self._documents}

    @property
    def root(self) -> bytes:
        """See `SampleRows.root`; complete after `finish`."""
        return self._root.value(self.rows)

    def _variant(
        self, event: Event, name: str, pool: str, tail: list[int] | None
    ) -> tuple[int, bytes]:
        """The number of what the row has in common with others, and its own attributes as JSON.

        Its own are those that differ from the attributes of the first such row.
        """
        back = tuple(event.order - order for order in event.inputs)
        attributes = plain(event.attributes) if event.attributes else {}
        is_json = event.value is not None and not isinstance(event.value, str)
        common = (name, event.kind, event.op, event.source, event.dtype, event.dims, back)
        key = (*common, is_json, None if tail is None else tuple(tail), *sorted(attributes))
        found = self._variants.get(key)
        if found is None:
            found = self._variants[key] = len(self._documents)
            fields = ("step", "kind", "op", "source", "dtype", "dims", "inputs_back")
            document: dict[str, Any] = dict(zip(fields, common, strict=True))
            document |= {"attributes": attributes, "pool": pool, "inner_shape": tail}
            document["json"] = is_json
            self._documents.append(document)
        first = self._documents[found]["attributes"]
        own = {key: value for key, value in attributes.items() if not _same(first[key], value)}
        return found, json.dumps(own, separators=(",", ":")).encode() if own else b""

    def _flush(self) -> None:
        columns = {name: np.array(self._columns[name], "<i8") for name in COLUMNS}
        digest = np.frombuffer(bytes(self._digests), np.uint8).reshape(-1, DIGEST_SIZE)
        names = [document["step"] for document in self._documents]
        self._root.add(columns["sample"], columns["variant"].astype(np.int32), names, digest)
        for name, column in columns.items():
            self._add(f"{GROUP}/{name}/c/{self._chunks}", compress(_padded(column), NUMBERS))
            del self._columns[name][:]
        chunk = compress(_padded(digest), TEXTS)
        self._add(f"{GROUP}/digest/c/{self._chunks}/0", chunk)
        self._digests.clear()
        self._chunks += 1


class _Pool:
    """Values end to end, written in chunks of `CHUNK_BYTES`; equal ones are kept once."""

    def __init__(self, name: str, add: Add) -> None:
        self.path = f"{GROUP}/{name}"
        self.data_type, self._dim = POOLS[name]
        self._dtype = DTYPES[self.data_type].newbyteorder("<")
        self._add = add
        self._pending = bytearray()
        self._written = 0
        self._known: OrderedDict[tuple[bytes, str], int] = OrderedDict()

    def put(self, data: bytes | NDArray[Any], digest: bytes, dtype: str) -> int:
        """Where the value begins, in elements."""
        key = (digest, dtype)
        known = self._known.get(key)
        if known is not None:
            return known
        start = (self._written * CHUNK_BYTES + len(self._pending)) // self._dtype.itemsize
        self._known[key] = start
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        self.append(data if isinstance(data, bytes) else data.tobytes())
        return start

    def append(self, data: bytes) -> None:
        """Adds elements at the end."""
        self._pending += data
        while len(self._pending) >= CHUNK_BYTES:
            self._write(self._pending[:CHUNK_BYTES])
            del self._pending[:CHUNK_BYTES]

    def finish(self) -> str:
        """Writes the last chunk, padded with zeros; returns the metadata."""
        itemsize = self._dtype.itemsize
        size = (self._written * CHUNK_BYTES + len(self._pending)) // itemsize
        if self._pending:
            self._write(self._pending.ljust(CHUNK_BYTES, b"\0"))
        chunk = (CHUNK_BYTES // itemsize,)
        return array_json((size,), chunk, self.data_type, (self._dim,), TEXTS)

    def _write(self, chunk: bytearray) -> None:
        data = compress(np.frombuffer(chunk, self._dtype), TEXTS)
        self._add(f"{self.path}/c/{self._written}", data)
        self._written += 1


def _data(
    event: Event, payload: NDArray[Any] | None
) -> tuple[str, bytes | NDArray[Any], list[int] | None] | None:
    """The pool of a value, its elements, and for arrays the shape but for the first axis."""
    if payload is None:
        if event.value is None or event.dtype:
            return None
        text = event.value if isinstance(event.value, str) else json.dumps(plain(event.value))
        return TEXT, text.encode("utf-8", "surrogatepass"), None
    if event.value is not None or payload.dtype.kind not in "biu" or not payload.ndim:
        return None
    if 0 in payload.shape[1:]:
        return None  # the length alone does not tell the first axis
    small = payload.dtype.itemsize < 4 or payload.dtype == np.int32
    if not small and payload.size and not _fits(payload):
        return None
    flat = np.ascontiguousarray(payload, "<i4").reshape(-1)
    return INTEGERS, flat, list(payload.shape[1:])


def _same(first: Any, value: Any) -> bool:
    """Whether the JSON is the same, of which Python's equality says less (1, 1.0 and true)."""
    return type(first) is type(value) and first == value and repr(first) == repr(value)


def _fits(array: NDArray[Any]) -> bool:
    return bool(array.min() >= _LIMITS.min and array.max() <= _LIMITS.max)


def _padded(rows: NDArray[Any]) -> NDArray[Any]:
    """A whole chunk of rows, as Zarr wants it."""
    if len(rows) == ROWS:
        return rows
    whole = np.zeros((ROWS, *rows.shape[1:]), rows.dtype)
    whole[: len(rows)] = rows
    return whole
