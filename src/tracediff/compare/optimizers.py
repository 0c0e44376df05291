"""How much of the difference of two updates follows from the difference of their optimizer states.

Adam divides by the root of the second moment, so where a gradient is at the level of rounding the
update is close to its sign and may flip: a tiny difference of gradients makes a large one of
updates, which is no fault. The same formula, applied in float64 to each side's own recorded
state, predicts that difference; what it does not predict was introduced by the update itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.compare.figures import unit_roundoff
from tracediff.trace.summary import FINGERPRINT_FIELDS

Floats = NDArray[np.float64]
Hyper = Mapping[str, Any]

_CLIP_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Step:
    """What a formula gives, and the standard deviation of its rounding errors."""

    value: Floats
    spread: Floats


ADAM: Final = frozenset({"Adam", "AdamW"})


def adam_update(
    exp_avg: NDArray[Any],
    exp_avg_sq: NDArray[Any],
    param_before: NDArray[Any],
    hyper: Mapping[str, Any],
) -> Floats:
    """The update of one parameter from its state after the moments were updated, in float64.

    Kingma and Ba, "Adam", 2015, algorithm 1, with decoupled weight decay as in Loshchilov and
    Hutter, "Decoupled weight decay regularization", 2019.

    Args:
        hyper: lr, beta1, beta2, eps, weight_decay, step, bias_correction, as recorders store them.
            Weight decay is applied here only where `decoupled` is not False.
    """
    m, v, p = (x.astype(np.float64) for x in (exp_avg, exp_avg_sq, param_before))
    step = float(hyper.get("step", 1) or 1)
    if hyper.get("bias_correction", True):
        m = m / (1 - float(hyper["beta1"]) ** step)
        v = v / (1 - float(hyper["beta2"]) ** step)
    lr = float(hyper["lr"])
    decay = float(hyper.get("weight_decay", 0.0)) if hyper.get("decoupled", True) else 0.0
    result: Floats = -lr * m / (np.sqrt(v) + float(hyper["eps"])) - lr * decay * p
    return result


def moment(before: Floats, given: Step, beta: float, roundoff: float) -> Step:
    """`m = beta m + (1 - beta) g` (Kingma and Ba 2015, algorithm 1); for the second moment `given`
    is the square. Each product is stored, of a coefficient that is rounded to the same dtype."""
    kept, added = beta * before, (1 - beta) * given.value
    value = kept + added
    spread = _rounded(roundoff, 2 * kept, 4 * added, value)
    return Step(value, np.hypot(spread, (1 - beta) * given.spread))


def momentum(before: Floats | None, given: Step, hyper: Hyper, roundoff: float) -> Step | None:
    """`b = mu b + (1 - dampening) g` (Sutskever et al. 2013, in the form of PyTorch and MLX), whose
    first value is g; None at the start where dampening leaves open what that is."""
    dampening = float(hyper.get("dampening", 0.0) or 0.0)
    if before is None:
        return None if dampening else given
    kept, added = float(hyper["momentum"]) * before, (1 - dampening) * given.value
    value = kept + added
    spread = _rounded(roundoff, 2 * kept, 2 * added, value)
    return Step(value, np.hypot(spread, given.spread))


def decayed(grad: Floats, param: Floats, hyper: Hyper, roundoff: float) -> Step:
    """The gradient with coupled weight decay: `g + lambda p`, whose terms may cancel."""
    added = float(hyper.get("weight_decay", 0.0) or 0.0) * param
    value = grad + added
    return Step(value, _rounded(roundoff, 2 * added, value * bool(added.any())))


def squared(given: Step) -> Step:
    return Step(given.value**2, 2 * np.abs(given.value) * given.spread)


def adam_step(exp_avg: Floats, exp_avg_sq: Floats, param: Floats, hyper: Hyper, u: float) -> Step:
    """Adam's update and its spread: some roundings of its own, of the parameter before and after,
    and what `1 - beta**step`, computed in float32, loses to cancellation."""
    value = adam_update(exp_avg, exp_avg_sq, param, hyper)
    correction = 0.0
    if hyper.get("bias_correction", True):
        count = float(hyper.get("step", 1) or 1)
        first, second = (1 - float(hyper[name]) ** count for name in ("beta1", "beta2"))
        correction = unit_roundoff("float32") * math.hypot(1 / first, 0.5 / second) / u
    return Step(value, _rounded(u, 4 * value, correction * value, 2 * param))


def sgd_step(direction: Step, param: Floats, hyper: Hyper, roundoff: float) -> Step:
    """`-lr d`, added to the parameter."""
    rate = float(hyper["lr"])
    value = -rate * direction.value
    spread = _rounded(roundoff, 3 * value, 2 * param)
    return Step(value, np.hypot(spread, rate * direction.spread))


def ahead(direction: Step, buffer: Floats, hyper: Hyper, roundoff: float) -> Step:
    """Nesterov's direction `g + mu b`."""
    added = float(hyper["momentum"]) * buffer
    value = direction.value + added
    return Step(value, np.hypot(_rounded(roundoff, 2 * added, value), direction.spread))


