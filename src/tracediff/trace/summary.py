"""Digest, fingerprint and sketch of an array: what an event keeps when it keeps no payload.

All three are functions of the logical value alone (shape, dtype, elements in C order), so the same
tensor gives the same summary on every stack and device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tracediff.kernels import SKETCH_SIZE as SKETCH_SIZE
from tracediff.kernels import STATISTICS, signed_buckets
from tracediff.kernels import fingerprint as statistics_of
from tracediff.kernels import summary as all_of

FINGERPRINT_FIELDS: Final = STATISTICS

SHORT_SKETCH: Final = 32
"""Buckets of a short sketch: every eighth of a whole one's, summed."""

SKETCHES: Final = 2
"""The definition of sketches; those of another one are not comparable and are not read."""

DETAIL_LIMIT: Final = 1 << 14
"""Fingerprints of larger tensors are brief: quantiles cost more than the rest of it,
and the more elements two of one distribution have, the more alike their quantiles are. Tensors of
other values differ in mean, norm and extremes."""

_ATOMS: Final = frozenset({type(None), bool, int, float, str})
"""Types whose values are JSON as they stand, but for integers that are too large."""
_WIDEST: Final = 1023
"""Bits of an integer that every reader takes: `documents.LARGEST_DIGITS` in binary."""


def digest(array: NDArray[Any]) -> bytes:
    """xxh3-128 of the elements in C order, little-endian: 16 bytes.

    Shape and dtype are no part of it; they are compared as fields of the event.
    """
    if not (array.dtype.isbuiltin == 1 and array.dtype.isnative and array.flags.c_contiguous):
        array = _bytes(array)
    return xxhash.xxh3_128_digest(array.data)


class Plain(dict[str, Any]):
    """A mapping of JSON types, as `plain` makes them, which nobody changes any more."""

    __slots__ = ()


def plain(value: Any) -> Any:
    """The JSON value that stands for `value`: what a trace keeps of texts, scalars and settings.

    Mappings get string keys, tuples and sets become lists, NumPy scalars and arrays their Python
    values, and anything else its `str`. An integer beyond float64 is a text of hexadecimal digits.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value if _is_narrow(value) else hex(value)
    if kind is dict:
        return {key if type(key) is str else str(key): plain(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        types = set(map(type, value))
        if types <= _ATOMS and (int not in types or all(map(_is_narrow, value))):
            return list(value)
        return [plain(item) for item in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    """As `plain`, of what is of none of the classes that nearly all values are of."""
    if isinstance(value, int) and value.bit_length() > _WIDEST:
        return hex(value)
    if isinstance(value, bool | int | float | str):
        # Subclasses (enumerations, NumPy's float64) print in their own ways.
        for base in (bool, int, float, str):
            if isinstance(value, base):
                return base(value) if base is not str else str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist()) if value.dtype.kind in "biufSU" else str(value)
    return str(value)


def _is_narrow(value: Any) -> bool:
    return type(value) is not int or value.bit_length() <= _WIDEST


def digest_value(value: Any) -> bytes:
    """xxh3-128 of a text (UTF-8, lone surrogates kept) or of the canonical JSON of a value.

    Of what a trace keeps, that is, which may be a text where the value is none.
    """
    kept = value if isinstance(value, str) else plain(value)
    text = kept if isinstance(kept, str) else json.dumps(kept, sort_keys=True)
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


def fingerprint(array: NDArray[Any], *, brief: bool = False) -> tuple[float, ...]:
    """Statistics that do not change when a tensor is transposed, reshaped or permuted.

    Args:
        brief: Leave third and fourth moment and the quantiles NaN, as they are of more than
            `DETAIL_LIMIT` elements. They tell apart operations that have no names; where values are
            paired by name, a sixth of the cost is enough.

    Returns:
        One float64 per name in `FINGERPRINT_FIELDS`. Sums are accumulated in float64 in an order
        that machines share, and a re-layout changes them by rounding in float64 only.
    """
    return statistics_of(_flat(array), full=not brief and array.size <= DETAIL_LIMIT)


def summary(
    array: NDArray[Any], *, brief: bool, buckets: NDArray[np.float64] | None = None
) -> tuple[bytes, bytes]:
    """`digest`, `fingerprint` (as `kernels.packed`), and `sketch` for nearly nothing, of an array
    in C order.

    Args:
        buckets: Where the sketch is put, if it is wanted: (SKETCH_SIZE,).
    """
    full = not brief and array.size <= DETAIL_LIMIT
    flat = _flat(array) if array.dtype.kind == "c" else array
    found, statistics = all_of(flat, full, buckets)
    return found or digest(array), statistics


def euclidean_norm(statistics: Sequence[float]) -> float:
    """The norm of all elements, from a fingerprint: NaN or infinite where one of them is."""
    values = dict(zip(FINGERPRINT_FIELDS, statistics, strict=True))
    if values["nan"]:
        return math.nan
    return math.inf if values["inf"] else values["l2"]


def sketch(array: NDArray[Any]) -> NDArray[np.float64]:
    """A linear random projection onto 256 signed buckets, accumulated in float64.

    The Euclidean norm of the difference of two sketches estimates that of the tensors
    (the count sketch of Charikar, Chen and Farach-Colton, 2002). Every 256 elements in C order are
    a row, which fills each bucket once, in turn from one that is hashed from the row's number; so
    are the signs. Two elements of a row never share a bucket, and those of two rows do as seldom
    as if each had one of its own.
    """
    return signed_buckets(_flat(array))


def shortened(whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """The short sketch of what a sketch was made of; a short one as it is. Of many: shape
    (sketches, buckets).

    A distance is then good to 1/sqrt(2 * 32) = 12% (standard deviation) instead of 4.4%.
    """
    shape = (*whole.shape[:-1], -1, SHORT_SKETCH)
    short: NDArray[np.float64] = whole.reshape(shape).sum(axis=-2)
    return short


def sketched_distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Estimates the Euclidean distance of two tensors from sketches, each whole or short."""
    if a.size != b.size:
        a, b = shortened(a), shortened(b)
    return float(np.linalg.norm(a - b))


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The elements in C order, little-endian, as bytes."""
    contiguous = np.ascontiguousarray(array)
    if contiguous.dtype.byteorder == ">":
        contiguous = contiguous.astype(contiguous.dtype.newbyteorder("<"))
    return contiguous.reshape(-1).view(np.uint8)


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    """The elements in C order; a complex one counts as two, so that its phase shows."""
    if array.dtype.kind == "c":
        flat = array.ravel()
        return flat.view(flat.real.dtype)
    return array if array.flags.c_contiguous else array.ravel()
