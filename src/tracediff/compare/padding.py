"""Which elements of a tensor count: rows of padding tokens do not.

What a model computes at padded positions is nobody's result, and stacks differ there by design
(a padded row may see the padding, or nothing, or the mean of everything).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracediff.compare.masks import is_mask_port
from tracediff.events import Event

Mask = NDArray[np.bool_]


class Padding:
    """The padding masks of one step's batches, looked up by the shape of a tensor."""

    def __init__(
        self,
        masks: Sequence[NDArray[Any]],
        eval_masks: Sequence[NDArray[Any]] = (),
        calls: Mapping[str, int] | None = None,
        trained: Mapping[tuple[str, int], NDArray[Any]] | None = None,
    ) -> None:
        """
        Args:
            masks: One array (batch, sequence) per model call, non-zero where a token counts.
            eval_masks: The same for the evaluations, whose values are of stage `trajectory`.
            calls: Calls per path in the step, which relate `#call` to the model call.
            trained: Path and call of a loss function -> boolean array of the shape of its targets,
                False where it ignores one.
        """
        self._masks = [np.asarray(mask).astype(bool) for mask in masks]
        self._eval_masks = [np.asarray(mask).astype(bool) for mask in eval_masks]
        self._calls = calls or {}
        self._trained = trained or {}

    def counts(self, event: Event, shape: tuple[int, ...]) -> Mask | None:
        """Boolean mask broadcastable to `shape`, or None where every element counts."""
        if event.kind in ("labels", "mask"):
            return None  # what they say of padding is just what has to be compared
        if event.site.phase == "loss":
            trained = self._trained.get((event.site.path, event.site.call))
            if trained is None or shape[: trained.ndim] != trained.shape:
                return None
            return trained.reshape(*trained.shape, *(1,) * (len(shape) - trained.ndim))
        mask = self._mask_of(event)
        if mask is None or mask.all() or not shape:
            return None
        batch, length = mask.shape
        if shape[:2] == (batch, length):
            return mask.reshape(batch, length, *(1,) * (len(shape) - 2))
        if len(shape) == 4 and (shape[0], shape[2]) == (batch, length):
            queries, keys = mask[:, None, :, None], mask[:, None, None, :]
            is_map = shape[3] == length and not event.dims and not is_mask_port(event.site.port)
            # A mask has to say that padding is hidden; what lies behind it is nobody's result.
            return queries & keys if is_map else queries
        if shape[0] == batch * length and len(shape) <= 2:
            return mask.reshape(-1, *(1,) * (len(shape) - 1))
        return None

    def _mask_of(self, event: Event) -> Mask | None:
        site = event.site
        evaluation = site.phase == "trajectory" or site.path.startswith("eval_batch.")
        masks = self._eval_masks if evaluation else self._masks
        if not masks:
            return None
        per_batch = 1 if evaluation else max(1, self._calls.get(site.path, 1) // len(masks))
        return masks[min(site.call // per_batch, len(masks) - 1)]