def clipped(grad: Floats, norm: float | None, limit: float, roundoff: float, sums: int) -> Step:
    """The gradient times `min(1, limit / (norm + 1e-6))`, as both stacks clip by norm; the factor
    is rounded, and the gradient itself is a sum of `sums` stored ones."""
    factor = 1.0 if norm is None else min(1.0, limit / (norm + _CLIP_EPSILON))
    value = factor * grad
    roundings = sums - 1 + (3 if factor < 1 else 0)
    return Step(value, _rounded(roundoff, math.sqrt(roundings) * value))


def norm_of(squares: Sequence[float], dtype: str, length: int) -> Step:
    """Norm of several gradients together: squares are summed in float32 at least, norms or sums
    of single ones stored in the gradients' dtype."""
    value = np.asarray(math.sqrt(sum(squares)))
    roundoff, single = unit_roundoff(dtype), unit_roundoff("float32")
    stored = roundoff * math.sqrt(4 + len(squares) / 4)
    return Step(value, np.asarray(math.hypot(stored, single * math.sqrt(length)) * float(value)))


def _rounded(roundoff: float, *terms: Floats) -> Floats:
    """Spread of the sum of terms that are each rounded to a dtype."""
    total = sum(np.square(term) for term in terms)
    result: Floats = roundoff / math.sqrt(3) * np.sqrt(total)
    return result


def sign_like_bound(inherited: float, roundoff: float) -> float:
    """Bound of the relative difference of two Adam updates where the states were not kept.

    A fraction of about `inherited` of the elements has a gradient at the level of the difference;
    each of those may move by twice the learning rate, hence the square root.
    """
    return 4 * math.sqrt(max(inherited, roundoff))


def of_noise(gradient: Sequence[float], inherited: float) -> float:
    """How far two updates may be apart by elements whose gradient is all rounding, relative (L2).

    At most the fraction `1 - (1 - t)^2 E|g|^2 / E g^2` of the elements is below t times the mean
    (Paley and Zygmund, 1932), with t the size of the difference over that mean. Updates of those
    that are independent of each other, and as large as the others, are apart by the root of twice
    their number. Elements that are exactly 0 on both sides are left out.

    Args:
        gradient: Fingerprint of the baseline's gradient.
        inherited: Relative difference (L2) of the two gradients.
    """
    known = dict(zip(FINGERPRINT_FIELDS, gradient, strict=True))
    count = known["count"] - known["zero"]
    if count < 1 or not (known["l2"] > 0 and known["abs_mean"] > 0):  # or it was tampered with
        return 0.0
    mean = known["abs_mean"] * known["count"] / count
    root = known["l2"] / math.sqrt(count)
    below = min(1.0, inherited * root / mean)
    fraction = 1 - ((1 - below) * mean / root) ** 2
    return math.sqrt(2 * max(0.0, fraction))
