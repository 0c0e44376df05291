"""Data types that a trace can hold, by the names that Zarr v3 and its extension registry give them.

NumPy, ml_dtypes and Zarr agree on these names, so one string serves as the logical dtype of an
event and as the `data_type` of its payload.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import ml_dtypes
import numpy as np

from tracediff.errors import TraceError

EXTENSION_NAMES: Final = (
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
"""Names that zarr-python does not know by itself; see `zarr_types`."""

_NUMPY_NAMES: Final = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in _NUMPY_NAMES},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in EXTENSION_NAMES},
}
"""Little-endian NumPy dtype of every name that a trace can hold."""


def fill_value(name: str) -> Any:
    """A fill value as JSON. Every chunk is written, so that no reader ever uses it."""
    if name == "float8_e8m0fnu":
        return 1.0  # this type has no zero
    kind = DTYPES[name].kind
    return {"b": False, "i": 0, "u": 0, "c": [0.0, 0.0]}.get(kind, 0.0)


@lru_cache
def storable(dtype: np.dtype[Any]) -> str:
    """Name under which arrays of this dtype, of either byte order, are stored.

    Raises:
        TraceError: No Zarr data type stands for it (objects, dates, structures).
    """
    name = dtype.name  # a property that NumPy works out anew each time
    if name not in DTYPES:
        raise TraceError(
            f"dtype {name!r} cannot be stored in a trace: convert it to one of {', '.join(DTYPES)}"
        )
    return name
