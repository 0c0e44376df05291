"""Names for PyTorch modules and parameters, and what is recorded when a root is first called."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from tracediff.checkpoint import Checkpoints
from tracediff.recorders.identity import ByIdentity
from tracediff.recorders.pytorch_shards import is_distributed, local_part
from tracediff.recorders.pytorch_tensors import read_part
from tracediff.recording import Tape, join_path, root_path

WRAPPERS: Final[Mapping[str, str]] = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
}
"""Wrappers that compute nothing themselves: what they wrap keeps the name that it has without."""

_SCALARS: Final = (bool, int, float, str, type(None))


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and data-parallel wrappers."""
    while (name := WRAPPERS.get(type(module).__name__)) and name in module._modules:
        module = module._modules[name] or module
    return module


def is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules with the names of `module.named_modules()`, wrappers left out of them.

    A module with several names is listed under each, its children only under the first.
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(name: str, current: nn.Module) -> None:
        current = unwrapped(current)
        found.append((name, current))
        if id(current) in seen:
            return
        seen.add(id(current))
        for key, child in current._modules.items():
            if child is not None:
                visit(f"{name}.{key}" if name else key, child)

    visit("", module)
    return found


@dataclass(slots=True)
class Named:
    """A parameter or buffer: its first name, its other names, and the modules that hold it.

    Attributes:
        dims: Set where a matrix is not stored as (out, in), as `nn.Linear` does.
    """

    path: str
    port: str
    persistent: bool = True
    dims: tuple[str, ...] = ()
    aliases: list[str] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)


class Roots:
    """The root modules of a run, and the path of everything inside them.

    Nothing is kept alive: modules and tensors are held by weak references.
    """

    def __init__(self, tape: Tape, checkpoints: Checkpoints) -> None:
        self._tape = tape
        self._checkpoints = checkpoints
        self._roots: list[weakref.ref[nn.Module]] = []
        self._paths: ByIdentity[str] = ByIdentity()
        self._named: ByIdentity[Named] = ByIdentity()
        self._settings: set[str] = set()
        self._loaded: ByIdentity[tuple[int, ...]] = ByIdentity()

    def path_of(self, module: nn.Module) -> str | None:
        return self._paths.get(module)

    def named(self, tensor: torch.Tensor) -> Named | None:
        return self._named.get(tensor)

    def tensors(self) -> list[tuple[torch.Tensor, Named]]:
        """Every parameter and buffer that has a name, in the order in which they were named."""
        return self._named.items()

    def emit_loaded(self) -> None:
        """Records all parameters and buffers as they are now."""
        for tensor, named in self.tensors():
            self._emit(tensor, named)

    def is_root(self, module: nn.Module) -> bool:
        return any(root() is module for root in self._roots)

    def would_be_root(self, module: nn.Module) -> bool:
        """Whether a call of the module from outside any other is that of a root, known or new."""
        if self.path_of(module) is not None:
            return self.is_root(module)
        return next(module.parameters(), None) is not None

    def trainable(self) -> Iterator[tuple[torch.Tensor, Named]]:
        """Leaf parameters that gradients are accumulated into."""
        for tensor, named in self._named.items():
            if tensor.requires_grad and tensor.is_leaf:
                yield tensor, named

    def admit(self, module: nn.Module) -> str | None:
        """Path of a module called from outside any other, which becomes a root if it is new.

        A new module that contains a known root takes its place and its index: a model is often
        called bare once before it is wrapped, by an adapter for instance.

        Returns:
            None where the module has no parameters and is part of no root, as a loss function.
        """
        if not self.would_be_root(module):
            return self.path_of(module)
        if not self.is_root(module):
            self._roots[self._index_for(module)] = weakref.ref(module)
        self._load(next(i for i, root in enumerate(self._roots) if root() is module), module)
        return self.path_of(module)

    def adopt(self, module: nn.Module, parent: str) -> str:
        """Path of a module that its caller does not register, such as one kept in a list."""
        path = f"{parent}.({type(module).__name__})"
        self._paths.set(module, path)
        return path

    def _index_for(self, module: nn.Module) -> int:
        inside = {id(child) for child in module.modules()}
        for index, reference in enumerate(self._roots):
            if (root := reference()) is not None and id(root) in inside:
                self._forget(root)
                return index
        self._roots.append(weakref.ref(module))
        return len(self._roots) - 1

    def _forget(self, root: nn.Module) -> None:
        self._loaded.forget(root)
        for _, module in named_modules(root):
            self._paths.forget(module)
        for tensor in (*root.parameters(), *root.buffers()):
            self._named.forget(tensor)

    def _load(self, index: int, root: nn.Module) -> None:
        """Names what is new in a root and records it as loaded: all of it, at the first call."""
        if self._loaded.get(root) != self._contents(root):
            self._name(index, root)
            self._loaded.set(root, self._contents(root))
        self._checkpoints.emit()

    def _contents(self, root: nn.Module) -> tuple[int, ...]:
        """What tells that all in a root has its name: identities, and how many of what had names
        are alive, as a new tensor may have the identity of an old one."""
        found = [len(self._named), len(self._paths)]
        inside, seen = [root], {root}
        for module in inside:  # as `root.modules()`, which takes longer than all the rest
            for held in (module._modules, module._parameters, module._buffers):
                if held:
                    found += map(id, held.values())
            for child in module._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    inside.append(child)
        return tuple(found)

    def _name(self, index: int, root: nn.Module) -> None:
        """Names and records what has no name yet."""
        modules = named_modules(root)
        sharded = {known.path for tensor, known in self.tensors() if is_distributed(tensor)}
        for tensor, named in _named_tensors(index, modules):
            # FSDP puts a whole copy in the place of a parameter while its module needs it.
            if self._named.get(tensor) is not None or named.path in sharded:
                continue
            self._named.set(tensor, named)
            self._emit(tensor, named)
        settings: dict[str, Any] = {}
        for name, module in modules:
            if self._paths.get(module) is None:
                path = join_path(index, name)
                self._paths.set(module, path)
                settings |= module_settings(path, module)
                settings |= config_settings(index, root) if module is root else {}
        self._tape.emit_settings({k: v for k, v in settings.items() if k not in self._settings})
        self._settings |= settings.keys()

    def _emit(self, tensor: torch.Tensor, named: Named) -> None:
        array, shard = read_part(tensor)
        if array is None:
            return
        local = local_part(tensor)
        attributes: dict[str, Any] = {"trainable": tensor.requires_grad, "aliases": named.aliases}
        if local.layout is torch.strided and not local.is_contiguous():
            attributes["strides"] = list(local.stride())
        if named.port == "buffer":
            attributes["persistent"] = named.persistent
        self._tape.emit(
            "loading",
            named.path,
            named.port,
            array,
            dims=named.dims,
            shard=shard,
            attributes=attributes,
        )


