"""What `datasets.Dataset.map` makes of each record, in this process and in its own."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from tracediff.recorders.rendering_chain import Chain
from tracediff.recorders.rendering_spool import Spool
from tracediff.recording import Patches, Tape

_CACHED: Final = (
    "datasets.map took its result from a cache: how those records were rendered was not seen "
    "(load_from_cache_file=False renders them again)"
)


class MapHooks:
    """Wraps the function that `map` is given, where it is applied and not before.

    `map` names its cache by a hash of the function, so the function that it sees must stay the
    script's own.
    """

    def __init__(self, tape: Tape, chain: Chain, patches: Patches) -> None:
        self._tape = tape
        self._chain = chain
        self._patches = patches
        self._spool: Spool | None = None
        self._ran = False

    def install(self, module: Any) -> None:
        """Wraps the class of the imported module `datasets.arrow_dataset`."""
        self._patches.replace(module.Dataset, "map", self._wrap_map)
        self._patches.replace_static(module.Dataset, "_map_single", self._wrap_single)

    def _wrap_map(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def mapped(dataset: Any, *args: Any, **kwargs: Any) -> Any:
            outer, self._spool = self._spool, Spool()
            self._ran = False
            try:
                result = original(dataset, *args, **kwargs)
                self._replay(self._spool)
                if not self._ran and len(dataset):
                    self._tape.note(_CACHED)
                return result
            finally:
                self._spool.close()
                self._spool = outer

        return mapped

    def _replay(self, spool: Spool) -> None:
        for writer in spool.writers():  # by rank: in the order of the records
            self._ran = True
            numbers: dict[int, int] = {}
            while (operations := spool.read(writer)) is not None:
                self._chain.replay(operations, numbers)

    def _wrap_single(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def map_single(*args: Any, **kwargs: Any) -> Iterator[Any]:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            arguments = given.arguments
            self._ran = True
            if arguments.get("function") is not None:
                arguments["function"] = self._told(arguments["function"], arguments)
            for progress in original(*given.args, **given.kwargs):
                if self._chain.forked and self._spool is not None:
                    self._spool.write(f"{arguments.get('rank') or 0:06d}", self._chain.spooled())
                yield progress

        return map_single

    def _told(self, function: Callable[..., Any], given: Mapping[str, Any]) -> Callable[..., Any]:
        columns, batched = given.get("input_columns"), given.get("batched", False)

        @functools.wraps(function)
        def told(*args: Any, **kwargs: Any) -> Any:
            records = _records(args, columns, batched)
            with self._chain.processing(records):
                result = function(*args, **kwargs)
            if not batched:
                self._labels(result)
            elif isinstance(result, Mapping):
                names = list(result)
                for values in zip(*(result[name] for name in names), strict=False):
                    self._labels(dict(zip(names, values, strict=True)))
            return result

        return told

    def _labels(self, result: Any) -> None:
        if isinstance(result, Mapping) and result.get("input_ids") is not None:
            self._chain.feature(result)


def _records(args: tuple[Any, ...], columns: Any, batched: bool) -> list[dict[str, Any]]:
    """The raw records that a call is given, without touching them: a lazy one notes its readers."""
    if columns is not None:
        names = [columns] if isinstance(columns, str) else list(columns)
        given = dict(zip(names, args, strict=False))
    elif args and isinstance(args[0], Mapping):
        given = dict(copy.copy(args[0]))
    else:
        return []
    if not batched:
        return [given]
    rows = zip(*given.values(), strict=False)
    return [dict(zip(given, row, strict=True)) for row in rows]
