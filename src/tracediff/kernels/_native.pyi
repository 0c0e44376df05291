"""The functions of native/module.c: arrays as buffers, each with the code of its elements."""

from typing import Any

from numpy.typing import NDArray

has_crc32: bool
interface: int

def summary(
    data: NDArray[Any],
    code: int,
    full: bool,
    hashed: bool,
    total: NDArray[Any] | None,
    /,
) -> tuple[bytes | None, bytes]: ...
def digest_of_blocks(sums: NDArray[Any], tail: NDArray[Any], size: int, /) -> bytes | None: ...
def signed_buckets(data: NDArray[Any], code: int, total: NDArray[Any], /) -> None: ...
def differences(
    a: NDArray[Any],
    code_a: int,
    b: NDArray[Any],
    code_b: int,
    keep: NDArray[Any] | None,
    scale: float,
    rows: NDArray[Any],
    /,
) -> None: ...
def largest_ulp(a: NDArray[Any], code_a: int, b: NDArray[Any], code_b: int, /) -> int: ...
def within(
    a: NDArray[Any],
    code_a: int,
    b: NDArray[Any],
    code_b: int,
    relative: float,
    absolute: float,
    /,
) -> bool: ...
def pack(array: NDArray[Any], out: NDArray[Any], /) -> None: ...
def every(array: NDArray[Any], step: int, /) -> bytes: ...
def stream(data: memoryview, out: memoryview, /) -> None: ...
def crc32(data: bytes | memoryview, /) -> int: ...
def place(piece: Any, at: int, head: bytes, crc_at: int, data: Any, /) -> int: ...
def restrict(level: int, /) -> int: ...
