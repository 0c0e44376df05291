"""Snapshots: what a run needs to be re-executed from a step, as a tree of arrays and JSON values.

A snapshot is one ZIP file with a Zarr hierarchy, like a segment. The tree is JSON in an attribute
of its root group, where `{"$array": "arrays/3"}` stands for an array; nothing in it is code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.errors import TraceError
from tracediff.trace.documents import load_json
from tracediff.trace.dtypes import storable
from tracediff.trace.hierarchy import Hierarchy
from tracediff.trace.manifest import FORMAT, MANIFEST, SNAPSHOTS
from tracediff.trace.segment import HierarchyReader

Tree = dict[str, Any]
"""Nested dictionaries (with string or integer keys), lists and tuples of JSON values and arrays."""

_NUMBER: Final = re.compile(r"[0-9]{8,18}")
_ARRAY: Final = "$array"
_TUPLE: Final = "$tuple"
_ITEMS: Final = "$items"
_SCALARS: Final = (bool, int, float, str, type(None))


def snapshot_files(root: Path) -> dict[int, Path]:
    """Complete snapshots by the step that they were taken before, ascending."""
    folder = root / SNAPSHOTS
    return snapshots_among(folder.iterdir() if folder.is_dir() else ())


def snapshots_among(files: Iterable[Path]) -> dict[int, Path]:
    """Those files that are complete snapshots; what has another name never was one."""
    found = (file for file in files if file.suffix == ".zip" and _NUMBER.fullmatch(file.stem))
    return dict(sorted((int(file.stem), file) for file in found))


def write_snapshot(root: Path, step: int, tree: Tree, *, packed: bool = False) -> list[str]:
    """Writes a snapshot under a temporary name, waits for the disk and renames it.

    Args:
        step: The step that comes next.
        packed: Compress the arrays.

    Returns:
        Places in the tree whose values no snapshot can hold: they were left out.
    """
    folder = root / SNAPSHOTS
    folder.mkdir(exist_ok=True)
    file = Hierarchy(folder / f"{step:08d}.zip")
    packer = _Packer(file, packed)
    try:
        packed = packer.pack(tree, "")
        # In ASCII and as one string: infinities and NaN are no JSON in the eyes of other readers.
        text = json.dumps(packed, separators=(",", ":"))
        file.commit({"format": FORMAT, "step": step, "snapshot": text})
    except BaseException:
        file.abandon()
        raise
    return packer.lost


def read_snapshot(root: Path, step: int) -> Tree:
    """The tree of a snapshot. Arrays are read-only and mapped from the file.

    Raises:
        TraceError: There is none of this step.
        CorruptTraceError: It is damaged.
    """
    file = snapshot_files(root).get(step)
    if file is None:
        raise TraceError(f"{root} has no snapshot of step {step}")
    return load_snapshot(file, step)


def load_snapshot(file: Path, step: int) -> Tree:
    """As `read_snapshot`, of a file."""
    return SnapshotReader(file).tree(step)


class _Packer:
    def __init__(self, file: Hierarchy, packed: bool) -> None:
        self._file = file
        self._packed = packed
        self.lost: list[str] = []

    def pack(self, value: Any, place: str) -> Any:
        if isinstance(value, np.generic):
            value = np.asarray(value)
        if isinstance(value, np.ndarray):
            return {_ARRAY: self._store(value)}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return self._items(value.items(), place)
            return {_ITEMS: [[k, self.pack(v, f"{place}.{k}")] for k, v in value.items()]}
        if isinstance(value, list | tuple):
            items = [self.pack(item, f"{place}.{i}") for i, item in enumerate(value)]
            return {_TUPLE: items} if isinstance(value, tuple) else items
        if type(value) not in _SCALARS:
            self.lost.append(place.removeprefix("."))
            return None
        return value

    def _items(self, items: Any, place: str) -> dict[str, Any]:
        return {key: self.pack(value, f"{place}.{key}") for key, value in items}

    def _store(self, array: NDArray[Any]) -> str:
        path = f"arrays/{len(self._file.nodes)}"
        self._file.add_array(path, array, storable(array.dtype), packed=self._packed)
        return path


class SnapshotReader(HierarchyReader):
    """One snapshot."""

    kind = "snapshot"

    def tree(self, step: int) -> Tree:
        with self.reading():
            found = self.attributes()
            text = found.get("snapshot")
            if (found.get("format"), found.get("step")) != (FORMAT, step) or type(text) is not str:
                raise ValueError(f"it holds no snapshot of step {step} in format {FORMAT}")
            tree = self._unpack(load_json(text))
            if not isinstance(tree, dict):
                raise ValueError("it holds no tree")
            return tree

    def _unpack(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        if _ARRAY in value:
            path = str(value[_ARRAY])
            if f"{path}/{MANIFEST}" not in self.archive.entries:
                raise ValueError(f"it lacks the array {path}")
            return self._payload(path, self._info(path), checked=True)
        if _TUPLE in value:
            return tuple(self._unpack(item) for item in value[_TUPLE])
        if _ITEMS in value:
            return {key: self._unpack(item) for key, item in value[_ITEMS]}
        return {key: self._unpack(item) for key, item in value.items()}
