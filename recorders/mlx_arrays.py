"""MLX values as the tape wants them: NumPy arrays, and names for whatever a module passes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from tracediff.recorders import ports
from tracediff.recorders.ports import PortNames, method_names, parameter_names

Ports = ports.Ports[mx.array]

_VIEW: Final = mx.array.view
"""As MLX has it: where operations are recorded, those of the recorder are none of the run's."""


def to_numpy(array: mx.array) -> NDArray[Any] | None:
    """The values of an array of any layout and dtype, evaluated if they were not yet.

    Works inside `mx.grad` and its like, which trace with real values.

    Returns:
        An array of the same shape, which may share memory with `array`; bfloat16 has its
        ml_dtypes type. None inside `mx.vmap` and while `mx.compile` traces: no values exist there.
    """
    try:
        mx.eval(array)
    except ValueError:
        return None
    return computed(array)


def computed(array: mx.array) -> NDArray[Any]:
    """The values of an array that is evaluated, as `to_numpy` has them."""
    values: NDArray[Any]
    if array.dtype != mx.bfloat16:
        values = np.asarray(array)
        return values
    # NumPy has none, and takes it as bytes; what does not lie in C order travels as integers.
    buffer: memoryview = memoryview(array)  # type: ignore[arg-type]
    if buffer.c_contiguous and array.size:
        values = np.frombuffer(buffer, ml_dtypes.bfloat16).reshape(array.shape)
        return values
    bits: NDArray[Any] = np.asarray(_VIEW(array, mx.uint16))
    values = bits.view(ml_dtypes.bfloat16)
    return values


def evaluate(arrays: Sequence[mx.array]) -> bool:
    """Computes arrays together, faster than one by one; whether all of them have values."""
    try:
        mx.eval(arrays)
    except ValueError:
        return False
    return True


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


# ---- ports --------------------------------------------------------------------------------------


_NAMES: Final[PortNames[mx.array]] = PortNames(
    mx.array,
    silent=lambda value: isinstance(value, mx.Dtype) or callable(value),
    opaque=(Module,),  # a module is a dictionary, and no container of arguments
)
map_arrays = _NAMES.mapped
output_ports = _NAMES.outputs


def input_ports(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ports:
    """Names the arrays that a module (or a function) was called with, by its signature."""
    if isinstance(function, Module):
        cls: Any = type(function)
        return _NAMES.inputs(method_names(cls.__call__), args, kwargs)
    return _NAMES.inputs(parameter_names(function), args, kwargs)


# ---- dimensions ---------------------------------------------------------------------------------


def batch_shape(ports: Ports) -> tuple[int, ...] | None:
    """Shape [batch, sequence] of the token IDs of a root call, or None where it has none."""
    shapes = (tuple(a.shape) for _, a in ports.tensors if a.ndim == 2 and is_integer(a))
    return next(shapes, None)


def hidden_dims(array: mx.array, op: str, batch: tuple[int, ...] | None) -> tuple[str, ...]:
    """Names the dimensions of hidden states and rotated heads, where the sizes leave no doubt."""
    if array.ndim == 3 and is_float(array) and tuple(array.shape[:2]) == batch:
        return ("batch", "sequence", "hidden")
    if array.ndim == 4 and "rope" in op.lower():
        return ("batch", "heads", "sequence", "head_dim")
    return ()
