"""Places spread evenly over many: what is looked at in place of all of them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=256)
def evenly(count: int, limit: int) -> NDArray[np.intp]:
    """At most `limit` of the numbers below `count`, the first and the last among them, each once.

    Returns:
        In ascending order, read-only: the same array for the same numbers.
    """
    found = np.linspace(0, max(count - 1, 0), min(limit, count)).astype(np.intp)
    found = found[np.flatnonzero(np.diff(found, prepend=-1))]
    found.flags.writeable = False
    return found
