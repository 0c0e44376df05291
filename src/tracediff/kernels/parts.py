"""A summary from what was found of the parts of a value where it lies: on another device.

What a part adds depends on its own elements alone, so that a device finds it of all parts at once.
Put together here, it is bit for bit what `summary` finds of the whole.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracediff.kernels import BLOCK, digest_of_blocks, packed
from tracediff.kernels import SKETCH_SIZE as SKETCH_SIZE

HASHED: Final = 1024
"""Bytes of a block of the digest."""
SHORTEST: Final = 241
"""Bytes from which a value is hashed in blocks."""
TAIL: Final = HASHED + 64
"""Bytes at the end of a value that the digest is finished with, if there are so many."""
SKETCHED: Final = 1 << 16
"""Elements of a block of the sketch."""
SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""That of XXH3's specification."""
FOUND: Final = ("sum", "abs", "square", "low", "high", "zero", "nan", "inf")
"""What is found of each block of `BLOCK` elements: sums and extremes of the finite ones (infinities
where there is none), and counts."""


class Places(NamedTuple):
    """Where in an array of 64-bit words there is what was found of the parts of a value.

    Attributes:
        hashed: See `digest_of_blocks`: uint64 of shape ((nbytes - 1) // `HASHED`, 8).
        moments: float64 of shape (blocks, `FOUND`), the sums in the order of `native/values.h`.
        buckets: Of each block of `SKETCHED` elements the buckets of its sketch: float64 of shape
            (blocks, `SKETCH_SIZE`).
        tail: The last `TAIL` bytes of the value, or all; the last word need not be full.
    """

    hashed: slice
    moments: slice
    buckets: slice
    tail: slice


def places(elements: int, nbytes: int) -> Places:
    """Those of a value of so many elements and bytes."""
    sizes = (
        8 * ((nbytes - 1) // HASHED),
        len(FOUND) * -(-elements // BLOCK),
        SKETCH_SIZE * -(-elements // SKETCHED),
        -(-min(nbytes, TAIL) // 8),
    )
    ends = list(accumulate(sizes))
    return Places(*map(slice, [0, *ends], ends))


def put_together(
    words: NDArray[np.uint64], elements: int, nbytes: int
) -> tuple[bytes | None, bytes, NDArray[np.float64]]:
    """Digest (None where the C code cannot find it), brief statistics (as `summary` has them) and
    sketch of a value.

    Args:
        words: What was found of its parts, see `Places`.
    """
    at = places(elements, nbytes)
    tail = words[at.tail].view(np.uint8)[: min(nbytes, TAIL)]
    found = digest_of_blocks(words[at.hashed], tail, nbytes)
    moments = words[at.moments].view(np.float64).reshape(-1, len(FOUND))
    buckets = words[at.buckets].view(np.float64).reshape(-1, SKETCH_SIZE)
    with np.errstate(invalid="ignore", over="ignore"):
        # Along this axis NumPy adds row after row, as the C code does.
        total: NDArray[np.float64] = np.add.reduce(buckets, axis=0, initial=0.0)
        sums = np.add.reduce(moments[:, :3], axis=0, initial=0.0).tolist()
    zero, nan, inf = moments[:, 5:].sum(axis=0).tolist()
    count = float(elements)
    if not (finite := count - nan - inf):
        return found, packed((count, nan, inf, *[0.0] * 13)), total
    low, high = float(moments[:, 3].min()), float(moments[:, 4].max())
    statistics = (
        zero,
        sums[0] / finite,
        sums[1] / finite,
        math.sqrt(sums[2]),
        *[math.nan] * 2,
        low,
        *[math.nan] * 5,
        high,
    )
    numbers = count, nan, inf, *[number + 0.0 for number in statistics]
    return found, packed(numbers), total
