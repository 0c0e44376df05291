"""Convolutions, also transposed ones, and their gradients: one sum of products, solved three ways.

`y[n, o, p] = sum x[n, c, s p + d k - padding] w[o, c, k]` over the channels c of a group and the
places k of the kernel. A transposed convolution is what the gradient of the input is of a plain
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np

from tracediff.replayers.reference_operations import (
    accumulated,
    argument,
    check_room,
    formula,
    rounded,
    widen,
)
from tracediff.replayers.reference_reductions import summed
from tracediff.replayers.reference_statistics import asked
from tracediff.replaying import Floats, Operation, Replayed

_TRANSFORMED: Final = 4.0
"""How much more kernels err that transform their input (Winograd, Fourier): Barabasz et al., "Error
analysis and improving the accuracy of Winograd convolution for deep neural networks", 2020."""

_ALL: Final[tuple[Any, ...]] = (slice(None), slice(None))
"""Of a batch and of channels."""

_LARGEST: Final = 4096
"""Places of a kernel up to which it is worked out: each takes a product of matrices."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """How a kernel moves over its input.

    Attributes:
        stride, padding, dilation: One for each dimension of space.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Floats, w: Floats, space: tuple[int, ...]) -> Floats:
        """(N, C, *S), (O, C / groups, *K) -> (N, O, *space)."""
        padded = self._padded(x)
        result = np.zeros((len(x), self.groups, len(w) // self.groups, math.prod(space)))
        for place, where in self._places(w, space):
            rows = self._grouped(padded[where])
            result += np.matmul(self._kernel(w, place), rows)
        return result.reshape(len(x), len(w), *space)

    def of_input(self, y: Floats, w: Floats, space: tuple[int, ...]) -> Floats:
        """(N, O, *P), (O, C / groups, *K) -> (N, C, *space): what is passed back to the input."""
        count = w.shape[1] * self.groups
        padded = self._padded(np.zeros((len(y), count, *space)))
        rows = self._grouped(y)
        for place, where in self._places(w, y.shape[2:]):
            turned = self._kernel(w, place).swapaxes(-1, -2)
            padded[where] += np.matmul(turned, rows).reshape(len(y), count, *y.shape[2:])
        inside = [slice(p, p + n) for p, n in zip(self.padding, space, strict=True)]
        found: Floats = padded[(*_ALL, *inside)]
        return found

    def of_weight(self, y: Floats, x: Floats, shape: tuple[int, ...]) -> Floats:
        """(N, O, *P), (N, C, *S) -> (O, C / groups, *K): what is passed back to the weight."""
        padded, result = self._padded(x), np.zeros(shape)
        rows = self._grouped(y)
        for place, where in self._places(result, y.shape[2:]):
            found = np.matmul(rows, self._grouped(padded[where]).swapaxes(-1, -2)).sum(axis=0)
            result[(*_ALL, *place)] = found.reshape(shape[:2])
        return result

    def _padded(self, x: Floats) -> Floats:
        return np.pad(x, ((0, 0), (0, 0), *((p, p) for p in self.padding)))

    def _grouped(self, x: Floats) -> Floats:
        """(N, C, *P) -> (N, groups, C / groups, all of P)."""
        return x.reshape(len(x), self.groups, x.shape[1] // self.groups, -1)

    def _kernel(self, w: Floats, place: tuple[int, ...]) -> Floats:
        """One place of a kernel: (groups, O / groups, C / groups)."""
        at: Floats = w[(*_ALL, *place)]
        return at.reshape(self.groups, -1, w.shape[1])

    def _places(
        self, w: Floats, space: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Each place of the kernel, and where of the padded input it is multiplied with.

        Raises:
            ValueError: The kernel has too many.
        """
        if math.prod(w.shape[2:]) > _LARGEST:
            raise ValueError("a kernel of too many places")
        for place in product(*map(range, w.shape[2:])):
            starts = (d * k for d, k in zip(self.dilation, place, strict=True))
            spans = zip(starts, self.stride, space, strict=True)
            yield place, (*_ALL, *(slice(a, a + s * n, s) for a, s, n in spans))


def _read(operation: Operation, x: Floats, rank: int) -> Convolution:
    def each(name: str, default: int) -> tuple[int, ...]:
        given = argument(operation, name, default=default)
        found = tuple(given) if isinstance(given, list | tuple) else (given,)
        return tuple(int(x) for x in (found * rank if len(found) == 1 else found))

    stride, padding, dilation = each("stride", 1), each("padding", 0), each("dilation", 1)
    check_room(operation, [n + 2 * p for n, p in zip(x.shape[2:], padding, strict=True)])
    return Convolution(stride, padding, dilation, int(argument(operation, "groups", default=1)))


def _found(
    operation: Operation, work: Callable[..., Floats], a: Floats, b: Floats, shape: Any, terms: int
) -> tuple[Floats, Floats]:
    """A sum of products of `a` and `b`, and its error."""
    value, squares = work(a, b, shape), work(a**2, b**2, shape)
    return value, _TRANSFORMED * accumulated(operation, value, squares, terms)


@formula("convolution")
def _convolution(operation: Operation) -> Replayed | None:
    x, w, *bias = (widen(array) for array in operation.inputs)
    if operation.op.startswith("mlx"):
        if argument(operation, "flip", "input_dilation") not in (None, False, 1):
            return None
        x, w = np.moveaxis(x, -1, 1), np.moveaxis(w, -1, 1)
        value, error = _forward(operation, x, w, operation.shape[1:-1])
        return rounded(operation, np.moveaxis(value, 1, -1), np.moveaxis(error, 1, -1))
    value, error = _forward(operation, x, w, operation.shape[2:])
    if bias:
        value = value + bias[0].reshape(-1, *(1 for _ in operation.shape[2:]))
    return rounded(operation, value, error)


def _forward(
    operation: Operation, x: Floats, w: Floats, space: tuple[int, ...]
) -> tuple[Floats, Floats]:
    found = _read(operation, x, len(space))
    if argument(operation, "transposed", default=False):
        terms = x.shape[1] // found.groups * math.prod(w.shape[2:])
        return _found(operation, found.of_input, x, w, space, terms)
    return _found(operation, found.forward, x, w, space, math.prod(w.shape[1:]))


@formula("convolution_backward")
def _convolution_backward(operation: Operation) -> Replayed | None:
    """Gradients of the input, the weight and the bias."""
    y, x, w = (widen(array) for array in operation.inputs)
    which, found = asked(operation), _read(operation, x, y.ndim - 2)
    if which == 2:
        return rounded(operation, *summed(operation, y, (0, *range(2, y.ndim))))
    transposed = argument(operation, "transposed", default=False)
    if which == 1:
        inner, outer = (x, y) if transposed else (y, x)
        terms = len(y) * math.prod(inner.shape[2:])
        return rounded(operation, *_found(operation, found.of_weight, inner, outer, w.shape, terms))
    space = x.shape[2:]
    if transposed:
        terms = math.prod(w.shape[1:])
        return rounded(operation, *_found(operation, found.forward, y, w, space, terms))
    terms = y.shape[1] // found.groups * math.prod(w.shape[2:])
    return rounded(operation, *_found(operation, found.of_input, y, w, space, terms))
