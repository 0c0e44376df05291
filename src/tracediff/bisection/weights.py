"""Whether a side's parameters are those of the weight files that it loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.checkpoint import WeightFile, is_of_checkpoint, named
from tracediff.compare.figures import is_float, one_conversion_apart
from tracediff.errors import TraceError
from tracediff.events import Event
from tracediff.trace import Trace
from tracediff.trace.summary import digest

_EXPERTS: Final = re.compile(r"(.*)\.(experts|switch_mlp)\.(gate_up|gate|up|down)_proj(\.weight)?")


class Files:
    """The weight files that one side loaded, as far as trace and disk still hold them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._tables: list[Mapping[str, Any]] = []
        self._kept: dict[str, Event] = {}
        for step in trace.steps[:1]:
            for event in filter(is_of_checkpoint, trace.events(step, samples=False)):
                if event.kind == "setting":
                    self._tables.append(event.value)
                else:
                    self._kept[event.site.path] = event

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that lay next to the first file that had one."""
        return next((table["config"] for table in self._tables if table.get("config")), {})

    def have(self, paths: Iterable[str]) -> bool:
        """Whether a tensor of one of these names is in a file."""
        return any(named(p, table["tensors"]) for p in paths for table in self._tables)

    def match(self, event: Event, paths: Iterable[str], *, turned: bool = False) -> bool | None:
        """Whether a parameter is what a file holds for it, but for one conversion of its dtype.

        Args:
            paths: Names of the parameter, the most telling one first.
            turned: The side keeps the matrix transposed.

        Returns:
            None where no file is known to hold it, or its values are gone.
        """
        for path in paths:
            for table in self._tables:
                found = self._match(event, path, table, turned)
                if found is not None:
                    return found
        return None

    def _match(
        self, event: Event, path: str, table: Mapping[str, Any], turned: bool
    ) -> bool | None:
        name = named(path, table["tensors"])
        if name is not None and not turned:
            dtype, _, own, loaded = table["tensors"][name]
            if (dtype, own) == (event.dtype, event.digest.hex()) or loaded == event.digest.hex():
                return True
        value = self._values(name, table) if name else self._stacked(path, table)
        if value is None or event.payload is None:
            return None
        held = self._trace.array(event)
        if turned or (held.shape != value.shape and held.shape == value.shape[::-1]):
            value = value.T
        if held.shape != value.shape or not (is_float(held.dtype) and is_float(value.dtype)):
            return None
        return one_conversion_apart(held, value)

    def _values(self, name: str, table: Mapping[str, Any]) -> NDArray[Any] | None:
        """A tensor of a file: from the trace, or from the file if it is the same still."""
        kept = self._kept.get(name)
        if kept is not None and kept.payload is not None:
            return self._trace.array(kept)
        try:
            file = WeightFile(table["file"])
            found = file.array(name) if name in file else None
        except TraceError:
            return None
        if found is None or digest(found).hex() != table["tensors"][name][2]:
            return None
        return found

    def _stacked(self, path: str, table: Mapping[str, Any]) -> NDArray[Any] | None:
        """Experts that a file holds one by one, as both stacks stack them; transformers joins gate
        and up projection."""
        matched = _EXPERTS.fullmatch(path)
        if matched is None:
            return None
        stem, projection = matched[1], matched[3]
        parts = ("gate", "up") if projection == "gate_up" else (projection,)
        arrays = [list(self._experts(f"{stem}.experts", part, table)) for part in parts]
        if not all(arrays) or len({len(found) for found in arrays}) != 1:
            return None
        return np.stack([np.concatenate(each) for each in zip(*arrays, strict=True)])

    def _experts(self, stem: str, part: str, table: Mapping[str, Any]) -> Iterator[NDArray[Any]]:
        index = 0
        while (name := f"{stem}.{index}.{part}_proj.weight") in table["tensors"]:
            values = self._values(name, table)
            if values is None:
                return
            yield values
            index += 1
