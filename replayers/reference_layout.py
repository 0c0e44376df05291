"""Exact formulas of the operations that only move elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tracediff.replayers.reference_operations import (
    accumulated,
    argument,
    axes_of,
    exact,
    formula,
    rounded,
    widen,
)
from tracediff.replaying import Operation, Replayed


@formula("reshape", "squeeze", "unsqueeze")
def _reshape(operation: Operation) -> Replayed | None:
    return exact(operation, widen(operation.inputs[0]).reshape(operation.shape))


@formula("expand")
def _expand(operation: Operation) -> Replayed | None:
    return exact(operation, np.broadcast_to(widen(operation.inputs[0]), operation.shape))


@formula("cast")
def _cast(operation: Operation) -> Replayed | None:
    """Between floating-point types, or from integers; of complex numbers the real part is kept."""
    data = widen(operation.inputs[0])
    if operation.dtype.startswith("complex"):
        return exact(operation, data + 0j)
    return exact(operation, data.real) if operation.dtype.startswith(("float", "bfloat")) else None


@formula("transpose")
def _transpose(operation: Operation) -> Replayed | None:
    data = widen(operation.inputs[0])
    given = argument(operation, "dims", "axes")
    if given is not None:
        return exact(operation, data.transpose([int(i) for i in given]))
    for names in (("dim0", "dim1"), ("axis0", "axis1"), ("axis1", "axis2")):
        pair = [argument(operation, name) for name in names]
        if None not in pair:
            return exact(operation, data.swapaxes(int(pair[0]), int(pair[1])))
    moved = argument(operation, "source"), argument(operation, "destination")
    if None not in moved:
        return exact(operation, np.moveaxis(data, *moved))
    return exact(operation, data.T)


@formula("concatenate")
def _concatenate(operation: Operation) -> Replayed | None:
    axis = int(argument(operation, "dim", "axis", default=0))
    parts = [widen(array) for array in operation.inputs if array.size or array.ndim > 1]
    return exact(operation, np.concatenate(parts, axis=axis))


@formula("stack")
def _stack(operation: Operation) -> Replayed | None:
    axis = int(argument(operation, "dim", "axis", default=0))
    return exact(operation, np.stack([widen(array) for array in operation.inputs], axis=axis))


@formula("slice")
def _slice(operation: Operation) -> Replayed | None:
    data = widen(operation.inputs[0])
    if operation.op == "mlx.getitem":
        return exact(operation, data[_place_of(operation)])
    if not operation.op.startswith("aten.slice"):
        return None
    where = [slice(None)] * data.ndim
    where[int(argument(operation, "dim", default=0))] = slice(
        argument(operation, "start"), argument(operation, "end"), argument(operation, "step")
    )
    return exact(operation, data[tuple(where)])


def _place_of(operation: Operation) -> Any:
    """What an array is indexed with, as MLX's recorder wrote it."""
    given = argument(operation, "arg1")
    return tuple(map(_index_of, given)) if isinstance(given, list) else _index_of(given)


