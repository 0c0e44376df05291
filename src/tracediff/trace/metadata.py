"""Zarr v3 metadata documents, written as text and read with suspicion."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Final

import numpy as np

from tracediff.trace.compression import Compression
from tracediff.trace.dtypes import DTYPES, fill_value

CHUNK_LIMIT: Final = 64 << 20
"""Largest chunk in bytes, unless one element of the last axis were larger."""

STRING: Final = "string"
MAX_DIMS: Final = 64


def chunk_shape(shape: Sequence[int], itemsize: int, limit: int = CHUNK_LIMIT) -> tuple[int, ...]:
    """Splits an array along its leading axes only, so that every chunk is one run of bytes."""
    chunk = [max(1, size) for size in shape]
    for axis, size in enumerate(chunk):
        row = math.prod(chunk[axis + 1 :]) * itemsize
        if size * row <= limit:
            break
        parts = math.ceil(size / max(1, limit // row))
        chunk[axis] = math.ceil(size / parts)
    return tuple(chunk)


def chunk_keys(shape: Sequence[int], chunk: Sequence[int]) -> list[str]:
    """Keys of all chunks in C order, relative to their array; none if the array is empty."""
    if 0 in shape:
        return []  # `product` would unroll the other axes first
    grid = [range(-(-size // part)) for size, part in zip(shape, chunk, strict=True)]
    return ["/".join(("c", *map(str, place))) for place in product(*grid)]


@lru_cache(maxsize=4096)
def array_json(
    shape: tuple[int, ...],
    chunk: tuple[int, ...],
    data_type: str,
    dims: tuple[str, ...] = (),
    compression: Compression | None = None,
) -> str:
    """The `zarr.json` of an array of strings or of one of `dtypes.DTYPES`."""
    if data_type == STRING:
        codec: dict[str, Any] = {"name": "vlen-utf8", "configuration": {}}
        fill: Any = ""
    else:
        codec = {"name": "bytes"}
        if DTYPES[data_type].itemsize > 1:
            codec["configuration"] = {"endian": "little"}
        fill = fill_value(data_type)
    itemsize = 1 if data_type == STRING else DTYPES[data_type].itemsize
    packed = [] if compression is None else [compression.codec_json(itemsize)]
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [codec, *packed],
        "attributes": {},
        "storage_transformers": [],
    }
    if dims:
        document["dimension_names"] = dims
    return json.dumps(document, separators=(",", ":"))


def group_json(attributes: Mapping[str, Any], metadata: str | None = None) -> str:
    """The `zarr.json` of a group.

    Args:
        metadata: That of all nodes below it, see `consolidated`, if it is to be there.
    """
    head = f'{{"zarr_format":3,"node_type":"group","attributes":{json.dumps(dict(attributes))}'
    if metadata is None:
        return head + "}"
    return (
        f'{head},"consolidated_metadata":{{"kind":"inline","must_understand":false,'
        f'"metadata":{{{metadata}}}}}}}'
    )


def consolidated(nodes: Mapping[str, str]) -> str:
    """The metadata of all nodes of a group in one.

    Args:
        nodes: `zarr.json` text by path. Siblings are written next to each other: zarr 3.1.6
            cannot read consolidated metadata otherwise.
    """
    paths = sorted(nodes, key=lambda path: (path.count("/"), path.split("/")))
    return ",".join([f"{json.dumps(path)}:{nodes[path]}" for path in paths])


def parents(paths: Iterable[str]) -> set[str]:
    """Paths of all groups above these nodes, without the root."""
    found: set[str] = set()
    for path in paths:
        while "/" in path:
            path = path.rpartition("/")[0]
            if path in found:
                break
            found.add(path)
    return found


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """What the reader needs of an array's metadata, checked to be sane."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    data_type: str
    compressed: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        return DTYPES[self.data_type]

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * self.dtype.itemsize


def parse_array(document: Any) -> ArrayInfo:
    """Reads an array's `zarr.json`.

    Raises:
        ValueError: It is no metadata of an array that a trace can hold; says what is wrong.
    """
    if not isinstance(document, dict) or document.get("node_type") != "array":
        raise ValueError("it is no array")
    data_type = document.get("data_type")
    if not isinstance(data_type, str) or (data_type != STRING and data_type not in DTYPES):
        raise ValueError(f"its data type is {data_type!r}")
    codecs = document.get("codecs")
    names = (
        [c.get("name") for c in codecs if isinstance(c, dict)] if isinstance(codecs, list) else []
    )
    first = "vlen-utf8" if data_type == STRING else "bytes"
    if names not in ([first], [first, "blosc"]):
        raise ValueError(f"its codecs are {names}, which this release does not read")
    grid = document.get("chunk_grid")
    configuration = grid.get("configuration") if isinstance(grid, dict) else None
    chunk = configuration.get("chunk_shape") if isinstance(configuration, dict) else None
    shape = check_shape(document.get("shape"))
    parts = check_shape(chunk)
    if len(parts) != len(shape) or not all(parts):
        raise ValueError(f"its shape is {shape} in chunks of {parts}")
    return ArrayInfo(shape, parts, data_type, names[1:] == ["blosc"])


def check_shape(shape: Any) -> tuple[int, ...]:
    """A shape from JSON as a tuple.

    Raises:
        ValueError: It is no list of sizes, or no machine could address such an array.
    """
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"its shape is {shape!r}")
    if len(shape) > MAX_DIMS or math.prod(size or 1 for size in shape) >= 1 << 58:
        raise ValueError(f"its shape {tuple(shape)} is absurd")
    return tuple(shape)
