"""The gradient of logits, as PyTorch computes it, held to that of a cross-entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from tracediff import stacks  # noqa: E402
from tracediff.bisection.held import Finding  # noqa: E402
from tracediff.bisection.logit_gradients import rule  # noqa: E402
from tracediff.events import Event, Site  # noqa: E402

Array = NDArray[Any]
REFERENCE = stacks.load_replayer("reference")()
LOGITS = (2 * np.random.default_rng(0).standard_normal((2, 6, 500))).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 500, (2, 6))
LABELS[0, :2] = LABELS[1, 5] = -100


def gradient(logits: Array, labels: Array = LABELS, scale: float = 1.0) -> Array:
    z = torch.tensor(logits, requires_grad=True)
    each = torch.nn.functional.cross_entropy(z.flatten(0, 1), torch.tensor(labels.reshape(-1)))
    (each * scale).backward()
    found: Array = z.grad.numpy()
    return found


def ruled(baseline: Array, target: Array, logits: Array = LOGITS) -> Finding | None:
    event = Event(site=Site(0, "backward", "root", 0, "grad_out"), order=1, dtype="float32")
    return rule((event, event), (LOGITS, logits), (baseline, target), REFERENCE)


def test_two_right_gradients_of_logits_that_are_apart() -> None:
    logits = (LOGITS * (1 + 1e-4)).astype(np.float32)
    found = ruled(gradient(LOGITS), gradient(logits), logits)
    assert found is not None
    assert found.within


def test_the_rounding_of_a_large_logarithm_of_a_sum_is_no_error() -> None:
    """`exp(z - y)` with y of 24 in float32: every position is off by the rounding of its y, and the
    labels, where the gradient is `p - 1`, are not."""
    logits = (LOGITS * 4).astype(np.float32)
    logits += np.float32(24) - logits.max(axis=-1, keepdims=True)
    right = gradient(logits)
    counts = LABELS >= 0
    places = *np.nonzero(counts), LABELS[counts]
    share = np.float32(1 / counts.sum())
    y = np.log(np.exp(logits.astype(float)).sum(-1, keepdims=True)).astype(np.float32)
    other = np.exp(logits - (y + np.float32(2e-6))) * share * counts[..., None]
    other[places] -= share
    event = Event(site=Site(0, "backward", "root", 0, "grad_out"), order=1, dtype="float32")
    found = rule((event, event), (logits, logits), (right, other), REFERENCE)
    assert found is not None
    assert found.within


def test_sums_over_many_classes_that_err_to_one_side_are_no_error() -> None:
    """A plain loop over 50,000 exponentials loses most of the small ones' last bits: all
    probabilities come out alike too large, and the labels' own elements hardly move."""
    rng = np.random.default_rng(2)
    logits = (2 * rng.standard_normal((1, 27, 49_152))).astype(np.float32)
    labels = rng.integers(0, logits.shape[-1], logits.shape[:2])
    peaks = np.where(np.arange(27) % 9, 13.0, -13.0)  # most are likely, a few hardly possible
    np.put_along_axis(logits, labels[..., None], peaks.astype(np.float32)[None, :, None], axis=-1)
    right = gradient(logits, labels)
    z = logits.astype(float)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    p *= 1 + 2e-4 * rng.uniform(0.5, 1.0, (1, 27, 1))
    places = *np.nonzero(labels >= 0), labels.reshape(-1)
    p[places] -= 1
    other = (p / labels.size).astype(np.float32)
    event = Event(site=Site(0, "backward", "root", 0, "grad_out"), order=1, dtype="float32")
    found = rule((event, event), (logits, logits), (right, other), REFERENCE)
    assert found is not None
    assert found.within
    other[0, 9] *= 1.00002  # less than that, where nothing has to be off
    found = rule((event, event), (logits, logits), (right, other), REFERENCE)
    assert found is not None
    assert (found.within, found.blame) == (False, "target")


@pytest.mark.parametrize("size", [1e-5, 1e-3])
@pytest.mark.parametrize("side", ["baseline", "target"])
def test_one_position_that_is_off_is_blamed(side: str, size: float) -> None:
    right, wrong = gradient(LOGITS), gradient(LOGITS)
    wrong[1, 3] *= 1 + size
    found = ruled(wrong, right) if side == "baseline" else ruled(right, wrong)
    assert found is not None
    assert (found.within, found.blame) == (False, side)


def test_other_factors_labels_and_losses_are_left_to_others() -> None:
    right, others = gradient(LOGITS), LABELS.copy()
    others[1, 3] = (others[1, 3] + 1) % 500
    assert ruled(right, gradient(LOGITS, scale=1.001)) is None
    assert ruled(right, gradient(LOGITS, labels=others)) is None
    assert ruled(np.sin(right), np.cos(right)) is None
    assert ruled(0 * right, 0 * right) is None
