"""PyTorch values as the tape wants them: NumPy arrays, and names for what a module passes on."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import ml_dtypes
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType, type)
_PRIMARY_KEYWORDS: Final = ("hidden_states", "input_ids", "x", "inputs", "input", "inputs_embeds")
_PRIMARY_OUTPUTS: Final = ("logits", "last_hidden_state")

# NumPy has none of these: they travel as integers of the same width and are viewed again.
_BIT_VIEWS: Final[Mapping[torch.dtype, tuple[torch.dtype, Any]]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
    torch.float8_e8m0fnu: (torch.uint8, ml_dtypes.float8_e8m0fnu),
}

Leaves = list[tuple[tuple[str, ...], torch.Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class Ports:
    """The tensors of one call by port name (`in`, `in.mask`, `out.1`, ...), the primary one first.

    Attributes:
        names: For inputs, the name of each tensor as the signature has it (`input_ids`).
        skipped: Class of each argument or result that holds no tensors the recorder can reach,
            such as a cache, by its name.
    """

    tensors: list[tuple[str, torch.Tensor]]
    names: list[str]
    skipped: dict[str, str]


def to_numpy(tensor: torch.Tensor) -> NDArray[Any] | None:
    """The values of a tensor of any layout, device and dtype, copied only where they must be.

    Returns:
        An array of the tensor's shape; bfloat16 and float8 have their ml_dtypes type, complex32
        is widened to complex64. None where there are no values: meta and fake tensors, nested,
        quantized and distributed ones, those in a `torch.func` transform, freed storage.
    """
    if not has_values(tensor):
        return None
    with out_of_sight():
        return _read(tensor.detach())


@contextmanager
def out_of_sight() -> Iterator[None]:
    """Hides operations from modes of the user: counters, selective checkpoints, default devices."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _read(plain: torch.Tensor) -> NDArray[Any]:
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    plain = plain.cpu().resolve_conj().resolve_neg()
    if plain.dtype is torch.complex32:
        plain = plain.to(torch.complex64)
    if plain.dtype in _BIT_VIEWS:
        bits, logical = _BIT_VIEWS[plain.dtype]
        return _array(plain.view(bits)).view(logical)
    return _array(plain)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.numpy()
    return array


def has_values(tensor: torch.Tensor) -> bool:
    """Whether `to_numpy` can read the tensor."""
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return False
    if tensor.is_nested or tensor.is_quantized or torch.nn.parameter.is_lazy(tensor):
        return False
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if tensor.layout is not torch.strided or not tensor.numel():
        return True
    return tensor.untyped_storage().nbytes() > 0


def scalar(value: Any) -> Any:
    """A Python number for a 0-d tensor, anything else as it is.

    float32 becomes the shortest decimal that rounds to it: a rate of 0.001 is 0.001, as the user
    wrote it and as the other stacks keep it.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return value
    array = to_numpy(value)
    if array is None or is_integer(value):
        return value.item()
    return float(str(array.reshape(())[()]))


# ---- containers ---------------------------------------------------------------------------------


def leaves(value: Any, name: tuple[str, ...], skipped: dict[str, str]) -> Iterator[Any]:
    """Walks tuples, lists, mappings and dataclasses down to `(name, tensor)` pairs."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif (children := _children(value)) is not None:
        for key, child in children:
            yield from leaves(child, (*name, key), skipped)
    elif not isinstance(value, (*_PLAIN, *_FUNCTIONS)):
        skipped[".".join(name)] = type(value).__name__


def _children(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, tuple | list):
        return [(str(index), child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [(field.name, getattr(value, field.name, None)) for field in fields]
    return None


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Rebuilds plain tuples, lists and dictionaries with `function` applied to their tensors.

    Containers of any other class are returned as they are: they may have an identity.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(child, function) for child in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(child, function) for child in value))
    if type(value) is dict:
        return {key: map_tensors(child, function) for key, child in value.items()}
    return value


def input_ports(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ports:
    """Names the tensors that a module was called with, by the signature of its `forward`."""
    skipped: dict[str, str] = {}
    cls: Any = type(module)
    names = _parameter_names(cls)
    found: Leaves = []
    for index, value in enumerate(args):
        found += leaves(value, _positional(names, index), skipped)
    for name, value in kwargs.items():
        found += leaves(value, (name,), skipped)
    by_name = {name: tensor for name, tensor in found if len(name) == 1}
    keyword = next(((key,) for key in _PRIMARY_KEYWORDS if (key,) in by_name), None)
    positional = bool(args) and bool(found) and isinstance(args[0], torch.Tensor)
    return _ports("in", found, found[0][0] if positional or not keyword else keyword, skipped)


def output_ports(output: Any) -> Ports:
    """Names the tensors that a module returned: the primary one is `out`."""
    skipped: dict[str, str] = {}
    found: Leaves = list(leaves(output, (), skipped))
    primary = next(((key,) for key in _PRIMARY_OUTPUTS if any(n == (key,) for n, _ in found)), None)
    return _ports("out", found, primary or (found[0][0] if found else None), skipped)


def _ports(
    prefix: str, found: Leaves, primary: tuple[str, ...] | None, skipped: dict[str, str]
) -> Ports:
    ordered = sorted(found, key=lambda leaf: leaf[0] != primary)
    ports = [(prefix if n == primary else ".".join((prefix, *n)), tensor) for n, tensor in ordered]
    return Ports(ports, [".".join(name) for name, _ in ordered], skipped)


def _positional(names: tuple[tuple[str, bool], ...], index: int) -> tuple[str, ...]:
    """Name of a positional argument; those that `*args` swallows are numbered."""
    for place, (name, variadic) in enumerate(names):
        if variadic:
            return (name, str(index - place))
        if place == index:
            return (name,)
    return (f"arg{index}",)


@lru_cache(maxsize=4096)
def _parameter_names(cls: Any) -> tuple[tuple[str, bool], ...]:
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):  # a forward written in C, or scripted
        return ()
    positional = (p for p in parameters if p.kind is not p.KEYWORD_ONLY)
    return tuple(
        (p.name, p.kind is p.VAR_POSITIONAL) for p in positional if p.kind is not p.VAR_KEYWORD
    )


# ---- dimensions ---------------------------------------------------------------------------------


def batch_shape(ports: Ports) -> tuple[int, ...] | None:
    """Shape [batch, sequence] of the token IDs of a root call, or None where it has none."""
    shapes = (tuple(t.shape) for _, t in ports.tensors if t.ndim == 2 and is_integer(t))
    return next(shapes, None)


def hidden_dims(tensor: torch.Tensor, batch: tuple[int, ...] | None) -> tuple[str, ...]:
    """Names the dimensions of hidden states, where the sizes leave no doubt."""
    if tensor.ndim == 3 and tensor.is_floating_point() and tuple(tensor.shape[:2]) == batch:
        return ("batch", "sequence", "hidden")
    return ()


def is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
