"""Weights that one side holds in another layout: rows or columns reordered, or transposed.

Heads may be numbered in another order, queries and keys stored for an interleaved rotary embedding,
a matrix kept as (in, out): as long as everything that belongs together is laid out alike, the block
computes the same. Such weights differ at loading all the same. They are told as healed if the
output of the block agrees, and everything of theirs (output, gradient, optimizer state) is compared
in the baseline's layout. A layout is recognised by exact equality of all slices, never by shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.align.names import STORED_IN_OUT, parent
from tracediff.bisection.views import Common, Take, viewed
from tracediff.events import Event
from tracediff.trace import Trace

_Array = NDArray[Any]

_OUTPUTS: Final = ("out", "grad_out")
_INPUTS: Final = ("in", "grad_in")


@dataclass(frozen=True, slots=True)
class Relayout:
    """How the target's parameter becomes the baseline's.

    Attributes:
        axis: Axis whose slices are reordered, or None for a transposed matrix.
        order: Slice of the target for each of the baseline.
        of_outputs: Whether the axis is that of the module's outputs, not of its inputs.
    """

    axis: int | None = None
    order: tuple[int, ...] = ()
    of_outputs: bool = True

    @property
    def take(self) -> Take:
        if self.axis is None:
            return np.transpose
        return partial(np.take, indices=np.array(self.order), axis=self.axis)

    @property
    def of_feature(self) -> Take:
        """The same for a value of the module whose last axis is the reordered one."""
        return partial(np.take, indices=np.array(self.order), axis=-1)

    def told(self) -> str:
        if self.axis is None:
            return "is stored transposed in the target"
        return f"has its {len(self.order)} slices of axis {self.axis} in another order"


def relayout(a: _Array, b: _Array, dims: tuple[str, ...] = ()) -> Relayout | None:
    """How a parameter of the target has to be laid out to be the baseline's bit for bit, or None.

    Args:
        a, b: Baseline's and target's values, which differ.
        dims: Names of the baseline's dimensions; (out, in) is taken where there are none.
    """
    if a.dtype != b.dtype or a.ndim not in (1, 2) or not a.any():
        return None
    outputs = 1 if dims == STORED_IN_OUT else 0
    if a.shape == b.shape:
        for axis in range(a.ndim):
            order = _reordered(np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0))
            if order is not None:
                return Relayout(axis, order, a.ndim == 1 or axis == outputs)
    if a.ndim == 2 and a.shape == b.shape[::-1] and np.array_equal(a, b.T):
        return Relayout()
    return None


def _reordered(a: _Array, b: _Array) -> tuple[int, ...] | None:
    """For each slice of `a`, the place of an equal one in `b`, each used once; None without."""
    places: dict[bytes, list[int]] = {}
    for place, part in enumerate(b):
        places.setdefault(part.tobytes(), []).append(place)
    order = []
    for part in a:
        free = places.get(part.tobytes())
        if not free:
            return None
        order.append(free.pop(0))
    return tuple(order)


def found(traces: tuple[Trace, Trace], common: Common) -> dict[str, Relayout]:
    """The parameters loaded in a step that differ in their layout alone, by the baseline's path."""
    layouts = {}
    for pair in common.alignment.pairs:
        a, b = pair.baseline, pair.target
        loaded = a.site.phase == "loading" and a.site.port == "param" and pair.layout == "same"
        if not loaded or a.digest == b.digest or a.payload is None or b.payload is None:
            continue
        layout = relayout(traces[0].array(a), traces[1].array(b), a.dims)
        if layout is not None:
            layouts[a.site.path] = layout
    return layouts


def applied(traces: tuple[Trace, Trace], common: Common, layouts: Mapping[str, Relayout]) -> Common:
    """The step with the target's values in the baseline's layout.

    The loaded parameters themselves stay as they are in the pairs, to be told as different.
    """
    if not layouts:
        return common
    loaded = [pair for pair in common.alignment.pairs if pair.baseline.site.phase == "loading"]
    views = {
        id(pair.target): viewed(traces[1], pair.target, take, alone=True)
        for pair in common.alignment.pairs
        if pair.target.payload is not None and (take := _take_of(pair.baseline, layouts))
    }
    result = common.replaced(({}, views))
    others = [p for p in result.alignment.pairs if p.baseline.site.phase != "loading"]
    alignment = replace(result.alignment, pairs=(*loaded, *others))
    return Common(alignment, result.events, result.notes)


def _take_of(event: Event, layouts: Mapping[str, Relayout]) -> Take | None:
    site = event.site
    if event.kind == "setting":
        return None
    if (layout := layouts.get(site.path)) is not None:
        return layout.take if event.shape else None
    if site.phase not in ("forward", "backward") or not event.shape:
        return None
    for path, layout in layouts.items():
        if parent(path) != site.path or layout.axis is None:
            continue
        ports = _OUTPUTS if layout.of_outputs else _INPUTS
        if site.port in ports and event.shape[-1] == len(layout.order):
            return layout.of_feature
    return None
