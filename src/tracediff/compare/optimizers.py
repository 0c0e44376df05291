"""How much of the difference of two updates follows from the difference of their optimizer states.

Adam divides by the root of the second moment, so where a gradient is at the level of rounding the
update is close to its sign and may flip: a tiny difference of gradients makes a large one of
updates, which is no fault. The same formula, applied in float64 to each side's own recorded
state, predicts that difference; what it does not predict was introduced by the update itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

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


def residual(
    updates: tuple[NDArray[Any], NDArray[Any]],
    predicted: tuple[Floats, Floats],
    params_after: tuple[NDArray[Any], NDArray[Any]],
    hyper: Mapping[str, Any],
    roundoff: float,
) -> tuple[float, float]:
    """Difference of two updates that their states do not explain, and its bound.

    Returns:
        Both relative to the norm of the baseline's update: the norm of the unexplained part, and
        what rounding allows. An update read off as `after - before` is known to one rounding of
        the parameter on each side, and a stack that computes `1 - beta**step` in the parameter's
        dtype loses to cancellation what that difference is smaller than 1.
    """
    observed = updates[0].astype(np.float64) - updates[1].astype(np.float64)
    unexplained = observed - (predicted[0] - predicted[1])
    scale = float(np.linalg.norm(updates[0].astype(np.float64))) or 1.0
    param_norm = max(float(np.linalg.norm(p.astype(np.float64))) for p in params_after)
    allowed = roundoff * (4 * param_norm / scale + 64)
    if hyper.get("bias_correction", True):
        step = float(hyper.get("step", 1) or 1)
        allowed += sum(roundoff / (1 - float(hyper[name]) ** step) for name in ("beta1", "beta2"))
    return float(np.linalg.norm(unexplained)) / scale, allowed


def sign_like_bound(inherited: float, roundoff: float) -> float:
    """Bound of the relative difference of two Adam updates where the states were not kept.

    A fraction of about `inherited` of the elements has a gradient at the level of the difference;
    each of those may move by twice the learning rate, hence the square root.
    """
    return 4 * math.sqrt(max(inherited, roundoff))
