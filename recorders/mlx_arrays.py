"""MLX values as the tape wants them: NumPy arrays, and names for whatever a module passes on."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from numpy.typing import NDArray

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, mx.Dtype)
_PRIMARY_KEYWORDS: Final = ("hidden_states", "input_ids", "x", "inputs", "input", "inputs_embeds")
_PRIMARY_OUTPUTS: Final = ("logits", "last_hidden_state")

Leaves = list[tuple[tuple[str, ...], mx.array]]


@dataclasses.dataclass(frozen=True, slots=True)
class Ports:
    """The arrays of one call by port name (`in`, `in.mask`, `out.1`, ...), the primary one first.

    Attributes:
        names: The name of each array as the signature has it (`inputs`).
        skipped: Class of each argument or result that holds no arrays the recorder can reach,
            such as a cache, by its name.
    """

    arrays: list[tuple[str, mx.array]]
    names: list[str]
    skipped: dict[str, str]

    def named(self) -> list[tuple[str, mx.array]]:
        """The arrays by the names that the signature gives them."""
        return [(name, array) for name, (_, array) in zip(self.names, self.arrays, strict=True)]


def to_numpy(array: mx.array) -> NDArray[Any] | None:
    """The values of an array of any layout and dtype, evaluated if they were not yet.

    Works inside `mx.grad` and its like, which trace with real values.

    Returns:
        An array of the same shape, which may share memory with `array`; bfloat16 has its
        ml_dtypes type. None inside `mx.vmap` and while `mx.compile` traces: no values exist there.
    """
    values: NDArray[Any]
    try:
        mx.eval(array)
    except ValueError:
        return None
    if array.dtype == mx.bfloat16:  # NumPy has none: it travels as an integer of the same width
        bits: NDArray[Any] = np.asarray(array.view(mx.uint16))
        values = bits.view(ml_dtypes.bfloat16)
        return values
    values = np.asarray(array)
    return values


def random_key() -> NDArray[np.uint32] | None:
    """A copy of the state of the global generator; None while `mx.compile` traces it."""
    state: Any = mx.random.state
    key = to_numpy(state[0])
    return None if key is None else key.copy()


def scalar(value: Any) -> Any:
    """A Python number for a 0-d array, anything else as it is.

    float32 becomes the shortest decimal that rounds to it: a rate of 0.001 is 0.001, as the user
    wrote it and as the other stacks keep it.
    """
    if not isinstance(value, mx.array) or value.size != 1:
        return value
    array = to_numpy(value)
    if array is None:
        return None
    if array.dtype.kind in "biu":
        return array.item()
    return float(str(array.reshape(())[()]))


def is_float(array: mx.array) -> bool:
    return bool(mx.issubdtype(array.dtype, mx.floating))


def is_integer(array: mx.array) -> bool:
    return bool(mx.issubdtype(array.dtype, mx.integer)) or array.dtype == mx.bool_


def flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Arrays of a tree (parameters, gradients, state) and the modules in it, by dotted name."""
    leaves: Any = tree_flatten(tree, prefix=prefix, is_leaf=Module.is_module)
    return [(name, leaf) for name, leaf in leaves if isinstance(leaf, mx.array | Module)]


# ---- containers ---------------------------------------------------------------------------------


def leaves(value: Any, name: tuple[str, ...], skipped: dict[str, str]) -> Iterator[Any]:
    """Walks tuples, lists, mappings and dataclasses down to `(name, array)` pairs.

    Modules are dictionaries in MLX; they are no containers here.
    """
    if isinstance(value, mx.array):
        yield name, value
    elif (children := _children(value)) is not None:
        for key, child in children:
            yield from leaves(child, (*name, key), skipped)
    elif not isinstance(value, _PLAIN) and not callable(value):
        skipped[".".join(name)] = type(value).__name__


def map_arrays(value: Any, function: Callable[[mx.array], mx.array]) -> Any:
    """Rebuilds plain tuples, lists and dictionaries with `function` applied to their arrays.

    Containers of any other class are returned as they are: they may have an identity.
    """
    if isinstance(value, mx.array):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(map_arrays(child, function) for child in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_arrays(child, function) for child in value))
    if type(value) is dict:
        return {key: map_arrays(child, function) for key, child in value.items()}
    return value


def _children(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, Module):
        return None
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, tuple | list):
        return [(str(index), child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [(field.name, getattr(value, field.name, None)) for field in fields]
    return None


def input_ports(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ports:
    """Names the arrays that a module (or a function) was called with, by its signature."""
    skipped: dict[str, str] = {}
    names = _parameter_names(function)
    found: Leaves = []
    for index, value in enumerate(args):
        found += leaves(value, _positional(names, index), skipped)
    for name, value in kwargs.items():
        found += leaves(value, (name,), skipped)
    by_name = {name for name, _ in found if len(name) == 1}
    keyword = next(((key,) for key in _PRIMARY_KEYWORDS if (key,) in by_name), None)
    positional = bool(args) and isinstance(args[0], mx.array)
    primary = found[0][0] if found and (positional or not keyword) else keyword
    return _ports("in", found, primary, skipped)


def output_ports(output: Any) -> Ports:
    """Names the arrays that a module returned: the primary one is `out`."""
    skipped: dict[str, str] = {}
    found: Leaves = list(leaves(output, (), skipped))
    primary = next(((key,) for key in _PRIMARY_OUTPUTS if any(n == (key,) for n, _ in found)), None)
    return _ports("out", found, primary or (found[0][0] if found else None), skipped)


def _ports(
    prefix: str, found: Leaves, primary: tuple[str, ...] | None, skipped: dict[str, str]
) -> Ports:
    ordered = sorted(found, key=lambda leaf: leaf[0] != primary)
    ports = [(prefix if n == primary else ".".join((prefix, *n)), array) for n, array in ordered]
    return Ports(ports, [".".join(name) for name, _ in ordered], skipped)


def _positional(names: tuple[tuple[str, bool], ...], index: int) -> tuple[str, ...]:
    """Name of a positional argument; those that `*args` swallows are numbered."""
    for place, (name, variadic) in enumerate(names):
        if variadic:
            return (name, str(index - place))
        if place == index:
            return (name,)
    return (f"arg{index}",)


def _parameter_names(function: Any) -> tuple[tuple[str, bool], ...]:
    """Positional parameters of a function or of a module, and which of them is `*args`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C
        return ()
    positional = (p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD))
    return tuple((p.name, p.kind is p.VAR_POSITIONAL) for p in positional)


# ---- dimensions ---------------------------------------------------------------------------------


def batch_shape(ports: Ports) -> tuple[int, ...] | None:
    """Shape [batch, sequence] of the token IDs of a root call, or None where it has none."""
    shapes = (tuple(a.shape) for _, a in ports.arrays if a.ndim == 2 and is_integer(a))
    return next(shapes, None)


def hidden_dims(array: mx.array, op: str, batch: tuple[int, ...] | None) -> tuple[str, ...]:
    """Names the dimensions of hidden states and rotated heads, where the sizes leave no doubt."""
    if array.ndim == 3 and is_float(array) and tuple(array.shape[:2]) == batch:
        return ("batch", "sequence", "hidden")
    if array.ndim == 4 and "rope" in op.lower():
        return ("batch", "heads", "sequence", "head_dim")
    return ()