def _index_of(text: Any) -> Any:
    """One index as it was printed: a number, `Ellipsis`, `None`, `slice(0, None, 2)`.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(text, int):
        return text
    if text in ("Ellipsis", "None"):
        return Ellipsis if text == "Ellipsis" else None
    bounds = str(text).removeprefix("slice(").removesuffix(")").split(", ")
    return slice(*(None if bound == "None" else int(bound) for bound in bounds))


@formula("select")
def _select(operation: Operation) -> Replayed | None:
    data = widen(operation.inputs[0])
    index = int(argument(operation, "index"))
    return exact(operation, np.take(data, index, axis=int(argument(operation, "dim", default=0))))


@formula("split")
def _split(operation: Operation) -> Replayed | None:
    data = widen(operation.inputs[0])
    axis = int(argument(operation, "dim", "axis", default=0))
    if operation.op.startswith("aten.unbind"):
        return exact(operation, np.take(data, operation.output, axis=axis))
    sizes = argument(operation, "split_sizes")
    if operation.op.startswith("aten") and sizes is None:
        size = argument(operation, "split_size")
        size = size if size is not None else argument(operation, "chunks")
        if isinstance(size, list):
            sizes = size
        elif size is not None and operation.op.startswith("aten.split"):
            sizes = [int(size)] * math.ceil(data.shape[axis] / int(size))
    if sizes is not None:
        start = sum(sizes[: operation.output])
        where: list[Any] = [slice(None)] * data.ndim
        where[axis] = slice(start, start + sizes[operation.output])
        return exact(operation, data[tuple(where)])
    parts = argument(operation, "indices_or_sections", default=operation.outputs)
    return exact(operation, np.split(data, parts, axis=axis)[operation.output])


@formula("embedding")
def _embedding(operation: Operation) -> Replayed | None:
    weight, ids = operation.inputs[:2]
    return exact(operation, widen(weight)[ids.astype(np.int64)], "copy")


@formula("take")
def _take(operation: Operation) -> Replayed | None:
    data, ids = operation.inputs[:2]
    axis = argument(operation, "dim", "axis")
    return exact(operation, np.take(widen(data), ids.astype(np.int64), axis=axis), "copy")


@formula("take_along_axis")
def _take_along_axis(operation: Operation) -> Replayed | None:
    data, ids = operation.inputs[:2]
    axis = int(argument(operation, "dim", "axis", default=-1))
    index = ids.astype(np.int64)
    if operation.op.startswith("aten"):  # `gather` may take fewer rows than there are
        keep = [slice(0, n) for n in index.shape]
        keep[axis] = slice(None)
        data = data[tuple(keep)]
    return exact(operation, np.take_along_axis(widen(data), index, axis=axis), "copy")


@formula("index")
def _index(operation: Operation) -> Replayed | None:
    """By arrays in the first dimensions."""
    data, *ids = operation.inputs
    if not ids:
        return None
    if all(each.dtype.kind in "iub" for each in ids):
        where = tuple(each if each.dtype.kind == "b" else each.astype(np.int64) for each in ids)
        return exact(operation, widen(data)[where], "copy")
    return None


@formula("histc")
def _histogram(operation: Operation) -> Replayed | None:
    """How many elements are in each of `bins` parts from `min` to `max`; others do not count."""
    data = widen(operation.inputs[0])
    ends = [float(argument(operation, name, default=0)) for name in ("min", "max")]
    if ends[0] == ends[1]:
        ends = [float(data.min()), float(data.max())]
    bins = int(argument(operation, "bins", default=100))
    return exact(operation, np.histogram(data, bins, (ends[0], ends[1]))[0])


@formula("scatter")
def _scatter(operation: Operation) -> Replayed | None:
    """`data[ids] = values`, or added to it (`index_put`); one for each place of an axis
    (`scatter.src`, `scatter_add`)."""
    data, ids, values = operation.inputs
    adds = bool(argument(operation, "accumulate", default="scatter_add" in operation.op))
    if data.dtype.kind in "iub":
        return None
    places: Any = ids if ids.dtype.kind == "b" else ids.astype(np.int64)
    if operation.op.startswith(("aten.scatter.src", "aten.scatter_.src", "aten.scatter_add")):
        axis = int(argument(operation, "dim"))
        places = np.indices(ids.shape)
        places[axis] = ids
        places, values = tuple(places), values[tuple(slice(0, n) for n in ids.shape)]
    elif not operation.op.startswith("aten.index_put"):
        return None
    if adds:
        return _added(operation, places, widen(values))
    result = widen(data).copy()
    result[places] = widen(values)
    return exact(operation, result)


@formula("index_add")
def _index_add(operation: Operation) -> Replayed | None:
    """Adds `alpha` times each slice of the last argument to the slice that an index says."""
    data, ids, values = operation.inputs
    axis = int(argument(operation, "dim", default=0)) % data.ndim
    places = (*(slice(None) for _ in range(axis)), ids.astype(np.int64))
    return _added(operation, places, float(argument(operation, "alpha", default=1)) * widen(values))


def _added(operation: Operation, places: Any, values: Any) -> Replayed:
    """The first input with values added to it, several perhaps to one place."""
    result = widen(operation.inputs[0]).copy()
    squares, counts = np.square(result), np.ones(result.shape)
    np.add.at(result, places, values)
    np.add.at(squares, places, np.square(values))
    np.add.at(counts, places, 1)
    most = int(counts.max(initial=1))
    return rounded(operation, result, accumulated(operation, result, squares, most))


@formula("slice_update")
def _slice_update(operation: Operation) -> Replayed | None:
    """`data[index] = value` for slices and numbers."""
    if operation.op != "mlx.setitem":
        return None
    data, *rest = (widen(array) for array in operation.inputs)
    result = data.copy()
    result[_place_of(operation)] = rest[0] if rest else argument(operation, "arg2")
    return exact(operation, result)


@formula("topk")
def _topk(operation: Operation) -> Replayed | None:
    """The largest values and their places; which of equal ones is chosen is not for a formula to
    say."""
    data = widen(operation.inputs[0])
    axis = int(argument(operation, "dim", "axis", default=-1))
    if argument(operation, "largest", default=True) is False:
        return None
    first = np.arange(int(argument(operation, "k")))
    ranked = -np.sort(-data, axis=axis)
    if not operation.output:
        return exact(operation, np.take(ranked, first, axis=axis))
    if (np.diff(ranked, axis=axis) == 0).any() or argument(operation, "sorted") is False:
        return None
    return exact(operation, np.take(np.argsort(-data, axis=axis), first, axis=axis))


@formula("argmax", "argmin")
def _argument_of_the_largest(operation: Operation) -> Replayed | None:
    """The place of the largest or smallest value, unless several are equal to it."""
    data = widen(operation.inputs[0])
    data = -data if operation.canonical == "argmin" else data
    axis = argument(operation, "dim", "axis")
    if axis is None:
        data, axis = data.reshape(-1), 0
    if ((data == data.max(axis, keepdims=True)).sum(axis) != 1).any():
        return None
    found = data.argmax(axis)
    return exact(operation, found.reshape(operation.shape))


@formula("tril", "triu")
def _triangle(operation: Operation) -> Replayed | None:
    function = np.tril if operation.canonical == "tril" else np.triu
    shift = int(argument(operation, "diagonal", "k", default=0))
    return exact(operation, function(widen(operation.inputs[0]), shift))


@formula("repeat", "tile")
def _repeat(operation: Operation) -> Replayed | None:
    data = widen(operation.inputs[0])
    times = argument(operation, "repeats", "reps")
    if operation.op.startswith("aten.repeat.") or operation.canonical == "tile":
        return exact(operation, np.tile(data, times))
    axis = argument(operation, "dim", "axis")
    return exact(operation, np.repeat(data, int(times), axis=axis))


@formula("flip")
def _flip(operation: Operation) -> Replayed | None:
    data = widen(operation.inputs[0])
    return exact(operation, np.flip(data, axes_of(operation, data.ndim)))


@formula("roll")
def _roll(operation: Operation) -> Replayed | None:
    axes = argument(operation, "dims", "axis")
    shifts = argument(operation, "shifts", "shift")
    if not axes and axes != 0:
        axes, shifts = None, shifts[0] if isinstance(shifts, list) else shifts
    return exact(operation, np.roll(widen(operation.inputs[0]), shifts, axes))


@formula("sort")
def _sort(operation: Operation) -> Replayed | None:
    """The values in order; which of equal ones comes first is not for a formula to say."""
    data = widen(operation.inputs[0])
    axis = argument(operation, "dim", "axis", default=-1)
    sign = -1 if argument(operation, "descending", default=False) else 1
    ranked = sign * np.sort(sign * data, axis=axis)
    if not operation.output:
        return exact(operation, ranked) if not np.isnan(data).any() else None
    if (np.diff(ranked, axis=axis) == 0).any():
        return None
    return exact(operation, np.argsort(sign * data, axis=axis))


@formula("pad")
def _pad(operation: Operation) -> Replayed | None:
    """With a constant, or less of it where the width is negative."""
    data = widen(operation.inputs[0])
    if argument(operation, "mode", default="constant") != "constant":
        return None
    given = argument(operation, "pad", "pad_width")
    if operation.op.startswith("aten"):  # the last dimension comes first
        pairs = [tuple(given[i : i + 2]) for i in range(0, len(given), 2)][::-1]
        pairs = [(0, 0)] * (data.ndim - len(pairs)) + pairs
    else:
        pairs = [tuple(pair) for pair in np.broadcast_to(given, (data.ndim, 2)).tolist()]
    value = np.full(operation.shape, float(argument(operation, "value", "constant_values") or 0))
    sizes = zip(data.shape, pairs, strict=True)
    kept = data[tuple(slice(max(0, -a), n - max(0, -b)) for n, (a, b) in sizes)]
    starts = (max(0, before) for before, _ in pairs)
    value[tuple(slice(a, a + n) for a, n in zip(starts, kept.shape, strict=True))] = kept
    return exact(operation, value)


@formula("diagonal")
def _diagonal(operation: Operation) -> Replayed | None:
    return exact(operation, _on_diagonal(operation, widen(operation.inputs[0]), 0, 1))


@formula("diag_embed", "diagonal_backward")
def _diagonal_alone(operation: Operation) -> Replayed | None:
    """Zeros but for a diagonal."""
    value = np.zeros(math.prod(operation.shape))
    places = np.arange(value.size).reshape(operation.shape)
    first = (-2, -1) if operation.canonical == "diag_embed" else (0, 1)
    value[_on_diagonal(operation, places, *first)] = widen(operation.inputs[0])
    return exact(operation, value.reshape(operation.shape))


def _on_diagonal(operation: Operation, data: Any, *axes: int) -> Any:
    offset = int(argument(operation, "offset", default=0))
    places = zip((("dim1", "axis1"), ("dim2", "axis2")), axes, strict=True)
    return np.diagonal(data, offset, *(int(argument(operation, *n, default=d)) for n, d in places))


@formula("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(operation: Operation) -> Replayed | None:
    """(..., C r r, H, W) to (..., C, H r, W r), and back."""
    data = widen(operation.inputs[0])
    *batch, channels, height, width = data.shape
    r, rank = int(argument(operation, "upscale_factor", "downscale_factor")), len(batch)
    if operation.canonical == "pixel_shuffle":
        parts, order = (channels // r**2, r, r, height, width), (0, 3, 1, 4, 2)
    else:
        parts, order = (channels, height // r, r, width // r, r), (0, 2, 4, 1, 3)
    moved = data.reshape(*batch, *parts).transpose(*range(rank), *(rank + i for i in order))
    return exact(operation, moved.reshape(operation.shape))
