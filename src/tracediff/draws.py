"""How many numbers a generator drew, from its states alone.

Python, NumPy and torch (on the CPU) draw from MT19937: 624 words of 32 bits and a place among them
(Matsumoto and Nishimura, 1998). MLX splits a key of threefry2x32 (Salmon et al., 2011) for every
array that it draws. Each state determines the next, so numbers are counted by running a generator
from one state until it reaches the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

WORDS: Final = 624
_LIMIT: Final = 1 << 27
"""Words after which counting is given up: half a gigabyte of them."""
_TURNS: Final = 1 << 10
"""Blocks that are made at a time."""
_SPLITS: Final = 1 << 14
"""Keys likewise."""
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


def counts(path: str, before: NDArray[Any], places: Sequence[Position]) -> list[int | None]:
    """How many numbers were drawn from a state until each of some positions, which follow each
    other: words of 32 bits, or keys of MLX.

    Returns:
        One for each; None for a generator of another kind, and from the first one on that is not
        reached.
    """
    found: list[int | None] = []
    walk, is_key = _walk(path, before), path == "mlx"
    at, least = next(walk, None), 0
    for place in places:
        first = (place.first, place.second) if is_key else _tempered(place.first)
        more = 0 if is_key else place.second
        while at is not None and (at[0] != first or at[1] + more < least):
            at = next(walk, None)
        if at is None:
            break
        least = at[1] + more
        found.append(least)
    return found + [None] * (len(places) - len(found))


def _walk(path: str, state: NDArray[Any]) -> Iterator[tuple[int | tuple[int, int], int]]:
    """What can be told of a place (a key of MLX, the first output of a block of MT19937), and how
    many numbers are drawn until there."""
    if path == "mlx" and state.shape == (2,):
        key = (int(state[0]), int(state[1]))
        for drawn in range(_SPLITS):
            yield key, drawn
            key = _next_key(*key)
    block = _block(path, state)
    if block is None:
        return
    words, place = block
    yield _tempered(int(words[0])), -place
    generator = np.random.MT19937()
    generator.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": WORDS}}
    for turned in range(WORDS, _LIMIT, _TURNS * WORDS):
        outputs = generator.random_raw(_TURNS * WORDS)[::WORDS].tolist()
        for number, output in enumerate(outputs):
            yield output, turned + number * WORDS - place


def _tempered(word: int) -> int:
    """The output that MT19937 makes of a word of its state: one to one."""
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return word ^ (word >> 18)


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
