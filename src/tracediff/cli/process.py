"""What the process of a command sets for itself, since it is short and all its own."""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
from functools import cache
from typing import Final

_YOUNG: Final = 100_000
"""Objects between two collections: modules and events are made by the ten thousand, and stay."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MAPPED: Final = 4 << 20
_KEPT: Final = 64 << 20


@cache
def leave_at_once() -> None:
    """Has Python end without looking for garbage among all that the process has made, which takes
    a tenth of a second: for commands that run no script of others, whose finalizers may matter."""
    atexit.register(gc.freeze)


def prepare() -> None:
    """Keeps the memory manager out of the way.

    glibc gives the memory of an array that is freed back to the system, which fills the next one
    with zeros, page by page: a quarter of the time of judging small arrays. Large ones are left to
    it as they are.
    """
    gc.set_threshold(_YOUNG)
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
