"""Names for MLX modules and parameters, and what is recorded when a root is first called."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from tracediff.checkpoint import Checkpoints
from tracediff.recorders.mlx_arrays import flatten, to_numpy
from tracediff.recording import Tape, join_path, root_path

_LEAVES: Final = (mx.array, Module)
_SCALARS: Final = (bool, int, float, str, type(None))
_APPROXIMATIONS: Final = {"none": "none", "precise": "tanh", "tanh": "tanh", "fast": "sigmoid"}
"""MLX's name for how a GELU is approximated -> that of all stacks."""

_ROPE_SETTINGS: Final = ("base", "scale", "traditional", "dims")


def members(module: Module) -> Iterator[tuple[str, Any]]:
    """Arrays and modules that a module holds itself, by dotted name, in order of registration."""
    for key, value in list(module.items()):
        if isinstance(value, _LEAVES):  # as nearly all are
            yield key, value
        elif not isinstance(value, _SCALARS):
            yield from flatten(value, prefix=f".{key}")


def parameters(module: Module) -> Iterator[tuple[str, mx.array]]:
    """Parameters of a module and its submodules, by dotted name; without private arrays."""
    for key, value in members(module):
        if isinstance(value, Module):
            yield from ((f"{key}.{name}", array) for name, array in parameters(value))
        elif not key.startswith("_"):
            yield key, value


Walk = list[tuple[str, Module, list[tuple[str, mx.array]]]]
"""Modules by name, each with the arrays that it holds itself."""


def walk(module: Module) -> Walk:
    """All modules, parents first and in order of registration.

    A module with several names is listed under each, its children only under the first.
    """
    found: Walk = []
    seen: dict[int, list[tuple[str, mx.array]]] = {}

    def visit(name: str, current: Module) -> None:
        arrays = seen.get(id(current))
        if arrays is not None:
            found.append((name, current, arrays))
            return
        arrays = seen[id(current)] = []
        found.append((name, current, arrays))
        for key, child in members(current):
            if isinstance(child, Module):
                visit(f"{name}.{key}" if name else key, child)
            else:
                arrays.append((key, child))

    visit("", module)
    return found


@dataclasses.dataclass(slots=True)
class Named:
    """A parameter or buffer as loaded: its first name, and its other names."""

    path: str
    port: str
    array: mx.array
    trainable: bool
    aliases: list[str] = dataclasses.field(default_factory=list)


