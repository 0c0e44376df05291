"""Events as columns: one Zarr array per field, one element per event."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numcodecs import VLenUTF8  # type: ignore[import-untyped]
from numpy.typing import NDArray

from tracediff.events import Event, Site
from tracediff.trace.compression import LARGEST_TEXT, TEXTS, compress
from tracediff.trace.documents import load_attributes, load_json
from tracediff.trace.metadata import ArrayInfo, check_shape
from tracediff.trace.names import escape_text, unescape_text
from tracediff.trace.rows import Fields, Outline, Rows
from tracediff.trace.summary import FINGERPRINT_FIELDS, SHORT_SKETCH, SKETCH_SIZE

DIGEST_SIZE: Final = 16
_NO_DIGEST: Final = bytes(DIGEST_SIZE)
_NOWHERE: Final = np.empty(0, np.int64)

Column = NDArray[Any] | list[str]

_TEXTS: Final = (
    "phase", "path", "port", "kind", "op", "source", "dtype", "shard", "payload"
)  # fmt: skip
_JSON: Final = ("shape", "dims", "inputs", "value", "attributes")

STRING_COLUMNS: Final = (*_TEXTS, *_JSON)

_LAYOUT: Final[Mapping[str, tuple[str, tuple[int, ...]]]] = {
    "order": ("int64", ()),
    "call": ("int64", ()),
    "digest": ("uint8", (DIGEST_SIZE,)),
    "fingerprint": ("float64", (len(FINGERPRINT_FIELDS),)),
    "sketch": ("float64", (SKETCH_SIZE,)),
    "sketch_index": ("int64", ()),
    "short_sketch": ("float64", (SHORT_SKETCH,)),
    "short_sketch_index": ("int64", ()),
}
_SKETCHES: Final[Mapping[str, int]] = {"sketch": SKETCH_SIZE, "short_sketch": SHORT_SKETCH}
SKETCHES: Final = frozenset(f"{name}{part}" for name in _SKETCHES for part in ("", "_index"))
"""Columns that mean nothing where sketches are defined otherwise."""
OPTIONAL: Final = ("shard", "short_sketch", "short_sketch_index")
"""Columns that a segment need not have; no event then has such a value."""

COLUMNS: Final = ("digest", *sorted({*STRING_COLUMNS, *_LAYOUT} - {"digest"}))
"""In the order in which they are read: digests bound the number of events."""

PACKED: Final = frozenset(_LAYOUT) - {"digest"}
"""Columns of numbers that are compressed. Digests cannot be, and bound the number of events that a
file may promise by its size."""

OUTLINED: Final = frozenset((*Fields._fields, "sketch_index", "short_sketch_index"))
"""Columns that follow from an `Outline`."""

DIMS: Final[Mapping[str, tuple[str, ...]]] = {
    "digest": ("event", "byte"),
    "fingerprint": ("event", "statistic"),
    "sketch": ("sketch", "bucket"),
    "sketch_index": ("sketch",),
    "short_sketch": ("short_sketch", "bucket"),
    "short_sketch_index": ("short_sketch",),
}
"""Dimension names of columns that have other ones than `event` alone."""


@dataclass(frozen=True, slots=True)
class Texts:
    """A column of strings as it is stored.

    Attributes:
        packed: Whether `data` is compressed.
    """

    data: bytes
    packed: bool


class Encoder:
    """Encodes the columns of strings of one step after the other.

    Steps repeat themselves: a column that holds what it held in the step before is not encoded and
    compressed again.
    """

    def __init__(self) -> None:
        self._latest: dict[str, tuple[Sequence[Any], Texts]] = {}
        self._outline: Outline | None = None
        self._outlined: dict[str, Texts] = {}

    def encode(self, rows: Rows) -> dict[str, Texts]:
        """The columns of strings, by name."""
        outline = rows.outline
        if outline is not self._outline:
            self._outline, self._outlined = outline, self._of_heads(outline)
        columns = dict(self._outlined)
        columns["payload"] = self._column("payload", rows.payloads, _escaped)
        # Equal values need not have equal JSON: 1 and true.
        values = ["" if value is None else _encode_json(value) for value in rows.values]
        columns["value"] = self._column("value", values, str)
        attributes = [_encode_json(held) if held else "" for held in rows.attributes]
        columns["attributes"] = self._column("attributes", attributes, str)
        return columns

    def _of_heads(self, outline: Outline) -> dict[str, Texts]:
        columns = {}
        for name in Fields._fields:
            texts = getattr(outline.fields, name)
            if name in _TEXTS and (name not in OPTIONAL or any(texts)):
                columns[name] = self._column(name, texts, _escaped)
            elif name in _ITEMS:
                columns[name] = self._column(name, texts, _dump_tuple)
        return columns

    def _column(self, name: str, rows: Sequence[Any], text_of: Callable[[Any], str]) -> Texts:
        latest = self._latest.get(name)
        if latest is None or latest[0] != rows:
            latest = self._latest[name] = rows, _packed([text_of(row) for row in rows])
        return latest[1]


def _escaped(text: str | None) -> str:
    return escape_text(text) if text else ""


def _packed(texts: Sequence[str]) -> Texts:
    """Compressed, as names repeat themselves and take a tenth."""
    encoded = encode_strings(texts)
    if len(encoded) > LARGEST_TEXT:
        return Texts(encoded, packed=False)
    return Texts(compress(np.frombuffer(encoded, np.uint8), TEXTS), packed=True)


def numbers(rows: Rows) -> dict[str, NDArray[Any]]:
    """The columns of numbers, by name; those that are `OUTLINED`, as the same arrays each time."""
    outline = rows.outline
    columns: dict[str, NDArray[Any]] = {"order": outline.orders, "call": outline.calls}
    digests = b"".join([digest or _NO_DIGEST for digest in rows.digests])
    columns["digest"] = np.frombuffer(digests, np.uint8).reshape(len(rows), DIGEST_SIZE)
    columns["fingerprint"] = rows.statistics
    for name, size in _SKETCHES.items():
        if size in rows.sketches or name not in OPTIONAL:
            columns[f"{name}_index"] = outline.sketched.get(size, _NOWHERE)
            columns[name] = rows.sketches.get(size, np.empty((0, size)))
    return columns


def decode(columns: Mapping[str, Column], step: int) -> list[Event]:
    """Undoes `Encoder.encode` and `numbers`, sorted by order.

    Args:
        columns: All of `COLUMNS` but for `OPTIONAL` ones, checked by `expect`.

    Raises:
        ValueError: A field does not hold what it should.
    """
    count = len(columns["order"])
    absent = [""] * count
    texts = {name: [unescape_text(t) for t in columns.get(name, absent)] for name in _TEXTS}
    tuples = {name: [_load_tuple(name, text) for text in columns[name]] for name in _ITEMS}
    values = [load_json(text) if text else None for text in columns["value"]]
    attributes = [load_attributes(text) for text in columns["attributes"]]
    order, call = (np.asarray(columns[name]).tolist() for name in ("order", "call"))
    digests = np.asarray(columns["digest"]).tobytes()
    fingerprint = np.asarray(columns["fingerprint"])
    present = (~np.isnan(fingerprint).all(axis=1)).tolist()
    statistics = fingerprint.tolist()
    sketches = _sketches(columns, count)
    events = []
    for i in range(count):
        digest = digests[i * DIGEST_SIZE : (i + 1) * DIGEST_SIZE]
        site = Site(step, texts["phase"][i], texts["path"][i], call[i], texts["port"][i])
        event = Event(
            site=site,
            order=order[i],
            kind=texts["kind"][i],
            op=texts["op"][i],
            source=texts["source"][i],
            dtype=texts["dtype"][i],
            shape=tuples["shape"][i],
            dims=tuples["dims"][i],
            shard=texts["shard"][i],
            digest=digest if any(digest) else b"",
            fingerprint=tuple(statistics[i]) if present[i] else (),
            sketch=sketches.get(i),
            inputs=tuples["inputs"][i],
            payload=texts["payload"][i] or None,
            value=values[i],
            attributes=attributes[i],
        )
        events.append(event)
    events.sort(key=lambda event: event.order)
    return events


def expect(name: str, info: ArrayInfo, count: int) -> None:
    """Checks a column's metadata against the layout that the format fixes.

    Raises:
        ValueError: It has another data type or shape.
    """
    data_type, row = _LAYOUT.get(name, ("string", ()))
    length = info.shape[0] if "sketch" in name and info.shape else count
    if (info.data_type, info.shape) != (data_type, (length, *row)) or length > count:
        raise ValueError(
            f"column {name} is {info.data_type} {info.shape}, expected {data_type} {(count, *row)}"
        )


def encode_strings(texts: Sequence[str]) -> bytes:
    """The bytes of a string column as Zarr's `vlen-utf8` codec defines them."""
    return bytes(VLenUTF8().encode(np.array(texts, dtype=object)))


