"""Parts of a summary, found on the device where a tensor lies: see `tracediff.kernels.parts`.

In Triton, which comes with PyTorch's builds for CUDA and ROCm. Each sum is taken in the order of
the C code (`tracediff/kernels/native`), so that a tensor has the same summary wherever it lies.
Elements have at most 32 bits: their squares are exact in float64, and it is all one whether a
product and a sum are fused.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

ROWS: Final = tl.constexpr(512)
LANES: Final = tl.constexpr(64)
BUCKETS: Final = tl.constexpr(256)
STRIPES: Final = tl.constexpr(16)
HASHED_AT_ONCE: Final = tl.constexpr(32)
"""Blocks of the hash that one program adds up."""
_AHEAD: Final = tl.constexpr(8)
"""Rows whose elements are asked for together: one by one, each would wait for the memory."""
_LARGEST: Final = tl.constexpr(1.7976931348623157e308)


@triton.jit
def _halves(lanes, half: tl.constexpr):
    """The sums of the lanes of both halves."""
    return tl.sum(tl.reshape(lanes, (2, half)), axis=0)


@triton.jit
def _folded(lanes):
    """The sum of 64 lanes, in halves."""
    return _halves(_halves(_halves(_halves(_halves(_halves(lanes, 32), 16), 8), 4), 2), 1)


@triton.jit
def _wide(elements):
    """Elements as float64. Those of bfloat16 come as the integers that have their bits: Triton's
    interpreter would round those that are subnormal."""
    if elements.dtype == tl.int16:
        elements = (elements.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return elements.to(tl.float64)


@triton.jit
def moments(x, out, count):
    """A program for each block of 64 * 512 elements, which has eight float64: `parts.FOUND`."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float64)
    absolute = tl.zeros((LANES,), tl.float64)
    square = tl.zeros((LANES,), tl.float64)
    low = tl.full((LANES,), float("inf"), tl.float64)
    high = tl.full((LANES,), float("-inf"), tl.float64)
    zero = tl.zeros((LANES,), tl.int32)
    nan = tl.zeros((LANES,), tl.int32)
    inf = tl.zeros((LANES,), tl.int32)
    rows = tl.minimum(ROWS, tl.cdiv(count - block * ROWS * LANES, LANES))
    for first in range(0, rows, _AHEAD):
        for ahead in tl.static_range(_AHEAD):
            at = (block * ROWS + first + ahead) * LANES + lane
            is_there = at < count
            value = _wide(tl.load(x + at, mask=is_there, other=0))
            is_finite = tl.abs(value) <= _LARGEST
            is_nan = value != value
            zero += (is_there & (value == 0.0)).to(tl.int32)
            nan += is_nan.to(tl.int32)
            inf += (~(is_finite | is_nan)).to(tl.int32)
            low = tl.where(is_there & is_finite & (value < low), value, low)
            high = tl.where(is_there & is_finite & (value > high), value, high)
            value = tl.where(is_finite, value, 0.0)
            total += value
            absolute += tl.abs(value)
            square += value * value
    to = out + block * 8 + tl.arange(0, 1)
    tl.store(to, _folded(total))
    tl.store(to + 1, _folded(absolute))
    tl.store(to + 2, _folded(square))
    tl.store(to + 3, tl.min(tl.reshape(low, (1, LANES)), axis=1))
    tl.store(to + 4, tl.max(tl.reshape(high, (1, LANES)), axis=1))
    tl.store(to + 5, tl.sum(tl.reshape(zero, (1, LANES)), axis=1).to(tl.float64))
    tl.store(to + 6, tl.sum(tl.reshape(nan, (1, LANES)), axis=1).to(tl.float64))
    tl.store(to + 7, tl.sum(tl.reshape(inf, (1, LANES)), axis=1).to(tl.float64))


@triton.jit
def _mixed(index):
    """splitmix64 of an index, as `native/sketch.c` has it."""
    z = index * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def buckets(x, out, count):
    """A program for each block of 256 rows of 256 elements, which has 256 float64."""
    block = tl.program_id(0).to(tl.int64)
    bucket = tl.arange(0, 2 * BUCKETS)
    total = tl.zeros((2 * BUCKETS,), tl.float64)
    rows = tl.minimum(BUCKETS, tl.cdiv(count - block * BUCKETS * BUCKETS, BUCKETS))
    for first in range(0, rows, _AHEAD):
        for ahead in tl.static_range(_AHEAD):
            row = block * BUCKETS + first + ahead
            index = (row * 5).to(tl.uint64)
            start = (_mixed(index + 4) & 255).to(tl.int32)
            element = bucket - start  # in turn from there; what comes round is in the second half
            at = row * BUCKETS + element
            is_there = (element >= 0) & (element < BUCKETS) & (at < count)
            value = _wide(tl.load(x + at, mask=is_there, other=0))
            word = _mixed(index + ((element >> 6) & 3).to(tl.uint64))
            is_negative = (word >> (element & 63).to(tl.uint64)) & 1
            total += tl.where(is_negative == 1, -value, value)
    to = out + block * BUCKETS + tl.arange(0, BUCKETS)
    tl.store(to, _halves(total, BUCKETS))


@triton.jit
def hashed(words, secret, out, blocks):
    """What each block of 1024 bytes adds to the eight accumulators of XXH3-128.

    Args:
        words: The bytes as int64.
        secret: That of the specification, as int64.
        out: int64 of shape (blocks, 8).
    """
    block = tl.program_id(0).to(tl.int64) * HASHED_AT_ONCE + tl.arange(0, HASHED_AT_ONCE)
    lane = tl.arange(0, 8)
    is_there = (block < blocks)[:, None] & (lane >= 0)[None, :]
    total = tl.zeros((HASHED_AT_ONCE, 8), tl.uint64)
    for stripe in tl.static_range(STRIPES):
        at = words + block[:, None] * (8 * STRIPES) + stripe * 8
        data = tl.load(at + lane[None, :], mask=is_there, other=0)
        swapped = tl.load(at + (lane ^ 1)[None, :], mask=is_there, other=0)
        keyed = (data ^ tl.load(secret + stripe + lane)[None, :]).to(tl.uint64, bitcast=True)
        total += (keyed & 0xFFFFFFFF) * (keyed >> 32) + swapped.to(tl.uint64, bitcast=True)
    to = out + block[:, None] * 8 + lane[None, :]
    tl.store(to, total.to(tl.int64, bitcast=True), mask=is_there)
