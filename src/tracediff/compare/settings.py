"""Settings: equal up to how a stack spells a number, compared by name where they are tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tracediff.compare.bounds import SETTING_TOLERANCE as SETTING_TOLERANCE


def equal(a: Any, b: Any) -> bool:
    """Whether two setting values mean the same: numbers to float32 precision, tables by key."""
    if isinstance(a, bool) or isinstance(b, bool) or a is None or b is None:
        return a is b or (isinstance(a, bool) and isinstance(b, bool) and a == b)
    if isinstance(a, int | float) and isinstance(b, int | float):
        both_nan = math.isnan(a) and math.isnan(b)
        return both_nan or math.isclose(a, b, rel_tol=SETTING_TOLERANCE, abs_tol=0.0)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return not differing(a, b) and set(a) == set(b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys that both tables have with different values: name -> (baseline's, target's)."""
    return {key: (a[key], b[key]) for key in a if key in b and not equal(a[key], b[key])}
