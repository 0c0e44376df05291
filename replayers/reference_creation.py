"""Formulas of what operations make from nothing: constants, ranges, identity matrices."""

from __future__ import annotations

import numpy as np

from tracediff.compare.figures import unit_roundoff
from tracediff.replayers.reference_operations import argument, exact, formula, rounded
from tracediff.replaying import Operation, Replayed


@formula("zeros", "ones", "full")
def _constant(operation: Operation) -> Replayed | None:
    value = {"zeros": 0.0, "ones": 1.0}.get(operation.canonical)
    if value is None:
        # A tensor that is filled is listed among the operands, but nothing is read of it.
        numbers = [x for x in operation.operands if x is not None]
        given = [*(array for array in operation.inputs if not array.ndim), *numbers]
        value = argument(operation, "fill_value", "value", "s", default=given[-1])
    return rounded(operation, np.full(operation.shape, float(value)))


@formula("arange")
def _range(operation: Operation) -> Replayed | None:
    """`start + i step`, of numbers; from one number on, it is the end of a range from 0."""
    if operation.inputs:
        return None
    start, step = argument(operation, "start"), argument(operation, "step", default=1)
    end = argument(operation, "end", "stop")
    if "linspace" in operation.op:
        step = (end - start) / max(1, operation.shape[0] - 1)
    elif end is None or start is None:
        if end is None and start is None:
            return None
        start = 0
    moved = np.arange(operation.shape[0]) * float(step)
    value = float(start) + moved
    # 16-bit kernels may round each of the two steps to their own type.
    unit = unit_roundoff(operation.dtype) if operation.dtype.startswith(("float", "bf")) else 0.0
    return rounded(operation, value, 2 * unit * (abs(float(start)) + np.abs(moved)))


@formula("eye")
def _identity(operation: Operation) -> Replayed | None:
    rows, columns = operation.shape
    return exact(operation, np.eye(rows, columns, int(argument(operation, "k", default=0))))
