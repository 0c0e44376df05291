"""Which process this is, for what a forked worker must not do: write to its parent's trace."""

from __future__ import annotations

import os
import weakref
from typing import Final


class Recording:
    """What is asked with every value, so that it is no more than an attribute.

    Attributes:
        recording: Whether values may be recorded: not in a forked child, nor once that is over.
    """

    __slots__ = ("__weakref__", "recording")

    def __init__(self) -> None:
        self.recording = True
        _all[id(self)] = self


_all: Final[weakref.WeakValueDictionary[int, Recording]] = weakref.WeakValueDictionary()
_known = os.getpid()


def process_id() -> int:
    """As `os.getpid`, which asks the system each time: that is several times as long."""
    return _known


def _begin_child() -> None:
    global _known
    _known = os.getpid()
    for each in _all.values():
        each.recording = False


os.register_at_fork(after_in_child=_begin_child)
