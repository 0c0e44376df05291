"""What an MLX run is made of between two steps, captured and put back."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.optimizers import MultiOptimizer, Optimizer
from numpy.typing import NDArray

from tracediff.errors import RerunError
from tracediff.recorders.mlx_arrays import to_numpy
from tracediff.recorders.mlx_roots import Named
from tracediff.recorders.mlx_state import State
from tracediff.recording import Patches
from tracediff.trace.snapshot import Tree
from tracediff.trace.summary import digest


def from_numpy(array: NDArray[Any]) -> mx.array:
    """An array of its own with the same values, bit for bit: undoes `to_numpy`."""
    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(np.array(array).view(np.uint16)).view(mx.bfloat16)
    return mx.array(np.array(array))


class Snapshots:
    """Knows the optimizers of a run, in the order in which they were made."""

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._patches = patches
        self._made: list[weakref.ref[Optimizer]] = []

    def install(self) -> None:
        for found in gc.get_objects():
            if issubclass(type(found), Optimizer):  # `isinstance` would wake up lazy proxies
                self._remember(found)
        self._patches.replace(Optimizer, "__init__", self._wrap_init)

    def _wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._remember(optimizer)
            original(optimizer, *args, **kwargs)

        return init

    def _remember(self, optimizer: Optimizer) -> None:
        if all(ref() is not optimizer for ref in self._made):
            self._made.append(weakref.ref(optimizer))

    def _optimizers(self) -> list[Optimizer]:
        """Those that hold state themselves: the parts of a combined one are listed on their own."""
        alive = [made for ref in self._made if (made := ref()) is not None]
        return [made for made in alive if not isinstance(made, MultiOptimizer)]

    # ---- capturing -------------------------------------------------------------------------

    def capture(self) -> Tree | None:
        """Weights that are not as they were loaded, and optimizers.

        None for a run without modules: its parameters are in variables of the script.
        """
        gc.collect()  # what nobody holds any more is no part of the run
        arrays = self._state.roots.arrays()
        if not arrays:
            return None
        return {
            "weights": {named.path: self._weight(named) for _, _, named in arrays},
            "optimizers": [
                {"class": type(made).__name__, "state": _saved(made.state)}
                for made in self._optimizers()
            ],
        }

    def _weight(self, named: Named) -> Tree:
        array = to_numpy(named.array)
        if array is None:
            return {}
        found = digest(array)
        weight: Tree = {"digest": found.hex()}
        loaded, _ = self._state.tape.loaded.get(named.path, (b"", ""))
        if found != loaded:
            weight["value"] = array
        return weight

    # ---- restoring -------------------------------------------------------------------------

    def restore_weights(self, tree: Tree) -> None:
        """Puts back parameters and buffers.

        Raises:
            RerunError: The script has other ones.
        """
        arrays = self._state.roots.arrays()
        known = [named.path for _, _, named in arrays]
        if sorted(known) != sorted(tree["weights"]):
            odd = sorted(set(known) ^ set(tree["weights"]))
            raise RerunError(
                f"the weights of the script are not those of the snapshot ({odd[0]!r} is on one "
                "side only): check the script, or compute all steps with --from-start"
            )
        for root, name, named in arrays:
            _restore_weight(root, name, named, tree["weights"][named.path])

    def restore(self, tree: Tree) -> None:
        """Puts everything back in place, into the objects that the script made this time.

        Raises:
            RerunError: The script made other objects than the one that was recorded.
        """
        gc.collect()  # what nobody holds any more is no part of the run
        self.restore_weights(tree)
        made = self._optimizers()
        classes = [saved["class"] for saved in tree["optimizers"]]
        if classes != [type(optimizer).__name__ for optimizer in made]:
            raise RerunError(
                f"the snapshot has the optimizers {classes}, the script made {len(made)}: check "
                "the script, or compute all steps with --from-start"
            )
        for optimizer, saved in zip(made, tree["optimizers"], strict=True):
            # In place: a compiled step holds the dictionary itself.
            _update(optimizer.state, _restored(saved["state"]))
            optimizer._initialized = True


def _restore_weight(root: Module, name: str, named: Named, weight: Mapping[str, Any]) -> None:
    array = to_numpy(named.array)
    if array is None or not weight or digest(array).hex() == weight["digest"]:
        return
    value = weight.get("value")
    if value is None or value.shape != tuple(named.array.shape):
        raise RerunError(
            f"{named.path} is not as it was loaded when the run was recorded: check the script, "
            "its arguments, and the files that it loads"
        )
    owner: Any = root
    *parents, last = name.split(".")
    for part in parents:
        owner = owner[int(part)] if isinstance(owner, list | tuple) else owner[part]
    owner[int(last) if isinstance(owner, list) else last] = from_numpy(value)


def _update(state: dict[str, Any], values: Mapping[str, Any]) -> None:
    state.clear()
    state.update(values)


def _saved(value: Any) -> Any:
    if isinstance(value, mx.array):
        return to_numpy(value)
    if isinstance(value, Mapping):
        return {key: _saved(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_saved(item) for item in value)
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return from_numpy(value)
    if isinstance(value, Mapping):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_restored(item) for item in value)
    return value