class Roots:
    """The root modules of a run, and the path of everything inside them.

    Modules are held by weak references and known by identity: they are dictionaries, so they have
    no hash.
    """

    def __init__(self, tape: Tape, checkpoints: Checkpoints) -> None:
        self._tape = tape
        self._checkpoints = checkpoints
        self._roots: list[weakref.ref[Module]] = []
        self._paths: dict[int, tuple[weakref.ref[Module], str]] = {}
        self._loaded: set[str] = set()
        self._settings: set[str] = set()
        self._before: dict[tuple[int, str], mx.array] = {}

    def arrays(self) -> list[tuple[Module, str, Named]]:
        """Every parameter and buffer of the roots, with the root and its name in there."""
        alive = [(i, root) for i, ref in enumerate(self._roots) if (root := ref()) is not None]
        return [
            (root, named.path.removeprefix(f"{root_path(index)}." if index else ""), named)
            for index, root in alive
            for named in self._named_arrays(index, walk(root))
        ]

    @property
    def known(self) -> bool:
        """Whether any root was called yet."""
        return bool(self._roots)

    def emit_loaded(self) -> None:
        """Records all parameters and buffers as they are now."""
        for _, _, named in self.arrays():
            if (array := to_numpy(named.array)) is not None:
                self._emit(named, array)

    def path_of(self, module: Module) -> str | None:
        reference, path = self._paths.get(id(module), (None, None))
        return path if reference is not None and reference() is module else None

    def is_root(self, module: Module) -> bool:
        return any(root() is module for root in self._roots)

    def would_be_root(self, module: Module) -> bool:
        """Whether a call of the module from outside any other is that of a root, known or new."""
        if self.path_of(module) is not None:
            return self.is_root(module)
        return next(parameters(module), None) is not None

    def admit(self, module: Module, modules: Walk) -> str | None:
        """Path of a module called from outside any other, which becomes a root if it is new.

        A new module that contains a known root takes its place and its index: a model is often
        called bare once before it is wrapped.

        Args:
            modules: The module, and those in it.

        Returns:
            None where the module has no parameters and is part of no root, as an activation.
        """
        if not self.would_be_root(module):
            return self.path_of(module)
        if not self.is_root(module):
            self._roots[self._index_for(module)] = weakref.ref(module)
        index = next(i for i, root in enumerate(self._roots) if root() is module)
        self._load(index, module, modules)
        return self.path_of(module)

    def adopt(self, module: Module, parent: str) -> str:
        """Path of a module that its caller does not register, such as one in a global variable."""
        path = f"{parent}.({type(module).__name__})"
        self._name(module, path)
        return path

    def parameter_path(self, model: Module | None, name: str) -> str:
        """Path of a parameter by its name in `model`, or in the latest root where that is None."""
        owner, rest = model, name
        while owner is not None:
            path = self.path_of(owner)
            if path is not None:
                index = next((i for i in range(len(self._roots)) if root_path(i) == path), None)
                return f"{path}.{rest}" if index is None else join_path(index, rest)
            child = _member(owner, rest)
            owner, rest = child if child is not None else (None, name)
        return join_path(max(len(self._roots) - 1, 0), name)

    def is_parameter(self, path: str) -> bool:
        return path in self._loaded

    def remember(self, model: Module) -> None:
        """Keeps the parameters as they are outside of a gradient transformation.

        Inside of it, those to be trained are replaced by tracers, one for each name: that two
        names share an array can no longer be seen.
        """
        for _, module, arrays in walk(model):
            for key, array in arrays:
                self._before[id(module), key] = array

    def forget_remembered(self) -> None:
        self._before.clear()

    def _name(self, module: Module, path: str) -> None:
        self._paths[id(module)] = (weakref.ref(module), path)

    def _index_for(self, module: Module) -> int:
        inside = {id(child) for _, child, _ in walk(module)}
        for index, reference in enumerate(self._roots):
            if (root := reference()) is not None and id(root) in inside:
                for _, child, _ in walk(root):
                    self._paths.pop(id(child), None)
                return index
        self._roots.append(weakref.ref(module))
        return len(self._roots) - 1

    def _load(self, index: int, root: Module, modules: Walk) -> None:
        """Names what is new in a root and records it as loaded: all of it, at the first call."""
        for named in self._named_arrays(index, modules):
            if named.path not in self._loaded and (array := to_numpy(named.array)) is not None:
                self._loaded.add(named.path)
                self._emit(named, array)
        self._checkpoints.emit()
        settings: dict[str, Any] = {}
        for name, module, _ in modules:
            if self.path_of(module) is None:
                path = join_path(index, name)
                self._name(module, path)
                settings |= module_settings(path, module)
                settings |= config_settings(index, root) if module is root else {}
        self._tape.emit_settings({k: v for k, v in settings.items() if k not in self._settings})
        self._settings |= settings.keys()

    def _emit(self, named: Named, array: NDArray[Any]) -> None:
        extra = {"trainable": named.trainable, "aliases": named.aliases}
        self._tape.emit("loading", named.path, named.port, array, attributes=extra)

    def _named_arrays(self, index: int, modules: Walk) -> list[Named]:
        """Every parameter and buffer once, in the order of `modules`."""
        found: dict[int, Named] = {}
        for name, module, arrays in modules:
            for key, value in arrays:
                array = self._before.get((id(module), key), value)
                path = join_path(index, f"{name}.{key}" if name else key)
                private, frozen = key.startswith("_"), key.split(".")[0] in module._no_grad
                port = "buffer" if private else "param"
                new = Named(path, port, array, not (private or frozen))
                named = found.setdefault(id(array), new)
                if path != named.path and path not in named.aliases:
                    named.aliases.append(path)
        return list(found.values())


def _member(owner: Module, name: str) -> tuple[Module, str] | None:
    """The submodule that holds the parameter `name`, and the parameter's name in there."""
    for key, child in members(owner):
        if isinstance(child, Module) and name.startswith(f"{key}."):
            return child, name[len(key) + 1 :]
    return None


# ---- settings -----------------------------------------------------------------------------------


def module_settings(path: str, module: Module) -> dict[str, Any]:
    """Constants of a module that its output depends on, under names that all stacks share."""
    settings: dict[str, Any] = {}
    eps = getattr(module, "eps", None)
    if isinstance(eps, float):
        settings[f"{path}.eps"] = eps
    approximate = _APPROXIMATIONS.get(str(getattr(module, "_approx", "")))
    if approximate is not None:
        settings[f"{path}.approximate"] = approximate
    keep = getattr(module, "_p_1", None)
    if isinstance(keep, int | float):
        settings[f"{path}.p"] = round(1.0 - keep, 12)  # stored as 1 - p: undo its rounding
    if "lora_a" in module and isinstance(getattr(module, "scale", None), int | float):
        settings[f"{path}.scale"] = float(module.scale)
    if "rope" in type(module).__name__.lower():
        values = {name: getattr(module, name, None) for name in _ROPE_SETTINGS}
        settings |= {
            f"{path}.{name}": value
            for name, value in values.items()
            if isinstance(value, bool | int | float)
        }
    return settings


def config_settings(index: int, root: Module) -> dict[str, Any]:
    """The resolved configuration of an mlx-lm model, flattened; {} for other modules."""
    args = getattr(root, "args", None)
    if not dataclasses.is_dataclass(args) or isinstance(args, type):
        return {}
    prefix = "" if index == 0 else f"{root_path(index)}."
    return dict(_flat(f"{prefix}config", args))


def _fields(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name, None) for name in names}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = _fields(value)
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flat(f"{name}.{key}", child)
    elif isinstance(value, tuple | list):
        yield name, [item if isinstance(item, _SCALARS) else str(item) for item in value]
    else:
        yield name, value if isinstance(value, _SCALARS) else str(value)
