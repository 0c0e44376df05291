"""Data loaders of PyTorch: what they draw from the default generator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from torch.utils.data.dataloader import _BaseDataLoaderIter

from tracediff.consumers import Consumers
from tracediff.recorders.pytorch_state import State
from tracediff.recording import Patches

LOADER: Final = "the data loader"


class DataLoaderHooks:
    """Tells the draws of a data loader (its shuffle, its workers' seeds) from the script's own."""

    def __init__(self, state: State, consumers: Consumers, patches: Patches) -> None:
        self._state = state
        self._consumers = consumers
        self._patches = patches

    def install(self) -> None:
        for name in ("__init__", "__next__"):
            self._patches.replace(_BaseDataLoaderIter, name, self._wrap)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._state.recording:
                return original(iterator, *args, **kwargs)
            with self._consumers.outside(LOADER):
                return original(iterator, *args, **kwargs)

        return method
