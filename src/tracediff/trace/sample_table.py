"""Reads the table of rendered samples of a step, believing nothing that it says of itself."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.events import Event, Site
from tracediff.trace.compression import CHUNK_BYTES
from tracediff.trace.documents import load_attributes, load_json
from tracediff.trace.dtypes import DTYPES
from tracediff.trace.metadata import check_shape
from tracediff.trace.samples import (
    ATTRIBUTES,
    COLUMNS,
    GROUP,
    INTEGERS,
    POOLS,
    TEXT,
    SampleRows,
)

_CACHED_CHUNKS: Final = 16


@dataclass(slots=True)
class SampleTable:
    """A table of rows as a segment holds it, checked; values are read when they are asked for.

    Attributes:
        step: Number of the segment's step.
        columns: Those of `COLUMNS`, and `digest`.
        variants: What rows have in common.
        sizes: Elements of each pool.
        chunk: Reads one chunk of a pool, as elements.
    """

    step: int
    columns: Mapping[str, NDArray[Any]]
    variants: Sequence[Mapping[str, Any]]
    sizes: Mapping[str, int]
    chunk: Callable[[str, int], NDArray[Any]]
    _chunks: OrderedDict[tuple[str, int], NDArray[Any]] = field(default_factory=OrderedDict)
    _own: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError where rows point outside of the table."""
        variant, start, length = (self.columns[name] for name in ("variant", "start", "length"))
        own = self.columns["attributes_length"]
        self._own = np.cumsum(own) - own
        if own.min(initial=0) < 0 or int(own.sum()) != self.sizes[ATTRIBUTES]:
            raise ValueError("the attributes of samples are not as long as their rows say")
        if not len(variant):
            return
        if variant.min() < 0 or variant.max() >= len(self.variants):
            raise ValueError("a row of samples has a variant that is not there")
        sizes = np.array([self.sizes[item["pool"]] for item in self.variants])[variant]
        if min(start.min(), length.min(), self.columns["sample"].min()) < 0 or bool(
            ((start > sizes) | (length > sizes - start)).any()
        ):
            raise ValueError("a row of samples lies outside of its values")

    def rows(self) -> SampleRows:
        """The rows, without their values."""
        steps: dict[tuple[str, str], int] = {}
        codes = [steps.setdefault((v["step"], v["dtype"]), len(steps)) for v in self.variants]
        return SampleRows(
            self.columns["sample"],
            np.array(codes or [0], np.int32)[self.columns["variant"]],
            list(steps),
            self.columns["order"],
            self.columns["digest"],
            self.event,
            self.having,
        )

    def having(self, attribute: str) -> NDArray[np.int64]:
        """The rows whose event has an attribute of that name."""
        has = np.array([attribute in v["attributes"] for v in self.variants] or [False])
        return np.flatnonzero(has[self.columns["variant"]])

    def event(self, row: int) -> Event:
        """The event of a row; integers are its payload, a text or another value its value."""
        number, order, variant, start, length, own = (int(self.columns[c][row]) for c in COLUMNS)
        common = self.variants[variant]
        inner = common["inner_shape"]
        value, shape = None, ()
        if inner is None:
            text = self._read(TEXT, start, length).tobytes().decode("utf-8", "surrogatepass")
            value = load_json(text) if common["json"] else text
        else:
            shape = (length // max(1, math.prod(inner)), *inner)
        return Event(
            site=Site(self.step, "rendering", f"sample[{number}].{common['step']}"),
            order=order,
            kind=common["kind"],
            op=common["op"],
            source=common["source"],
            dtype=common["dtype"],
            shape=shape,
            dims=tuple(common["dims"]),
            digest=self.columns["digest"][row].tobytes(),
            inputs=tuple(order - back for back in common["inputs_back"]),
            payload=None if inner is None else f"{GROUP}/{INTEGERS}@{start}",
            value=value,
            attributes={**common["attributes"], **self._own_attributes(row, own)},
        )

    def _own_attributes(self, row: int, length: int) -> Mapping[str, Any]:
        if not length:
            return {}
        return load_attributes(self._read(ATTRIBUTES, int(self._own[row]), length).tobytes())

    def array(self, event: Event) -> NDArray[Any]:
        """The integers of an event that `event` made, in its shape and dtype, read-only.

        Raises:
            ValueError: The event is not of this table.
        """
        begin = int((event.payload or "").rpartition("@")[2])
        size = math.prod(event.shape)
        if not 0 <= begin <= begin + size <= self.sizes[INTEGERS]:
            raise ValueError(f"{event.site} lies outside of its values")
        found = self._read(INTEGERS, begin, size).astype(DTYPES[event.dtype])
        found.flags.writeable = False
        return found.reshape(event.shape)

    def _read(self, pool: str, start: int, length: int) -> NDArray[Any]:
        """Elements of a pool, from the chunks that hold them."""
        per_chunk = CHUNK_BYTES // DTYPES[POOLS[pool][0]].itemsize
        numbers = range(start // per_chunk, -(-(start + length) // per_chunk))
        chunks = [self._cached(pool, number) for number in numbers]
        if not chunks or not length:
            return np.empty(0, DTYPES[POOLS[pool][0]])
        whole = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        offset = start - numbers.start * per_chunk
        return whole[offset : offset + length]

    def _cached(self, pool: str, number: int) -> NDArray[Any]:
        key = (pool, number)
        if key not in self._chunks:
            self._chunks[key] = self.chunk(pool, number)
            if len(self._chunks) > _CACHED_CHUNKS:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(key)
        return self._chunks[key]


def parse_variants(group: Any) -> tuple[int, list[Mapping[str, Any]]]:
    """Number of rows and the variants, from the metadata of the group.

    Raises:
        ValueError: They have another form; says what is wrong.
    """
    attributes = group.get("attributes") if isinstance(group, dict) else None
    found = attributes.get("tracediff") if isinstance(attributes, dict) else None
    if not isinstance(found, dict) or type(found.get("rows")) is not int:
        raise ValueError(f"group {GROUP} has no count of its rows")
    variants = found.get("variants")
    if not isinstance(variants, list):
        raise ValueError(f"group {GROUP} does not say what its rows record")
    for variant in variants:
        _check_variant(variant)
    return found["rows"], variants


_FIELDS: Final = {
    **dict.fromkeys(("step", "kind", "op", "source", "dtype", "pool"), str),
    **dict.fromkeys(("dims", "inputs_back"), list),
    "attributes": dict,
    "json": bool,
}


def _check_variant(variant: Any) -> None:
    wrong = not isinstance(variant, dict) or any(
        type(variant.get(name)) is not kind for name, kind in _FIELDS.items()
    )
    if wrong or variant["pool"] not in (TEXT, INTEGERS):
        raise ValueError(f"group {GROUP} has a variant of another form: {str(variant)[:80]}")
    inner = variant.get("inner_shape")
    if (inner is None) != (variant["pool"] == TEXT):
        raise ValueError(f"group {GROUP} has a variant of another form: {str(variant)[:80]}")
    if inner is not None and (0 in check_shape(inner) or variant["dtype"] not in DTYPES):
        raise ValueError(f"group {GROUP} has values of {variant['dtype']} in rows of {inner}")
    if not all(type(back) is int for back in variant["inputs_back"]):
        raise ValueError(f"group {GROUP} has a variant of another form: {str(variant)[:80]}")
