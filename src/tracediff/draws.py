"""How many numbers a generator drew, from its states alone.

Python, NumPy and torch (on the CPU) draw from MT19937: 624 words of 32 bits and a place among them
(Matsumoto and Nishimura, 1998). MLX splits a key of threefry2x32 (Salmon et al., 2011) for every
array that it draws. Each state determines the next, so numbers are counted by running a generator
from one state until it reaches the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

WORDS: Final = 624
_MIDDLE: Final = 397
_STRIDE: Final = WORDS - _MIDDLE
_LIMIT: Final = 1 << 27
"""Words after which counting is given up: half a gigabyte of them."""
_SPLITS: Final = 1 << 16
_ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY: Final = 0x1BD11BDA
_MASK: Final = 0xFFFFFFFF

Words = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the sequence of one generator.

    Attributes:
        first: First word of the block (MT19937), or of the key (MLX).
        second: Place in the block, from 0 to 624, or the second word of the key.
    """

    first: int
    second: int


def position(path: str, state: NDArray[Any]) -> Position | None:
    """Where a recorded state stands; None for a generator of another kind."""
    if path == "mlx" and state.shape == (2,):
        return Position(int(state[0]), int(state[1]))
    block = _block(path, state)
    return None if block is None else Position(int(block[0][0]), block[1])


def count(path: str, before: NDArray[Any], after: Position) -> int | None:
    """How many numbers were drawn from a state until a position: words of 32 bits, or keys of MLX.

    Returns:
        None for a generator of another kind, or where the position is not reached.
    """
    if path == "mlx" and before.shape == (2,):
        key = (int(before[0]), int(before[1]))
        for drawn in range(_SPLITS):
            if key == (after.first, after.second):
                return drawn
            key = _next_key(*key)
        return None
    block = _block(path, before)
    if block is None:
        return None
    words, place = block
    for turned in range(0, _LIMIT, WORDS):
        if int(words[0]) == after.first and turned + after.second >= place:
            return turned + after.second - place
        words = _turned(words)
    return None


def _block(path: str, state: NDArray[Any]) -> tuple[Words, int] | None:
    """Words and place of a state of MT19937, as each library lays it out."""
    if path in ("python", "numpy") and state.shape == (WORDS + 1,):
        return state[:WORDS].astype(np.uint32), int(state[WORDS])
    if path.startswith("torch.") and state.dtype == np.uint8 and state.size >= 24 + 8 * WORDS:
        raw = np.ascontiguousarray(state)
        left, place = int(raw[8:12].view("<i4")[0]), int(raw[16:24].view("<u8")[0])
        words = raw[24 : 24 + 8 * WORDS].view("<u8").astype(np.uint32)
        # Freshly seeded, its block is used up before anything was drawn from it.
        return words, WORDS if left == 1 and place == 0 else place
    return None


def _turned(words: Words) -> Words:
    """The next block of MT19937."""
    new = np.append(words, np.uint32(0))
    for start in (0, _STRIDE, 2 * _STRIDE, WORDS - 1):
        # A word depends on one that is 227 places before it: so many at a time.
        stop = min(start + _STRIDE, WORDS - 1) if start < WORDS - 1 else WORDS
        mixed = (new[start:stop] & 0x80000000) | (new[start + 1 : stop + 1] & 0x7FFFFFFF)
        from_ = (start + _MIDDLE) % WORDS
        other = new[from_ : from_ + stop - start]
        new[start:stop] = other ^ (mixed >> 1) ^ (mixed & 1) * np.uint32(0x9908B0DF)
        new[WORDS] = new[0]
    return new[:WORDS]


def _next_key(first: int, second: int) -> tuple[int, int]:
    """The key that MLX keeps when it splits one: halves of two hashes."""
    a, b = _threefry(first, second, 0, 2), _threefry(first, second, 1, 3)
    return a[0], b[0]


def _threefry(k0: int, k1: int, x0: int, x1: int) -> tuple[int, int]:
    """threefry2x32 with 20 rounds."""
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = (x0 + keys[0]) & _MASK, (x1 + keys[1]) & _MASK
    for round_ in range(5):
        for rotation in _ROTATIONS[round_ % 2]:
            x0 = (x0 + x1) & _MASK
            x1 = (((x1 << rotation) | (x1 >> (32 - rotation))) & _MASK) ^ x0
        x0 = (x0 + keys[(round_ + 1) % 3]) & _MASK
        x1 = (x1 + keys[(round_ + 2) % 3] + round_ + 1) & _MASK
    return x0, x1
