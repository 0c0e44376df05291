"""Distributed tensors: the part of one that this process holds, and a text that says which it is.

Nothing here communicates: what a process holds is read where it lies, and never gathered.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch

_ORDINARY: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_ODD: Final = re.compile(r"[^A-Za-z0-9_.-]")
_KNOWN: Final = frozenset({"Shard", "_StridedShard", "Replicate", "Partial"})
"""Placements of which it is known where a part stands. By name, as their module may be absent."""

_CUTS: Final = ("Shard", "_StridedShard")


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a `DTensor`, whose module is not imported to find out."""
    if type(tensor) in _ORDINARY:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    cls = getattr(module, "DTensor", None)
    return cls is not None and isinstance(tensor, cls)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a distributed tensor; any other tensor as it is."""
    if not is_distributed(tensor):
        return tensor
    held: Any = tensor
    local: torch.Tensor = held._local_tensor
    return local


def shard_of(tensor: torch.Tensor) -> str:
    """Which part this process holds, as docs/trace-format.md describes; "" for what is whole."""
    if not is_distributed(tensor):
        return ""
    held: Any = tensor
    mesh, placements = held.device_mesh, held.placements
    sizes, at = tuple(mesh.shape), mesh.get_coordinate()
    if all(size == 1 or _name(p) == "Replicate" for size, p in zip(sizes, placements, strict=True)):
        return ""
    names = mesh.mesh_dim_names or range(len(sizes))
    places = at or ["-"] * len(sizes)
    fields = (
        ",".join(
            f"{_ODD.sub('_', str(name))}={size}@{place}"
            for name, size, place in zip(names, sizes, places, strict=True)
        ),
        ",".join(map(_placement, placements)),
        "x".join(map(str, tensor.shape)),
        "?" if at is None else _offset(held, sizes, at),
    )
    return "|".join(fields)


def _name(placement: Any) -> str:
    return type(placement).__name__


def _placement(placement: Any) -> str:
    match _name(placement):
        case "Shard":
            return f"S({placement.dim})"
        case "Replicate":
            return "R"
        case "Partial":
            return f"P({_ODD.sub('_', str(placement.reduce_op))})"
        case "_StridedShard":
            return f"_StridedShard({placement.dim}/{placement.split_factor})"
        case other:
            return other


def _offset(tensor: Any, sizes: Sequence[int], at: Sequence[int]) -> str:
    """Where the part begins along each dimension of the whole, or `?` where that is not known."""
    if not all(_name(p) in _KNOWN for p in tensor.placements):
        return "?"
    cuts = _cuts(tensor, sizes)
    if cuts is None:
        return "?"
    start, left = [0] * len(tensor.shape), list(tensor.shape)
    for axis in cuts:
        dim = tensor.placements[axis].dim
        # As `torch.chunk` cuts: equal parts, of which the last may be short or empty.
        each = -(-left[dim] // sizes[axis])
        begin = min(at[axis] * each, left[dim])
        start[dim] += begin
        left[dim] = min(each, left[dim] - begin)
    return ",".join(map(str, start))


def _cuts(tensor: Any, sizes: Sequence[int]) -> list[int] | None:
    """Dimensions of the mesh that cut the tensor, in the order in which they do, or None.

    Two orders are known: that of the mesh, and that of FSDP2 over tensor parallel, whose parts FSDP
    cuts further (`_StridedShard`), though its own dimension of the mesh comes first.
    """
    order = getattr(tensor._spec, "shard_order", None) or ()
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
        return None
    found = [axis for axis, p in enumerate(tensor.placements) if _name(p) in _CUTS]
    late = [axis for axis in found if _name(tensor.placements[axis]) == "_StridedShard"]
    for axis in late:
        dim = tensor.placements[axis].dim
        before = [sizes[a] for a in found if a > axis and tensor.placements[a].dim == dim]
        if tensor.placements[axis].split_factor != math.prod(before):
            return None
    return [axis for axis in found if axis not in late] + late[::-1]
