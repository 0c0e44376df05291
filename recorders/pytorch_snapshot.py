"""What a PyTorch run is made of between two steps, captured and put back."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from tracediff.errors import RerunError
from tracediff.recorders.pytorch_roots import Named
from tracediff.recorders.pytorch_state import State
from tracediff.recorders.pytorch_tensors import from_numpy, out_of_sight, to_numpy
from tracediff.recording import Patches
from tracediff.trace.snapshot import Tree
from tracediff.trace.summary import digest

_TENSOR: Final = "tensor"
_WATCHED: Final = (Optimizer, LRScheduler, torch.amp.GradScaler, DataLoader)


class Snapshots:
    """Knows the objects that hold the state of a run, in the order in which they were made."""

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._patches = patches
        self._made: dict[type, list[weakref.ref[Any]]] = {cls: [] for cls in _WATCHED}
        self._earlier: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def install(self) -> None:
        for found in gc.get_objects():
            self._remember(found)
        self._earlier.update(self._alive(Optimizer))
        for cls in _WATCHED:
            self._patches.replace(cls, "__init__", self._wrap_init)

    def _wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            self._remember(made)
            original(made, *args, **kwargs)

        return init

    def _remember(self, made: Any) -> None:
        # `type(o)`, as `isinstance` would wake up lazy proxies.
        cls = next((cls for cls in _WATCHED if issubclass(type(made), cls)), None)
        if cls is not None and all(ref() is not made for ref in self._made[cls]):
            self._made[cls].append(weakref.ref(made))

    def _alive(self, cls: type) -> list[Any]:
        return [made for ref in self._made[cls] if (made := ref()) is not None]

    def _optimizers(self) -> list[Optimizer]:
        """Those of the run: one from before it counts if it updates a weight of the run."""
        weights = {id(tensor) for tensor, _ in self._tensors()}
        return [
            made
            for made in self._alive(Optimizer)
            if made not in self._earlier
            or any(id(p) in weights for group in made.param_groups for p in group["params"])
        ]

    def _schedulers(self) -> list[LRScheduler]:
        others = set(map(id, self._earlier)) - set(map(id, self._optimizers()))
        return [s for s in self._alive(LRScheduler) if id(s.optimizer) not in others]

    # ---- capturing -------------------------------------------------------------------------

    def capture(self) -> Tree:
        """Weights that are not as they were loaded, gradients, optimizers, schedulers, scalers."""
        gc.collect()  # what nobody holds any more is no part of the run
        with out_of_sight():
            return {
                "weights": {_key(named): self._weight(t, named) for t, named in self._tensors()},
                "gradients": {
                    _key(named): to_numpy(tensor.grad)
                    for tensor, named in self._tensors()
                    if tensor.grad is not None
                },
                "optimizers": [_optimizer(o) for o in self._optimizers()],
                "schedulers": [_stateful(s) for s in self._schedulers()],
                "scalers": [_stateful(s) for s in self._alive(torch.amp.GradScaler)],
            }

    def generators(self) -> Iterator[tuple[str, torch.Generator]]:
        """Generators of data loaders and their samplers, which are not the global ones."""
        seen: list[Any] = [None]
        for index, loader in enumerate(self._alive(DataLoader)):
            for owner in (loader, getattr(loader, "sampler", None)):
                generator = getattr(owner, "generator", None)
                if isinstance(generator, torch.Generator) and generator not in seen:
                    seen.append(generator)
                    yield f"torch.loader[{index}]", generator

    def generator_states(self) -> dict[str, np.ndarray[Any, Any]]:
        """States of those generators, as bytes."""
        found = list(self.generators())
        if not found:
            return {}
        with out_of_sight():
            return {path: generator.get_state().numpy() for path, generator in found}

    def set_generators(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Puts those generators into the states that are given for them."""
        for path, generator in self.generators():
            if path in states:
                generator.set_state(torch.from_numpy(np.array(states[path])))

    def _tensors(self) -> list[tuple[torch.Tensor, Named]]:
        return self._state.roots.tensors()

    def _weight(self, tensor: torch.Tensor, named: Named) -> Tree:
        """A weight by its digest, with its values only if they are not those that were loaded:
        the script loads the base of an adapter by itself."""
        array = to_numpy(tensor)
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
        known = {_key(named): tensor for tensor, named in self._tensors()}
        _same("weights", tree["weights"], known)
        with out_of_sight(), torch.no_grad():
            for key, weight in tree["weights"].items():
                _restore_weight(key, known[key], weight)

    def restore(self, tree: Tree) -> None:
        """Puts everything back in place, into the objects that the script made this time.

        Raises:
            RerunError: The script made other objects than the one that was recorded.
        """
        gc.collect()  # what nobody holds any more is no part of the run
        self.restore_weights(tree)
        with out_of_sight():
            for tensor, named in self._tensors():
                grad = tree["gradients"].get(_key(named))
                tensor.grad = None if grad is None else from_numpy(grad, tensor.device)
        found: tuple[tuple[Sequence[Any], str, Callable[[Any, Tree], None]], ...] = (
            (self._optimizers(), "optimizers", _restore_optimizer),
            (self._schedulers(), "schedulers", _restore_stateful),
            (self._alive(torch.amp.GradScaler), "scalers", _restore_stateful),
        )
        for alive, name, put in found:
            _same(name, [s["class"] for s in tree[name]], [type(o).__name__ for o in alive])
            for saved, made in zip(tree[name], alive, strict=True):
                put(made, saved)


