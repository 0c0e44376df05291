"""Exact formulas of the operations that only move elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tracediff.replayers.reference_operations import (
    accumulated,
    argument,
    exact,
    formula,
    operands,
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
    (`scatter.src`)."""
    data, ids, values = operation.inputs
    if operation.op == "aten.scatter.src":
        result, axis = widen(data).copy(), int(argument(operation, "dim"))
        own = tuple(slice(0, n) for n in ids.shape)
        np.put_along_axis(result, ids, widen(values)[own], axis)
        return exact(operation, result) if ids.shape[:axis] == data.shape[:axis] else None
    if not operation.op.startswith("aten.index_put") or data.dtype.kind in "iub":
        return None
    places, result, squares = ids.astype(np.int64), widen(data).copy(), np.zeros(data.shape)
    if not argument(operation, "accumulate", default=False):
        result[places] = widen(values)
        return exact(operation, result)
    np.add.at(result, places, widen(values))
    np.add.at(squares, places, widen(values) ** 2)
    most = int(np.bincount(places.reshape(-1)).max(initial=1)) + 1
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


@formula("zeros", "ones", "full")
def _constant(operation: Operation) -> Replayed | None:
    value = {"zeros": 0.0, "ones": 1.0}.get(operation.canonical)
    if value is None:
        given = [x for x in operands(operation) if isinstance(x, int | float)]
        value = argument(
            operation, "fill_value", "value", "s", default=given[-1] if given else None
        )
    return exact(operation, np.full(operation.shape, float(value)))


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
