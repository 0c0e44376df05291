"""Pooling, upsampling and padding with what is there: each is a matrix for each dimension of space.

The gradient of such an operation is its transpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Final

import numpy as np

from tracediff.replayers.reference_operations import (
    accumulated,
    argument,
    check_room,
    exact,
    formula,
    rounded,
    roundoff,
    widen,
)
from tracediff.replayers.reference_rounding import together
from tracediff.replaying import Floats, Operation, Replayed

_Matrix = Callable[[Operation, int, int, int], Floats]
"""Makes the matrix (outputs, inputs) of one dimension of space, given its number and both sizes."""

_LARGEST: Final = 1 << 24
"""Elements up to which a matrix is made."""

_CUBIC: Final = -0.75
"""Keys, "Cubic convolution interpolation for digital image processing", 1981: his a, as PyTorch has
it."""


def _space(operation: Operation) -> int:
    """Dimensions of space, which are the last ones: `avg_pool2d` has two."""
    return int(next(filter(str.isdigit, operation.canonical)))


def _number(operation: Operation, name: str, axis: int, default: Any = None) -> Any:
    """A setting of one dimension of space, where one number may stand for all of them."""
    given = argument(operation, name)
    if given is None or given == []:
        return default
    found = given if isinstance(given, list | tuple) else [given]
    return found[axis] if len(found) > 1 else found[0]


# ---- matrices -----------------------------------------------------------------------------------


def _average(operation: Operation, axis: int, outputs: int, inputs: int) -> Floats:
    """Means of windows. A window ends with the padding, and may be told to count it."""
    size = int(_number(operation, "kernel_size", axis))
    stride = int(_number(operation, "stride", axis, size))
    padding = int(_number(operation, "padding", axis, 0))
    counts_padding = argument(operation, "count_include_pad", default=True)
    if argument(operation, "divisor_override") is not None:
        raise ValueError("the number of elements is given")
    matrix = np.zeros((outputs, inputs))
    for row, start in enumerate(range(-padding, stride * outputs - padding, stride)):
        end = min(start + size, inputs + padding)
        inside = slice(max(start, 0), min(end, inputs))
        matrix[row, inside] = 1 / (end - start if counts_padding else inside.stop - inside.start)
    return matrix


def _adaptive(operation: Operation, axis: int, outputs: int, inputs: int) -> Floats:
    matrix = np.zeros((outputs, inputs))
    for row in range(outputs):
        start, end = row * inputs // outputs, -(-(row + 1) * inputs // outputs)
        matrix[row, start:end] = 1 / (end - start)
    return matrix


def _scale(operation: Operation, axis: int, outputs: int, inputs: int) -> float:
    """Inputs per output: by the factor that was given, or of both sizes."""
    rank = _space(operation)
    name = "scales" if rank == 1 else ("scales_d", "scales_h", "scales_w")[3 - rank + axis]
    factors = argument(operation, "scale_factors")
    factor = argument(operation, name) if factors is None else factors[axis]
    return 1 / float(factor) if factor else inputs / outputs


def _nearest(operation: Operation, axis: int, outputs: int, inputs: int) -> Floats:
    scale = _scale(operation, axis, outputs, inputs)
    places = np.minimum(np.floor(np.arange(outputs) * np.float32(scale)), inputs - 1)
    return np.asarray(np.eye(inputs)[places.astype(np.int64)])


def _centres(operation: Operation, axis: int, outputs: int, inputs: int) -> Floats:
    """Where the outputs lie among the inputs."""
    places = np.arange(outputs, dtype=np.float64)
    if argument(operation, "align_corners", default=False):
        return places * ((inputs - 1) / (outputs - 1) if outputs > 1 else 0.0)
    return (places + 0.5) * _scale(operation, axis, outputs, inputs) - 0.5


def _linear(operation: Operation, axis: int, outputs: int, inputs: int) -> Floats:
    centres = np.maximum(_centres(operation, axis, outputs, inputs), 0)
    return _weighted(centres, inputs, {0: lambda t: 1 - t, 1: lambda t: t})


def _cubic(operation: Operation, axis: int, outputs: int, inputs: int) -> Floats:
    def near(t: Floats) -> Floats:
        return ((_CUBIC + 2) * t - (_CUBIC + 3)) * t * t + 1

    def far(t: Floats) -> Floats:
        return ((t - 5) * t + 8) * t * _CUBIC - 4 * _CUBIC

    weights = {
        -1: lambda t: far(t + 1),
        0: near,
        1: lambda t: near(1 - t),
        2: lambda t: far(2 - t),
    }
    return _weighted(_centres(operation, axis, outputs, inputs), inputs, weights)


def _weighted(
    centres: Floats, inputs: int, weights: Mapping[int, Callable[[Floats], Floats]]
) -> Floats:
    """Weights of the inputs around each centre, by how many places they are from the one below it,
    of how far the centre is above that. Beyond the ends the last one counts again."""
    matrix = np.zeros((len(centres), inputs))
    below = np.floor(centres)
    for shift, weight in weights.items():
        places = np.clip(below + shift, 0, inputs - 1).astype(np.int64)
        np.add.at(matrix, (np.arange(len(centres)), places), weight(centres - below))
    return matrix


def _padded(mode: str) -> _Matrix:
    def matrix(operation: Operation, axis: int, outputs: int, inputs: int) -> Floats:
        pads = argument(operation, "padding")
        rank = len(pads) // 2
        before = int(pads[2 * (rank - 1 - axis)])  # the last dimension comes first
        places = np.arange(outputs) - before
        if mode == "reflection":
            places = (inputs - 1) - np.abs((inputs - 1) - np.abs(places))
        else:
            places = np.clip(places, 0, inputs - 1)
        return np.asarray(np.eye(inputs)[places])

    return matrix


_MATRICES: Final[Mapping[str, _Matrix]] = {
    **{f"avg_pool{n}d": _average for n in (1, 2, 3)},
    **{f"_adaptive_avg_pool{n}d": _adaptive for n in (2, 3)},
    **{f"upsample_nearest{n}d": _nearest for n in (1, 2, 3)},
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), _linear),
    "upsample_bicubic2d": _cubic,
    **{f"reflection_pad{n}d": _padded("reflection") for n in (1, 2, 3)},
    **{f"replication_pad{n}d": _padded("replication") for n in (1, 2, 3)},
}


# ---- formulas -----------------------------------------------------------------------------------


@formula(*_MATRICES)
def _forward(operation: Operation) -> Replayed | None:
    make = _MATRICES[operation.canonical]
    data, space = widen(operation.inputs[0]), _space(operation)
    sizes = zip(operation.shape[-space:], data.shape[-space:], strict=True)
    return _applied(operation, data, [_made(make, operation, i, *n) for i, n in enumerate(sizes)])


@formula(*(f"{name}_backward" for name in _MATRICES))
def _backward(operation: Operation) -> Replayed | None:
    make = _MATRICES[operation.canonical.removesuffix("_backward")]
    grad, space = widen(operation.inputs[0]), _space(operation)
    sizes = zip(grad.shape[-space:], operation.shape[-space:], strict=True)
    return _applied(operation, grad, [_made(make, operation, i, *n).T for i, n in enumerate(sizes)])


def _made(make: _Matrix, operation: Operation, axis: int, outputs: int, inputs: int) -> Floats:
    """
    Raises:
        ValueError: The matrix would be too large: of sound, say, rather than of images.
    """
    if outputs * inputs > _LARGEST:
        raise ValueError(f"a matrix of {outputs} x {inputs}")
    return make(operation, axis, outputs, inputs)


def _applied(operation: Operation, data: Floats, matrices: Sequence[Floats]) -> Replayed | None:
    """The matrices in the last dimensions. The weights of an interpolation err as the places that
    they are of do, by the roundoff of a number as large as the dimension."""
    if not np.isfinite(data).all():
        return None
    value, squares, size, terms, longest = data, data**2, np.abs(data), 1, 0
    for place, matrix in enumerate(matrices):
        axis = data.ndim - len(matrices) + place
        value = _along(matrix, value, axis)
        squares = _along(matrix**2, squares, axis)
        size = _along((matrix != 0).astype(np.float64), size, axis)
        terms *= int(np.count_nonzero(matrix, axis=1).max(initial=1))
        longest = max(longest, *matrix.shape)
    if terms == 1 and all(np.isin(matrix, (0, 1)).all() for matrix in matrices):
        return exact(operation, value)
    walk = accumulated(operation, value, squares, terms)
    if "upsample" in operation.canonical:
        walk = together(walk, 2 * roundoff(operation) * longest * size)
    return rounded(operation, value, together(walk, roundoff(operation) * np.abs(value)))


def _along(matrix: Floats, data: Floats, axis: int) -> Floats:
    return np.moveaxis(np.tensordot(matrix, data, (1, axis)), 0, axis)


@formula("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(operation: Operation) -> Replayed | None:
    """The largest of each window; which of equal ones it is, is not for a formula to say."""
    if operation.output:
        return None
    data, space = widen(operation.inputs[0]), _space(operation)
    count, around, windows = operation.shape[-space:], [(0, 0)] * (data.ndim - space), []
    for axis in range(space):
        size = int(_number(operation, "kernel_size", axis))
        check_room(operation, [size])
        stride = int(_number(operation, "stride", axis, size))
        before = int(_number(operation, "padding", axis, 0))
        starts = int(_number(operation, "dilation", axis, 1)) * np.arange(size)
        span = stride * (count[axis] - 1) + 1
        after = int(starts[-1]) + span - before - data.shape[axis - space]
        around.append((before, max(0, after)))
        windows.append([slice(int(start), int(start) + span, stride) for start in starts])
    check_room(operation, [n + sum(more) for n, more in zip(data.shape, around, strict=True)])
    padded = np.pad(data, around, constant_values=-np.inf)
    value = np.full(operation.shape, -np.inf)
    everywhere = [[slice(None)]] * (data.ndim - space)
    for where in product(*everywhere, *windows):
        np.maximum(value, padded[where], out=value)
    return exact(operation, value)


@formula("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _max_pool_backward(operation: Operation) -> Replayed | None:
    """What each window passes back to its largest element, added up."""
    grad, data, places = operation.inputs
    space = _space(operation)
    planes, inside = math.prod(data.shape[:-space]), math.prod(data.shape[-space:])
    flat = places.reshape(planes, -1) + inside * np.arange(planes)[:, None]
    places, weights = flat.reshape(-1), widen(grad).reshape(-1)
    if places.size and not 0 <= places.min() <= places.max() < data.size:
        return None
    sums = [np.zeros(data.size), np.zeros(data.size)]
    for power, total in enumerate(sums, 1):
        np.add.at(total, places, weights**power)
    value, squares = (total.reshape(data.shape) for total in sums)
    most = int(np.bincount(places).max(initial=1))
    return rounded(operation, value, accumulated(operation, value, squares, most))
