"""What a data loader draws and a collator makes of it, also in worker processes."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from torch.utils.data import dataloader
from torch.utils.data._utils import fetch

from tracediff.recorders.rendering_chain import Chain, integers
from tracediff.recorders.rendering_spool import Operation, Spool
from tracediff.recording import Patches, Tape

_COLLATORS: Final = "transformers.data.data_collator"
_UNSEEN: Final = (
    "a data loader's worker processes were not forked from this one: what they rendered was not "
    "seen (num_workers=0 shows it)"
)


class LoadingHooks:
    """Wraps fetching in torch's `DataLoader`, and transformers' collators wherever they are called.

    What a worker process records goes through a spool, one line per batch, and is written when the
    script gets the batch: in the order of the batches, however many workers there are.
    """

    def __init__(self, tape: Tape, chain: Chain, patches: Patches) -> None:
        self._tape = tape
        self._chain = chain
        self._patches = patches
        self._spool: Spool | None = None
        self._numbers: dict[int, dict[int, int]] = {}
        self._indices: list[int] | None = None
        self._collating = False

    def install(self) -> None:
        replace = self._patches.replace
        replace(fetch._BaseDatasetFetcher, "__init__", self._wrap_fetcher)
        for cls in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            replace(cls, "fetch", self._wrap_fetch)
        workers = dataloader._MultiProcessingDataLoaderIter
        replace(workers, "__init__", self._wrap_start)
        replace(workers, "_process_data", self._wrap_received)
        self._patches.when_imported(_COLLATORS, self._install_collators)
        self._patches.on_undo(self._close)

    def _install_collators(self, module: Any) -> None:
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == _COLLATORS and "__call__" in vars(cls):
                self._patches.replace(cls, "__call__", self._wrap_collator)
        self._replace_by_name(module.default_data_collator)

    def _replace_by_name(self, function: Any) -> None:
        """Wraps a function in every module of transformers that has imported it by name.

        One that imports it later gets the wrapper, which is taken out again at the end.
        """
        wrapped = self._collator(function)

        def put(old: Any, new: Any) -> None:
            for name, module in list(sys.modules.items()):
                ours = name.startswith("transformers")
                if ours and vars(module).get(function.__name__) is old:
                    setattr(module, function.__name__, new)

        put(function, wrapped)
        self._patches.on_undo(put, wrapped, function)

    def _close(self) -> None:
        if self._spool is not None:
            self._spool.close()

    # ---- fetching --------------------------------------------------------------------------

    def _wrap_fetcher(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(fetcher: Any, *args: Any, **kwargs: Any) -> None:
            original(fetcher, *args, **kwargs)
            fetcher.collate_fn = self._collator(fetcher.collate_fn)

        return make

    def _wrap_fetch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fetched(fetcher: Any, index: Any) -> Any:
            self._indices = _indices(index)
            try:
                result = original(fetcher, index)
            except StopIteration:
                raise  # no batch: what was recorded goes with the next
            except BaseException:
                self._hand_over()
                raise
            finally:
                self._indices = None
            self._hand_over()
            return result

        return fetched

    def _hand_over(self) -> None:
        if self._chain.forked and self._spool is not None:
            self._spool.write(str(os.getpid()), self._chain.spooled())

    # ---- worker processes ------------------------------------------------------------------

    def _wrap_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(iterator: Any, *args: Any, **kwargs: Any) -> None:
            self._spool = self._spool or Spool()
            original(iterator, *args, **kwargs)

        return start

    def _wrap_received(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def received(iterator: Any, data: Any, worker: int, *args: Any, **kwargs: Any) -> Any:
            process = iterator._workers[worker].pid
            found = self._spool.read(str(process)) if self._spool else None
            self._replay(process, found)
            return original(iterator, data, worker, *args, **kwargs)

        return received

    def _replay(self, process: int, operations: list[Operation] | None) -> None:
        if operations is None:
            self._tape.note(_UNSEEN)
        else:
            self._chain.replay(operations, self._numbers.setdefault(process, {}))

    # ---- collating -------------------------------------------------------------------------

    def _wrap_collator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collate(collator: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
            bound = functools.partial(original, collator)
            return self._collated(bound, features, *args, **kwargs)

        return collate

    def _collator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collate(features: Any, *args: Any, **kwargs: Any) -> Any:
            return self._collated(original, features, *args, **kwargs)

        return collate

    def _collated(
        self, original: Callable[..., Any], features: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a collator; records what it was given, unless it is called by another one."""
        if self._collating:
            return original(features, *args, **kwargs)
        self._collating = True
        try:
            # Taken before the call: some collators take fields out of the features.
            taken = [_feature(each) for each in features] if _is_list(features) else []
            batch = original(features, *args, **kwargs)
        finally:
            self._collating = False
        ids = _batch_ids(batch)
        if ids is None:
            return batch
        if not taken or any(feature is None for feature in taken):
            rows = list(ids) if ids.ndim == 2 else [ids]  # rows that the collator tokenized itself
        else:
            rows = [feature["input_ids"] for feature in taken if feature is not None]
            for feature in taken:
                self._chain.feature(feature or {})
        self._chain.collated(rows, ids, self._indices)
        return batch


def _is_list(features: Any) -> bool:
    return isinstance(features, Sequence) and not isinstance(features, str | bytes)


def _indices(index: Any) -> list[int] | None:
    """Places in the data set that a sampler drew; None where it draws none (a stream)."""
    places = index if isinstance(index, list | tuple) else [index]
    whole = [int(place) for place in places if isinstance(place, int | np.integer)]
    return whole if places and len(whole) == len(places) else None


def _feature(feature: Any) -> dict[str, Any] | None:
    """The integer fields of one sample as a collator is given it; None without token IDs."""
    if isinstance(feature, Mapping) or hasattr(feature, "keys"):
        found = {name: integers(feature[name]) for name in feature}
        return found if found.get("input_ids") is not None else None
    if isinstance(feature, tuple) and feature:
        feature = feature[0]
    ids = integers(feature)
    return None if ids is None else {"input_ids": ids}


def _batch_ids(batch: Any) -> np.ndarray[Any, Any] | None:
    """The token IDs of a batch: `input_ids`, or the first whole-numbered tensor."""
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        batch = [batch["input_ids"]] if "input_ids" in batch else list(batch.values())
    for value in batch if isinstance(batch, list | tuple) else [batch]:
        array = np.asarray(value) if hasattr(value, "shape") else None
        if array is not None and array.dtype.kind in "iu" and array.ndim in (1, 2):
            return array
    return None
