"""Complex numbers: their own operations, and which other formulas hold for them.

A rounding of a complex number is told by the size of the number, not of its parts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tracediff.replayers.reference_operations import (
    COMPLEX,
    FUNCTION,
    argument,
    exact,
    formula,
    operands,
    rounded,
    roundoff,
    widen,
)
from tracediff.replaying import Operation, Replayed

COMPLEX.update(
    ("add", "sub", "mul", "div", "neg", "abs", "square", "sqrt", "rsqrt", "reciprocal", "exp"),
    ("matmul", "addmm", "sum", "mean", "norm", "cumsum", "where", "copy", "detach", "alias"),
    ("identity", "reshape", "squeeze", "unsqueeze", "expand", "transpose", "concatenate", "stack"),
    ("slice", "select", "split", "index", "take", "repeat", "tile", "cast", "flip", "roll"),
    ("zeros", "ones"),
    ("view_as_real", "view_as_complex", "real", "imag", "conj", "complex", "polar"),
    ("_fft_r2c", "_fft_c2c", "_fft_c2r"),
)


@formula("view_as_real")
def _view_as_real(operation: Operation) -> Replayed | None:
    data = widen(operation.inputs[0])
    return exact(operation, np.stack([data.real, data.imag], axis=-1))


@formula("view_as_complex")
def _view_as_complex(operation: Operation) -> Replayed | None:
    data = widen(operation.inputs[0])
    return exact(operation, data[..., 0] + 1j * data[..., 1])


@formula("real", "imag", "conj")
def _part(operation: Operation) -> Replayed | None:
    return exact(operation, getattr(np, operation.canonical)(widen(operation.inputs[0])))


@formula("complex")
def _complex(operation: Operation) -> Replayed | None:
    real, imaginary = operands(operation)
    return exact(operation, real + 1j * imaginary)


@formula("polar")
def _polar(operation: Operation) -> Replayed | None:
    """`r (cos t + i sin t)`; for the error of a sine see `reference_operations`."""
    size, angle = operands(operation)
    value = size * np.exp(1j * angle)
    return rounded(operation, value, FUNCTION * roundoff(operation) * np.abs(size))


@formula("_fft_r2c", "_fft_c2c", "_fft_c2r")
def _fourier(operation: Operation) -> Replayed | None:
    """Discrete Fourier transforms over some dimensions, as PyTorch calls them.

    The error of a fast one grows with the stages that an element goes through, log2 N, and is
    spread over all elements alike. Gentleman and Sande, "Fast Fourier transforms: for fun and
    profit", 1966.
    """
    data = widen(operation.inputs[0])
    axes = tuple(int(axis) % data.ndim for axis in argument(operation, "dim"))
    whole = operation.shape if operation.canonical == "_fft_c2r" else data.shape
    sizes = [whole[axis] for axis in axes]
    count = math.prod(sizes)
    value: Any
    if operation.canonical == "_fft_c2r":
        value = np.fft.irfftn(data, sizes, axes, norm="forward")
    elif operation.canonical == "_fft_c2c":
        forward = operation.args["forward"]
        value = np.fft.fftn(data, None, axes) if forward else np.fft.ifftn(data, None, axes) * count
    else:
        transform = np.fft.rfftn if operation.args["onesided"] else np.fft.fftn
        value = transform(data, None, axes)
    value = value / (1.0, math.sqrt(count), count)[operation.args["normalization"]]
    size = np.sqrt(np.mean(np.abs(value) ** 2, axis=axes, keepdims=True))
    return rounded(operation, value, 2 * roundoff(operation) * math.log2(max(count, 2)) * size)
