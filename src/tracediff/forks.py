"""Which process this is, for what a forked worker must not do: write to its parent's trace."""

from __future__ import annotations

import os

_known = os.getpid()


def process_id() -> int:
    """As `os.getpid`, which asks the system each time: that is several times as long."""
    return _known


def _begin_child() -> None:
    global _known
    _known = os.getpid()


os.register_at_fork(after_in_child=_begin_child)
