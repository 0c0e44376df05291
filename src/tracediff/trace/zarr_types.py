"""Teaches zarr-python the data types of `dtypes.EXTENSION_NAMES`.

Importing this module registers them, so that zarr and xarray open the segments of a trace as they
are. The trace reader itself does not need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from zarr.core.dtype.common import DataTypeValidationError, HasEndianness, HasItemSize
from zarr.core.dtype.wrapper import ZDType
from zarr.dtype import data_type_registry

from tracediff.trace.dtypes import DTYPES, EXTENSION_NAMES


@dataclass(frozen=True)
class MachineLearningFloat(ZDType[np.dtype[Any], Any], HasItemSize):
    """A floating-point type of ml_dtypes under the name of Zarr's extension registry."""

    _zarr_v3_name: ClassVar[str]
    native: ClassVar[np.dtype[Any]]

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if dtype != cls.native:
            raise DataTypeValidationError(f"{dtype} is not {cls.native}")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        return self.native

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError(f"{data!r}: Zarr format 2 has no {cls._zarr_v3_name}")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name}")
        return cls()

    def to_json(self, zarr_format: Literal[2, 3]) -> Any:
        if zarr_format == 2:
            raise ValueError(f"Zarr format 2 has no {self._zarr_v3_name}")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.generic)

    def cast_scalar(self, data: object) -> Any:
        return np.asarray(data, dtype=self.native)[()]

    def default_scalar(self) -> Any:
        return np.zeros((), self.native)[()]

    def from_json_scalar(self, data: Any, *, zarr_format: Literal[2, 3]) -> Any:
        if isinstance(data, str) and data.startswith("0x"):
            bits = int(data, 16).to_bytes(self.item_size, "little")
            return np.frombuffer(bits, self.native)[0]
        return self.cast_scalar(float(data))

    def to_json_scalar(self, data: object, *, zarr_format: Literal[2, 3]) -> Any:
        """A number, or the bits in hexadecimal for NaN and the infinities."""
        scalar = np.asarray(data, self.native)
        if np.isfinite(scalar.astype(np.float64)):
            return float(scalar)
        return f"0x{int.from_bytes(scalar.tobytes(), 'little'):0{2 * self.item_size}x}"

    @property
    def item_size(self) -> int:
        return self.native.itemsize


@dataclass(frozen=True)
class _LittleEndian(MachineLearningFloat, HasEndianness):
    """A type of several bytes; ml_dtypes has it in the machine's own order only."""

    def to_native_dtype(self) -> np.dtype[Any]:
        if self.endianness != "little":
            raise DataTypeValidationError(f"{self._zarr_v3_name} is read little-endian only")
        return self.native


for _name in EXTENSION_NAMES:
    _native = DTYPES[_name]
    _base = _LittleEndian if _native.itemsize > 1 else MachineLearningFloat
    _members = {"_zarr_v3_name": _name, "native": _native, "dtype_cls": type(_native)}
    data_type_registry.register(_name, dataclass(frozen=True)(type(_name, (_base,), _members)))
