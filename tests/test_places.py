"""Places spread evenly over many."""

from __future__ import annotations

import numpy as np
import pytest

from tracediff.compare.places import evenly


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 1000, 123457])
@pytest.mark.parametrize("limit", [1, 2, 8, 256])
def test_they_are_spread_from_the_first_to_the_last(count: int, limit: int) -> None:
    found = evenly(count, limit)
    assert len(found) == min(count, limit)
    assert found[0] == 0
    assert limit == 1 or found[-1] == count - 1
    gaps = np.diff(found)
    assert not gaps.size or (gaps.min() >= 1 and gaps.max() - gaps.min() <= 1)


def test_there_are_none_among_none() -> None:
    assert evenly(0, 8).size == 0
