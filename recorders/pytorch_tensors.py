"""PyTorch values as the tape wants them: NumPy arrays, and names for what a module passes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
import torch._ops
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from tracediff.kernels import array_of
from tracediff.recorders import ports
from tracediff.recorders.ports import PortNames, method_names
from tracediff.recorders.pytorch_shards import local_part, shard_of

_SILENT: Final = (torch.dtype, torch.device, FunctionType, BuiltinFunctionType, type)
"""Classes of arguments that hold no tensors and are not worth a word."""

ORDINARY: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_EXCHANGE: Final = torch.Tensor.__dlpack_c_exchange_api__
_len_function: Final = torch._C._len_torch_function_stack
_len_dispatch: Final = torch._C._len_torch_dispatch_stack
_len_pre_dispatch: Final[Callable[[], int]] = torch._ops._len_torch_dispatch_stack_pre_dispatch
_interpreters: Final = torch._C._functorch.peek_interpreter_stack

Ports = ports.Ports[torch.Tensor]

# NumPy has none of these: they travel as integers of the same width and are viewed again.
_BIT_VIEWS: Final[Mapping[torch.dtype, tuple[torch.dtype, Any]]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
    torch.float8_e8m0fnu: (torch.uint8, ml_dtypes.float8_e8m0fnu),
}


def to_numpy(tensor: torch.Tensor) -> NDArray[Any] | None:
    """The values of a tensor of any layout, device and dtype, copied only where they must be.

    Returns:
        An array of the tensor's shape; bfloat16 and float8 have their ml_dtypes type, complex32
        is widened to complex64. None where there are no values: meta and fake tensors, nested,
        quantized and distributed ones, those in a `torch.func` transform, freed storage.
    """
    array = memory_of(tensor)
    if array is not None:
        return array
    if not has_values(tensor):
        return None
    with out_of_sight():
        return _read(tensor.detach())


def read_part(
    tensor: torch.Tensor, read: Callable[[torch.Tensor], Any] | None = None
) -> tuple[Any, str]:
    """The values of a tensor, and of a distributed one those of the part that this process holds.

    Args:
        read: Reads a tensor; by default `to_numpy`.

    Returns:
        What `read` returns, and which part it is: "" for what is whole. A process outside of the
        mesh of a distributed tensor holds nothing of it.
    """
    if read is None and (array := memory_of(tensor)) is not None:
        return array, ""
    read = read or to_numpy
    if type(tensor) in ORDINARY:
        return read(tensor), ""
    with out_of_sight():
        shard = shard_of(tensor)
        return None if "@-" in shard else read(local_part(tensor)), shard


def from_numpy(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of its own with the values of an array, bit for bit: undoes `to_numpy`."""
    for dtype, (bits, logical) in _BIT_VIEWS.items():
        if array.dtype == logical:
            plain = np.array(array).view(torch.empty(0, dtype=bits).numpy().dtype)
            return torch.from_numpy(plain).view(dtype).to(device)
    return torch.from_numpy(np.array(array)).to(device)


def memory_of(tensor: torch.Tensor) -> NDArray[Any] | None:
    """The memory of a tensor, if it is one of those that are nearly all, which the long way would
    take more than ten times as long to read: an ordinary one on the CPU, with no mode that could
    see us read it. Modes of dispatch see operations only, and nothing here is one.

    `tensor.numpy()` would forbid for good to resize it.
    """
    if type(tensor) not in ORDINARY or _len_function():
        return None
    if tensor.is_neg() or _interpreters() is not None:
        return None
    return array_of(_EXCHANGE, tensor)


@contextmanager
def out_of_sight() -> Iterator[None]:
    """Hides operations from modes of the user: counters, selective checkpoints, default devices."""
    with torch._C.DisableTorchFunction():
        if _len_dispatch() or _len_pre_dispatch():
            with _disable_current_modes():
                yield
        else:  # to find that there are none takes five times as long the other way
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
    """A view of the tensor's memory, of any dtype that NumPy has."""
    array: NDArray[Any] = np.from_dlpack(tensor)
    return array


def has_values(tensor: torch.Tensor) -> bool:
    """Whether `to_numpy` can read the tensor."""
    if memory_of(tensor) is not None:
        return True
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
    """A Python number for a 0-d tensor (a part of a distributed one), anything else as it is.

    float32 becomes the shortest decimal that rounds to it: a rate of 0.001 is 0.001, as the user
    wrote it and as the other stacks keep it.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return value
    value = local_part(value)
    array = to_numpy(value)
    if array is None or is_integer(value):
        return value.item()
    return float(str(array.reshape(())[()]))


# ---- ports --------------------------------------------------------------------------------------


_NAMES: Final[PortNames[torch.Tensor]] = PortNames(
    torch.Tensor, silent=lambda value: isinstance(value, _SILENT)
)
map_tensors = _NAMES.mapped
output_ports = _NAMES.outputs


def input_ports(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ports:
    """Names the tensors that a module was called with, by the signature of its `forward`."""
    cls: Any = type(module)
    return _NAMES.inputs(method_names(cls.forward), args, kwargs)


# ---- dimensions ---------------------------------------------------------------------------------


def batch_shape(ports: Ports) -> tuple[int, ...] | None:
    """Shape [batch, sequence] of the token IDs of a root call, or None where it has none."""
    shapes = (tuple(t.shape) for _, t in ports.tensors if t.ndim == 2 and is_integer(t))
    return next(shapes, None)


def hidden_dims(tensor: torch.Tensor, batch: tuple[int, ...] | None) -> tuple[str, ...]:
    """Names the dimensions of hidden states, where the sizes leave no doubt."""
    shape = tensor.shape
    if len(shape) == 3 and shape[:2] == batch and tensor.is_floating_point():
        return ("batch", "sequence", "hidden")
    return ()


def is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
