"""The one sentence that says where two runs part."""

from __future__ import annotations

from tracediff.operations import CONSTANT, LEAF
from tracediff.verdict import Divergence

_KINDS = {
    "missing": "is missing in the target",
    "extra": "is only in the target",
    "order": "comes in another order",
    "shape": "differs in shape",
    "nonfinite": "is not finite on one side",
    "text": "differs in text",
    "ids": "differs in token IDs",
    "labels": "differs in labels",
    "setting": "is set differently",
}


def sentence(found: Divergence) -> str:
    """Where, how far, and what that means: `first divergence at step 0, forward, mlp: ...`."""
    what = _KINDS.get(found.kind, f"differs by {found.error.rel_l2:.1e}")
    bound = f" where rounding explains {found.bound.rel_l2:.1e}" if found.bound else ""
    meaning = f": {found.meaning}" if found.meaning else ""
    place = f"step {found.step}, {found.stage}, {found.path}"
    it = "it" if found.span is None else _operation(found)
    return f"first divergence at {place}: {it} {what}{bound}{meaning}"


def _operation(found: Divergence) -> str:
    """The operation, or what each side has in its place, with the lines of code."""
    if set(found.op.values()) == {LEAF}:
        return f"a {CONSTANT} ({found.where['baseline'] or 'line unknown'})"
    told = {side: f"{op} ({found.where[side] or 'line unknown'})" for side, op in found.op.items()}
    if len(told) == 1:
        side, operation = next(iter(told.items()))
        return f"the result of {operation}, which only the {side} computes,"
    baseline, target = told["baseline"], told["target"]
    if baseline == target:
        return f"the result of {baseline}"
    return f"the result of {baseline} in the baseline, {target} in the target,"