def _key(named: Named) -> str:
    return f"{named.path}:{named.port}"


def _same(what: str, saved: Any, made: Any) -> None:
    if list(saved) == list(made):
        return
    if isinstance(saved, dict):
        odd = sorted(set(saved) ^ set(made)) or ["another order"]
        text = f"{len(saved)} were saved, {len(made)} are there, {odd[0]!r} is on one side only"
    else:
        text = f"{', '.join(saved) or 'none'} saved, {', '.join(made) or 'none'} there"
    raise RerunError(
        f"the {what} of the script are not those of the snapshot ({text}): check the script and "
        "its arguments, or compute all steps with --from-start"
    )


def _restore_weight(key: str, tensor: torch.Tensor, weight: Mapping[str, Any]) -> None:
    array = to_numpy(tensor)
    if array is None or not weight or digest(array).hex() == weight["digest"]:
        return
    value = weight.get("value")
    if value is None or value.shape != tuple(tensor.shape):
        raise RerunError(
            f"{key.rpartition(':')[0]} is not as it was loaded when the run was recorded: check "
            "the script, its arguments, and the files that it loads"
        )
    tensor.copy_(from_numpy(value, tensor.device))


# ---- optimizers, schedulers, scalers ------------------------------------------------------------


def _optimizer(optimizer: Optimizer) -> Tree:
    """State by the place of the parameter, as `state_dict` has it, but nothing cast or dropped."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "class": type(optimizer).__name__,
        "groups": [
            {name: _saved(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ],
        "state": {
            index: {name: _saved(value) for name, value in optimizer.state[p].items()}
            for index, p in enumerate(parameters)
            if p in optimizer.state
        },
    }


def _restore_optimizer(optimizer: Optimizer, saved: Tree) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len(saved["groups"]) != len(optimizer.param_groups) or any(
        index >= len(parameters) for index in saved["state"]
    ):
        raise RerunError(
            f"{saved['class']} has other parameters than in the snapshot: check the script"
        )
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({name: _made(value) for name, value in values.items()})
    optimizer.state.clear()
    for index, state in saved["state"].items():
        optimizer.state[parameters[index]] = {name: _made(value) for name, value in state.items()}


def _stateful(made: Any) -> Tree:
    return {"class": type(made).__name__, "state": _saved(made.state_dict())}


def _restore_stateful(made: Any, saved: Tree) -> None:
    """Values that a snapshot could not hold stay the script's own."""
    own = made.state_dict()
    state = _made(saved["state"])
    kept = {name: own[name] for name, value in state.items() if value is None and name in own}
    made.load_state_dict({**own, **state, **kept})


def _saved(value: Any) -> Any:
    """Tensors as arrays with their devices."""
    if isinstance(value, torch.Tensor):
        return {_TENSOR: to_numpy(value), "device": str(value.device)}
    if isinstance(value, Mapping):
        return {key: _saved(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_saved(item) for item in value) if type(value) in (list, tuple) else None
    return value


def _made(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR, "device"}:
            return from_numpy(value[_TENSOR], torch.device(value["device"]))
        return {key: _made(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_made(item) for item in value)
    return value
