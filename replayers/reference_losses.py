"""Losses from logits and labels."""

from __future__ import annotations

import numpy as np

from tracediff.replayers.reference_rounding import arithmetic, positive_sum, stored, together, wide
from tracediff.replaying import Call, Floats, Replayed


def cross_entropy(call: Call) -> Replayed | None:
    """`logsumexp(z) - z[label]`, as it is or as mean or sum over the labels not ignored. Bridle,
    "Probabilistic interpretation of feedforward classification network outputs", 1990.

    `logsumexp` adds V positive terms, most of them far below the sum that they are added to: in
    a plain loop those are rounded the same way again and again, so the errors are not independent
    and the deterministic `V u` (Higham 2002, section 3.1) is taken instead of its root: six
    spreads make the bound.

    Args:
        call: `in` (N, V), or (..., V) with the setting `axis` -1, and `labels` (N,) or (...).
            Settings: reduction, ignore_index, label_smoothing.
    """
    logits, labels, settings = call.inputs["in"], call.inputs["labels"], call.settings
    last = logits.ndim == 2 or settings.get("axis") == -1
    plain = not settings.get("label_smoothing") and not settings.get("weighted")
    if not last or not plain or labels.shape != logits.shape[:-1] or labels.dtype.kind not in "iu":
        return None
    counts = labels != settings.get("ignore_index", -100)
    known = np.where(counts, labels, 0)
    if known.size and (known.min() < 0 or known.max() >= logits.shape[-1]):
        return None
    data = wide(logits)
    top = data.max(axis=-1, keepdims=True)
    normaliser = np.log(np.exp(data - top).sum(axis=-1)) + top[..., 0]
    chosen = np.take_along_axis(data, known[..., None], axis=-1)[..., 0]
    each: Floats = np.where(counts, normaliser - chosen, 0.0)
    roundoff = arithmetic(call)
    of_each = roundoff * (logits.shape[-1] / 6 + np.abs(normaliser) + np.abs(chosen)) * counts
    reduction = settings.get("reduction", "none")
    name = f"{call.op} V={logits.shape[-1]} {reduction} {call.dtype}"
    if reduction == "none":
        return Replayed(each, together(of_each, stored(call, each)), name)
    terms = int(counts.sum())
    if reduction not in ("mean", "sum") or not terms:
        return None
    share = terms if reduction == "mean" else 1
    value: Floats = np.asarray(each.sum() / share)
    # The errors of the terms may all have one sign: they are averaged, not damped.
    spread = np.asarray(of_each.sum() / share) + positive_sum(roundoff, terms) * np.abs(value)
    return Replayed(value, together(spread, stored(call, value)), name)
