"""Pairs a fused tensor of one stack with the parts that the other stack keeps by themselves.

One matrix for gate and up projection, or for queries, keys and values, holds the rows of its parts
one after the other. Each part becomes an event of its own, a view of the fused one, in
`c_attn[q_proj].weight`; so do its gradient, its optimizer state, its input and its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.align.names import STORED_IN_OUT
from tracediff.events import Event, View

_PARTS: Final = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
}
"""Last name of a fused module or parameter -> those of its parts, in the order of their rows."""

_Key = tuple[str, str, int, str]
_Sides = tuple[list[Event], list[Event]]


def match_parts(
    rest: _Sides, canonical: Callable[[int, str], str]
) -> tuple[list[tuple[Event, Event]], _Sides]:
    """Takes fused tensors apart where all of their parts are on the other side.

    Args:
        rest: The events of both sides that have no partner yet.
        canonical: From a side (0, 1) and a path to the name that all stacks share.

    Returns:
        Pairs of events of baseline and target, one of each a view or both settings; and what is
        left of `rest`.
    """
    pairs: list[tuple[Event, Event]] = []
    taken: set[int] = set()
    for side in (0, 1):
        known = {
            _key(event, canonical(1 - side, event.site.path)): event for event in rest[1 - side]
        }
        for fused in rest[side]:
            found = _parts_of(fused, canonical(side, fused.site.path), known)
            if found is None:
                continue
            taken |= {id(fused), *(id(part) for _, part in found)}
            pairs += found if side == 0 else [(part, piece) for piece, part in found]
    left = [[event for event in events if id(event) not in taken] for events in rest]
    return pairs, (left[0], left[1])


def _parts_of(
    fused: Event, path: str, known: dict[_Key, Event]
) -> list[tuple[Event, Event]] | None:
    """The pieces of a fused event, each with the part that it is; None where it has none."""
    for name in path.split("."):
        parts = [
            known.get(_key(fused, _renamed(path, name, part))) for part in _PARTS.get(name, ())
        ]
        found = [part for part in parts if part is not None]
        if not parts or len(found) < len(parts):
            continue
        pieces = [_named(fused, name, part) for part in _PARTS[name]]
        if fused.kind != "setting" and not fused.site.port.startswith("in"):
            axis = _axis(fused, found)
            if axis is None:
                continue
            sizes = [_shape(fused, part)[axis] for part in found]
            pieces = _cut(fused, pieces, axis, sizes)
        return list(zip(pieces, found, strict=True))
    return None


def _renamed(path: str, name: str, new: str) -> str:
    """The path with one of its names replaced."""
    return ".".join(new if part == name else part for part in path.split("."))


def _axis(fused: Event, parts: Sequence[Event]) -> int | None:
    """The axis along which the parts make up the fused tensor, or None where they do not."""
    shapes = [_shape(fused, part) for part in parts]
    if any(len(shape) != len(fused.shape) for shape in shapes):
        return None
    fits = [
        axis
        for axis in range(len(fused.shape))
        if sum(shape[axis] for shape in shapes) == fused.shape[axis]
        and all(_without(shape, axis) == _without(fused.shape, axis) for shape in shapes)
    ]
    return fits[0] if len(fits) == 1 else None


def _shape(fused: Event, part: Event) -> tuple[int, ...]:
    """The shape of a part in the layout of the fused tensor, which may be (in, out)."""
    flipped = (fused.dims == STORED_IN_OUT) != (part.dims == STORED_IN_OUT)
    return part.shape[::-1] if flipped else part.shape


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _cut(fused: Event, pieces: Sequence[Event], axis: int, sizes: Sequence[int]) -> list[Event]:
    """The pieces as views of the fused event, without what can be known from the payload alone."""
    stops = np.cumsum(sizes).tolist()
    return [
        replace(
            piece,
            shape=(*fused.shape[:axis], size, *fused.shape[axis + 1 :]),
            digest=b"",
            fingerprint=(),
            sketch=None,
            view=View(fused, partial(_slice, axis=axis, start=stop - size, stop=stop)),
        )
        for piece, size, stop in zip(pieces, sizes, stops, strict=True)
    ]


def _named(fused: Event, name: str, part: str) -> Event:
    path = _renamed(fused.site.path, name, f"{name}[{part}]")
    return replace(fused, site=replace(fused.site, path=path))


def _slice(array: NDArray[Any], axis: int, start: int, stop: int) -> NDArray[Any]:
    return np.moveaxis(np.moveaxis(array, axis, 0)[start:stop], 0, axis)


def _key(event: Event, path: str) -> _Key:
    return event.site.phase, path, event.site.call, event.site.port