def decode_strings(data: bytes, count: int) -> list[str]:
    """Undoes `encode_strings`.

    Raises:
        ValueError: The bytes do not hold that many strings.
    """
    # The codec allocates as many items as the first bytes claim, so they are checked before.
    if len(data) < 4 * (count + 1) or int.from_bytes(data[:4], "little") != count:
        raise ValueError(f"it does not hold {count} strings")
    return list(VLenUTF8().decode(data))


_encode_json: Final = json.JSONEncoder(separators=(",", ":")).encode
"""In ASCII, so that lone surrogates survive."""


@lru_cache(maxsize=1 << 12)
def _dump_tuple(value: tuple[int | str, ...]) -> str:
    """Shapes, names of dimensions, edges: few different ones, and the same in every step."""
    return _encode_json(value) if value else ""


_ITEMS: Final[Mapping[str, type]] = {"shape": int, "dims": str, "inputs": int}


@lru_cache(maxsize=1 << 14)
def _load_tuple(name: str, text: str) -> tuple[Any, ...]:
    items = load_json(text) if text else []
    if not isinstance(items, list) or not all(type(item) is _ITEMS[name] for item in items):
        raise ValueError(f"column {name} holds {text[:40]}")
    return check_shape(items) if name == "shape" else tuple(items)


def _sketches(columns: Mapping[str, Column], count: int) -> dict[int, NDArray[np.float64]]:
    found: dict[int, NDArray[np.float64]] = {}
    for name in _SKETCHES:
        if name not in columns:
            continue
        index = np.asarray(columns.get(f"{name}_index", ()), dtype=np.int64)
        rows = np.asarray(columns[name], dtype=np.float64)
        if len(index) != len(rows) or (index.size and not 0 <= index.min() <= index.max() < count):
            raise ValueError("the sketches do not belong to the events")
        found |= zip(index.tolist(), rows, strict=True)
    return found