def _named_tensors(
    index: int, modules: list[tuple[str, nn.Module]]
) -> list[tuple[torch.Tensor, Named]]:
    """Every parameter and buffer once, in the order of `modules`."""
    found: dict[int, tuple[torch.Tensor, Named]] = {}
    for name, module in modules:
        fields: list[tuple[str, Any, str]]
        fields = [(key, tensor, "param") for key, tensor in module._parameters.items()]
        fields += [(key, tensor, "buffer") for key, tensor in module._buffers.items()]
        for key, tensor, port in fields:
            if tensor is None:
                continue
            path = join_path(index, f"{name}.{key}" if name else key)
            persistent = key not in module._non_persistent_buffers_set
            transposed = type(module).__name__ == "Conv1D" and tensor.ndim == 2
            dims = ("in", "out") if transposed else ()  # the linear layer of GPT-2
            _, named = found.setdefault(id(tensor), (tensor, Named(path, port, persistent, dims)))
            if path != named.path:
                named.aliases.append(path)
            named.owners.append(join_path(index, name))
    return list(found.values())


# ---- settings -----------------------------------------------------------------------------------


def module_settings(path: str, module: nn.Module) -> dict[str, Any]:
    """Constants of a module that its output depends on, under names that all stacks share."""
    settings: dict[str, Any] = {}
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if isinstance(eps, float):
        settings[f"{path}.eps"] = eps
    if isinstance(getattr(module, "approximate", None), str):
        settings[f"{path}.approximate"] = module.approximate
    if isinstance(module, nn.modules.dropout._DropoutNd):
        settings[f"{path}.p"] = module.p
    scaling = getattr(module, "scaling", None)
    if isinstance(scaling, dict) and scaling:
        active = [name for name in getattr(module, "active_adapters", ()) if name in scaling]
        settings[f"{path}.scale"] = scaling[active[0] if active else next(iter(scaling))]
    return settings


def config_settings(index: int, root: nn.Module) -> dict[str, Any]:
    """The resolved configuration of a transformers model, flattened; {} for other modules."""
    config: Any = getattr(root, "config", None)
    if not callable(getattr(config, "to_dict", None)):
        return {}
    prefix = "" if index == 0 else f"{root_path(index)}."
    resolved = {
        key: value
        for key, value in config.to_dict().items()
        # Where the files lay and who saved them has no bearing on a result.
        if not key.startswith("_") and key != "transformers_version"
    }
    settings = dict(_flat(f"{prefix}config", resolved))
    rotary = getattr(config, "rope_parameters", None) or {}
    theta = rotary.get("rope_theta", getattr(config, "rope_theta", None))
    if theta is not None:
        settings[f"{prefix}config.rope_theta"] = theta
    attention = getattr(config, "_attn_implementation", None)
    if attention is not None:
        settings[f"{prefix}torch.attn_implementation"] = attention
    return settings


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flat(f"{name}.{key}", child)
    elif isinstance(value, tuple | list):
        yield name, [item if isinstance(item, _SCALARS) else str(item) for item in value]
    else:
        yield name, value if isinstance(value, _SCALARS) else str(value)
