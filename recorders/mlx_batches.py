"""What mlx-lm's data sets make of each record, and its batches of those."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from tracediff.recorders.mlx_arrays import to_numpy
from tracediff.recorders.rendering_chain import Chain, integers
from tracediff.recording import Patches

_DATASETS: Final = "mlx_lm.tuner.datasets"
_TRAINER: Final = "mlx_lm.tuner.trainer"
_IGNORED: Final = -100


class BatchHooks:
    """Wraps `process` of mlx-lm's data sets, and its batch iterator.

    Labels are recorded as other stacks have them: one per token, -100 where it is not trained.
    """

    def __init__(self, chain: Chain, patches: Patches) -> None:
        self._chain = chain
        self._patches = patches
        self._drawn: list[tuple[int, Any]] = []

    def install(self) -> None:
        self._patches.when_imported(_DATASETS, self._install_datasets)
        self._patches.when_imported(_TRAINER, self._install_trainer)

    def _install_datasets(self, module: Any) -> None:
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == _DATASETS:
                if "process" in vars(cls):
                    self._patches.replace(cls, "process", self._wrap_process)
                if cls.__name__ == "CacheDataset":
                    self._patches.replace(cls, "__getitem__", self._wrap_item)

    def _install_trainer(self, module: Any) -> None:
        batches = module.iterate_batches
        wrapped = self._wrap_batches(batches)
        self._patches.replace(module, "iterate_batches", lambda _: wrapped)
        for function in (module.train, module.evaluate):  # it is the default of an argument there
            defaults = function.__defaults__
            self._patches.on_undo(setattr, function, "__defaults__", defaults)
            function.__defaults__ = tuple(wrapped if d is batches else d for d in defaults or ())

    def _wrap_process(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def process(dataset: Any, record: Any) -> Any:
            with self._chain.processing([record]):
                result = original(dataset, record)
            if isinstance(result, tuple) and len(result) == 2:
                self._labels(*result)
            return result

        return process

    def _labels(self, tokens: Any, offset: Any) -> None:
        """mlx-lm's loss trains the tokens from `offset` on, and never the first one."""
        ids = integers(tokens)
        if ids is not None and isinstance(offset, int):
            labels = ids.copy()
            labels[: max(offset, 1)] = _IGNORED
            self._chain.labels(self._chain.row(ids), labels)

    def _wrap_item(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def item(dataset: Any, index: int) -> Any:
            found = original(dataset, index)
            if isinstance(found, tuple):
                self._drawn.append((index, found[0]))
            return found

        return item

    def _wrap_batches(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def batches(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self._drawn.clear()
            for batch in original(*args, **kwargs):
                drawn, self._drawn = self._drawn, []
                array = to_numpy(batch[0])
                if array is not None and drawn:
                    rows = [np.asarray(row) for _, row in drawn]
                    self._chain.collated(rows, array, [index for index, _ in drawn])
                yield batch
                self._drawn.clear()

        return batches
