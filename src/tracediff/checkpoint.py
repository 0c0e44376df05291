"""The weight files that a run loaded: a third arm that says which side's parameters are wrong.

Recorders tell `Checkpoints` which safetensors files were opened. When the parameters of a model
have been recorded, the files are read again with the small reader here, which needs no framework,
and one event per file keeps name, dtype, shape and digest of each tensor. A tensor that no
parameter holds as it is, but that has the name of one, is kept with its values: what became of it
can then be judged without the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tracediff.errors import TraceError
from tracediff.events import Event
from tracediff.trace.summary import digest

if TYPE_CHECKING:
    from tracediff.tape import Tape

PORT: Final = "checkpoint"
"""Port of all events about weight files, in the stage `loading`; they are not aligned."""

_DTYPES: Final[Mapping[str, Any]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_LONGEST_HEADER: Final = 100_000_000
"""Bytes; the limit of the safetensors format."""


@dataclass(frozen=True, slots=True)
class _Place:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


def is_of_checkpoint(event: Event) -> bool:
    """Whether an event is about a weight file: evidence, and nothing to compare."""
    return event.site.phase == "loading" and event.site.port == PORT


class WeightFile:
    """A safetensors file: eight bytes of header length, a JSON header, then the tensors' bytes.

    Raises:
        TraceError: The file cannot be read or is no safetensors file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self._places = dict(self._read_header())
            self._bytes = np.memmap(self.path, np.uint8, "r")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(f"{path}: cannot be read as a safetensors file ({error})") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def array(self, name: str) -> NDArray[Any]:
        """The values of a tensor, mapped into memory, not copied.

        Raises:
            TraceError: The file ends before the tensor does.
        """
        place = self._places[name]
        size = int(np.prod(place.shape, dtype=np.int64)) * place.dtype.itemsize
        raw = self._bytes[place.start : place.start + size]
        if raw.size != size:
            raise TraceError(f"{self.path}: {name} is cut off")
        if place.start % place.dtype.itemsize:
            raw = raw.copy()  # the format does not promise alignment
        values: NDArray[Any] = np.asarray(raw).view(place.dtype).reshape(place.shape)
        return values

    def _read_header(self) -> Iterator[tuple[str, _Place]]:
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] in _DTYPES:
                dtype = np.dtype(_DTYPES[entry["dtype"]])
                start = 8 + length + int(entry["data_offsets"][0])
                yield name, _Place(dtype, tuple(map(int, entry["shape"])), start)


class Checkpoints:
    """For recorders: remembers which files were opened, and records them."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._opened: dict[str, bool] = {}  # path -> whether it has been recorded

    def opened(self, path: Any) -> None:
        """Takes note of a file; anything that is no path of a safetensors file is passed over."""
        if isinstance(path, str | os.PathLike) and str(path).endswith(".safetensors"):
            self._opened.setdefault(str(Path(path).absolute()), False)

    def watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose first argument (or `filename`, `file`) is a file it opens."""

        def opening(*args: Any, **kwargs: Any) -> Any:
            self.opened(args[0] if args else kwargs.get("filename", kwargs.get("file")))
            return original(*args, **kwargs)

        return opening

    def emit(self) -> None:
        """Records the files opened since the last time; to be called when parameters have been."""
        for path, recorded in self._opened.items():
            if recorded:
                continue
            self._opened[path] = True
            try:
                self._emit_file(WeightFile(path))
            except TraceError as error:
                self._tape.note(str(error))

    def _emit_file(self, file: WeightFile) -> None:
        tape, table = self._tape, {}
        dtypes = {dtype for _, dtype in tape.loaded.values()}
        values = set(tape.loaded.values())
        for name in file:
            array = file.array(name)
            loaded = _as_loaded(array, dtypes, values)
            table[name] = [array.dtype.name, list(array.shape), digest(array).hex(), loaded]
            if not loaded and named(name, tape.loaded) is not None:
                tape.emit("loading", name, PORT, array, attributes={"file": str(file.path)})
        value = {"file": str(file.path), "tensors": table, "config": _config(file.path)}
        number = sum(self._opened.values()) - 1
        tape.emit("loading", f"checkpoint[{number}]", PORT, value)


def _as_loaded(array: NDArray[Any], dtypes: set[str], values: set[tuple[bytes, str]]) -> str | None:
    """Digest of the array in the dtype in which a parameter holds it, or None if none does."""
    for name in sorted(dtypes, key=lambda name: name != array.dtype.name):
        converted = array.astype(getattr(ml_dtypes, name, name), copy=False)
        found = digest(converted)
        if (found, name) in values:
            return found.hex()
    return None


def _config(path: Path) -> dict[str, Any]:
    """The configuration that lies next to a weight file, or {}."""
    try:
        found = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def named(path: str, names: Any) -> str | None:
    """The one of `names` that means the same tensor as `path`: stacks and wrappers put components
    in front (`transformer.`, `base_model.model.`) or in between (`base_layer`, `default`).

    Returns:
        The name with the longest common end, which must be all of either but for at most two
        components; None where there is none, or no single one.
    """
    wanted = _components(path)
    best: list[str] = []
    longest = 1
    for name in names:
        parts = _components(name)
        common = _common_end(wanted, parts)
        if min(len(wanted), len(parts)) - common > 1 or max(len(wanted), len(parts)) - common > 2:
            continue
        if common > longest:
            best, longest = [name], common
        elif common == longest:
            best.append(name)
    return best[0] if len(best) == 1 else None


def _components(path: str) -> list[str]:
    parts = path.removeprefix("base_model.model.").split(".")
    return [part for part in parts if part not in ("base_layer", "linear", "default")]


def _common_end(a: list[str], b: list[str]) -> int:
    count = 0
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if x != y:
            break
        count += 1
    return count
