"""Whether a side's loss is the loss of its own logits and next tokens.

What a loss function counted need not be recorded; the gradient of the logits tells it. That of
cross-entropy is `w (softmax(z) - onehot(y))` at each position, so the one negative element is at
the label y, and where all is zero the position was ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.held import held
from tracediff.bisection.recompute import reference
from tracediff.events import ROOT, Event
from tracediff.replaying import Call
from tracediff.trace import Trace

_IDS = ("input_ids", "inputs", "x")
"""What a batch calls its token IDs."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a side's loss is found to be; None where it cannot be said.

    Attributes:
        is_of_next_tokens: Each label is the token after its position.
        is_mean: The loss is the mean of the cross-entropies at the positions that have a gradient.
    """

    is_of_next_tokens: bool | None = None
    is_mean: bool | None = None


def examine(trace: Trace, step: int, number: int) -> Loss:
    """The loss of one backward pass, held to the model's output in the same pass."""
    events = trace.events(step, samples=False)
    logits = _find(events, "forward", ROOT, "out", number)
    grad = _find(events, "backward", ROOT, "grad_out", number)
    loss = _find(events, "loss", "loss", "out", number)
    if logits is None or grad is None or loss is None or loss.shape != ():
        return Loss()
    if logits.shape != grad.shape or len(logits.shape) != 3 or _is_altered(events):
        return Loss()
    pulls = trace.array(grad).astype(np.float64)
    counted: NDArray[np.bool_] = np.asarray(pulls.any(axis=-1))
    if not counted.any():
        return Loss()
    labels = np.where(counted, pulls.argmin(axis=-1), 0)
    return Loss(
        _are_next(trace, events, number, labels, counted),
        _is_mean(trace, logits, loss, labels, counted),
    )


def _is_altered(events: Sequence[Event]) -> bool:
    """Whether a loss function was told to smooth or to weight: then it is another loss."""
    settings = [event.attributes for event in events if event.site.phase == "loss"]
    return any(s.get("label_smoothing") or s.get("weighted") for s in settings)


def _are_next(
    trace: Trace,
    events: Sequence[Event],
    number: int,
    labels: NDArray[np.intp],
    counted: NDArray[np.bool_],
) -> bool | None:
    for name in _IDS:
        event = _find(events, "rendering", f"batch.{name}", "out", number)
        if event is None or event.shape != labels.shape:
            continue
        following = np.roll(trace.array(event), -1, axis=1)
        right = (labels == following)[:, :-1] | ~counted[:, :-1]
        return bool(right.all() and not counted[:, -1].any())
    return None


def _is_mean(
    trace: Trace,
    logits: Event,
    loss: Event,
    labels: NDArray[np.intp],
    counted: NDArray[np.bool_],
) -> bool | None:
    single = "float64" if logits.dtype == "float64" else "float32"
    inputs: dict[str, NDArray[Any]] = {
        "in": trace.array(logits)[counted].astype(single),
        "labels": labels[counted],
    }
    call = Call(op="cross_entropy", inputs=inputs, settings={"reduction": "mean"}, dtype=loss.dtype)
    found = reference().replay(call)
    if found is None:
        return None
    return held(trace.array(loss), found.value, found.spread).holds


def _find(events: Sequence[Event], stage: str, path: str, port: str, call: int) -> Event | None:
    for event in events:
        site = event.site
        if (site.phase, site.path, site.port, site.call) == (stage, path, port, call):
            return event if event.payload is not None else None
    return None
