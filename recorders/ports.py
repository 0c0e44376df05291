"""Ports: what the tensors that a module is given and returns are called, on every stack alike."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from tracediff.recorders.identity import ByIdentity

Tensor = TypeVar("Tensor")
Names = tuple[tuple[str, bool], ...]
"""Positional parameters of a function, and which of them is `*args`."""

_PRIMARY_KEYWORDS: Final = ("hidden_states", "input_ids", "x", "inputs", "input", "inputs_embeds")
_PRIMARY_OUTPUTS: Final = ("logits", "last_hidden_state")
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)


@dataclass(slots=True)  # not frozen: there is one for each call, and that takes four times as long
class Ports(Generic[Tensor]):
    """The tensors of one call by port name (`in`, `in.mask`, `out.1`, ...), the primary one first.

    Attributes:
        names: For inputs, the name of each tensor as the signature has it (`input_ids`).
        skipped: Class of each argument or result that holds no tensors the recorder can reach,
            such as a cache, by its name.
    """

    tensors: Sequence[tuple[str, Tensor]]
    names: Sequence[str]
    skipped: Mapping[str, str]

    def named(self) -> list[tuple[str, Tensor]]:
        """The tensors by the names that the signature gives them."""
        return [(name, tensor) for name, (_, tensor) in zip(self.names, self.tensors, strict=True)]


class PortNames(Generic[Tensor]):
    """Names the tensors of one framework.

    Args:
        tensor: The framework's tensor class.
        silent: Says of a value that holds no tensors and is not worth a word, such as a dtype.
        opaque: Classes that look like containers and are none (modules that are dictionaries).
    """

    def __init__(
        self,
        tensor: type[Tensor],
        silent: Callable[[Any], bool],
        opaque: tuple[type, ...] = (),
    ) -> None:
        self._tensor = tensor
        self._silent = silent
        self._opaque = opaque

    def inputs(self, names: Names, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ports[Tensor]:
        """The tensors that a function was called with: the primary one is `in`."""
        if len(args) == 1 and not kwargs and names and isinstance(args[0], self._tensor):
            name, variadic = names[0]
            return Ports([("in", args[0])], [f"{name}.0" if variadic else name], {})
        skipped: dict[str, str] = {}
        found: list[tuple[tuple[str, ...], Tensor]] = []
        for index, value in enumerate(args):
            if value is not None:
                self._find(value, _positional(names, index), found, skipped)
        for name, value in kwargs.items():
            if value is not None:
                self._find(value, (name,), found, skipped)
        by_name = {name for name, _ in found if len(name) == 1}
        keyword = next(((key,) for key in _PRIMARY_KEYWORDS if (key,) in by_name), None)
        positional = bool(args) and isinstance(args[0], self._tensor)
        primary = found[0][0] if found and (positional or not keyword) else keyword
        return _ports("in", found, primary, skipped)

    def outputs(self, output: Any) -> Ports[Tensor]:
        """The tensors that a module returned: the primary one is `out`."""
        if isinstance(output, self._tensor):
            return Ports([("out", output)], [""], {})
        skipped: dict[str, str] = {}
        found: list[tuple[tuple[str, ...], Tensor]] = []
        self._find(output, (), found, skipped)
        given = {name for name, _ in found}
        primary = next(((key,) for key in _PRIMARY_OUTPUTS if (key,) in given), None)
        return _ports("out", found, primary or (found[0][0] if found else None), skipped)

    def mapped(self, value: Any, function: Callable[[Tensor], Tensor]) -> Any:
        """Plain tuples, lists and dictionaries rebuilt with `function` applied to their tensors.

        Containers of any other class are returned as they are: they may have an identity.
        """
        if isinstance(value, self._tensor):
            return function(value)
        if type(value) in (tuple, list):
            return type(value)(self.mapped(child, function) for child in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.mapped(child, function) for child in value))
        if type(value) is dict:
            return {key: self.mapped(child, function) for key, child in value.items()}
        return value

    def _find(
        self,
        value: Any,
        name: tuple[str, ...],
        found: list[tuple[tuple[str, ...], Tensor]],
        skipped: dict[str, str],
    ) -> None:
        """Walks tuples, lists, mappings and dataclasses down to `(name, tensor)` pairs."""
        if isinstance(value, self._tensor):
            found.append((name, value))
        elif not isinstance(value, self._opaque) and (children := _children(value)) is not None:
            for key, child in children:
                self._find(child, (*name, key), found, skipped)
        elif not isinstance(value, _PLAIN) and not self._silent(value):
            skipped[".".join(name)] = type(value).__name__


def parameter_names(function: Any) -> Names:
    """Positional parameters of a function; () for one written in C."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(
        (p.name, p.kind is p.VAR_POSITIONAL)
        for p in parameters
        if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)
    )


_METHODS: Final[ByIdentity[Names]] = ByIdentity()
"""Weak: through a method of a script's class, all that its globals hold would stay alive."""


def method_names(method: Any) -> Names:
    """Positional parameters of a method as its class has it, without `self`."""
    names = _METHODS.get(method)
    if names is None:
        names = parameter_names(method)[1:]
        with suppress(TypeError):  # of one that is written in C
            _METHODS.set(method, names)
    return names


def _children(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, tuple | list):
        return [(str(index), child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [(field.name, getattr(value, field.name, None)) for field in fields]
    return None


def _ports(
    prefix: str,
    found: list[tuple[tuple[str, ...], Tensor]],
    primary: tuple[str, ...] | None,
    skipped: dict[str, str],
) -> Ports[Tensor]:
    ordered = sorted(found, key=lambda leaf: leaf[0] != primary)
    ports = [(prefix if n == primary else ".".join((prefix, *n)), tensor) for n, tensor in ordered]
    return Ports(ports, [".".join(name) for name, _ in ordered], skipped)


def _positional(names: Names, index: int) -> tuple[str, ...]:
    """Name of a positional argument; those that `*args` swallows are numbered."""
    for place, (name, variadic) in enumerate(names):
        if variadic:
            return (name, str(index - place))
        if place == index:
            return (name,)
    return (f"arg{index}",)
