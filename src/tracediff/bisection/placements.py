"""Runs that place tensors differently on their meshes of processes: what of them is not compared.

A part of a tensor is compared with the same part of the same whole, and with nothing else: parts
are not put together. Where two runs place tensors differently, a value may also lack a partner, or
have another shape, for that reason alone (a plain local tensor says nothing of its placement).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tracediff.align import Alignment
from tracediff.bisection.views import Common
from tracediff.events import Event, Pair

PLACED: Final = "the runs place it differently on their meshes"
"""Of a pair whose values are different parts, or a part and a whole."""

SHAPED: Final = "of another shape where the runs place tensors differently on their meshes"

ABSENT: Final = "not on the other side, where the runs place tensors differently on their meshes"

REASONS: Final = frozenset({PLACED, SHAPED, ABSENT})

_COMPUTED: Final = ("forward", "loss", "backward", "trajectory")
_LOCAL: Final = ("trajectory", "grad_norm")
"""Summed over the parts that one process holds."""


def applied(common: Common, differently: bool) -> tuple[Common, bool]:
    """The step without what different placements keep from being compared, listed with the reason.

    Args:
        differently: Whether an earlier step showed that the runs place tensors differently.

    Returns:
        The step, and whether it or an earlier one showed that.
    """
    odd = [pair for pair in common.alignment.pairs if pair.baseline.shard != pair.target.shard]
    if not odd and not differently:
        return common, False
    found = common.apart(_why_not)
    alignment = replace(
        found.alignment,
        baseline_only=_told(found.alignment.baseline_only),
        target_only=_told(found.alignment.target_only),
    )
    notes = [*found.notes, _note(odd)] if odd else found.notes
    return Common(alignment, found.events, notes), True


def explained(alignment: Alignment) -> bool:
    """Whether anything was left out of a step because of placements."""
    return any(
        reason in REASONS
        for side in (alignment.baseline_only, alignment.target_only)
        for _, reason in side
    )


def _why_not(pair: Pair) -> str | None:
    a, b = pair.baseline, pair.target
    site = a.site
    if a.shard != b.shard or (site.phase, site.path) == _LOCAL:
        return PLACED
    shape = b.shape[::-1] if pair.layout == "transposed" else b.shape
    return SHAPED if site.phase in _COMPUTED and a.shape != shape else None


def _told(only: Sequence[tuple[Event, str]]) -> tuple[tuple[Event, str], ...]:
    """Events of one side with their reasons: one that a module may lack for its placement (values
    whose collective still runs, gradients that FSDP accumulates itself) is not missing."""
    return tuple(
        (event, reason)
        if reason in REASONS or event.site.phase not in ("forward", "backward")
        else (event, ABSENT)
        for event, reason in only
    )


def _note(odd: Sequence[Pair]) -> str:
    """Names one of the pairs, in every step the same: a parameter, if there is one."""
    pair = min(odd, key=lambda pair: (pair.baseline.site.port != "param", pair.baseline.site.path))
    a, b = (f"`{e.shard}`" if e.shard else "whole" for e in (pair.baseline, pair.target))
    return (
        "values that the runs place differently on their meshes were not compared "
        f"({pair.baseline.site.path}: {a} in the baseline, {b} in the target)"
    )
