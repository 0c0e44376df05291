"""Which line of the user's code is running."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Final

_HERE: Final = Path(__file__).resolve().parent
_NOT_USER_CODE: Final = (
    "<",
    sys.base_prefix,
    str(_HERE),
    *(str((_HERE / name).resolve()) for name in ("recorders", "replayers")),
)
_SOURCED: Final = frozenset({"rendering", "forward", "loss", "optimizer", "trajectory"})
"""Stages whose events carry the line of the user's code that caused them."""


def line_behind(stage: str) -> str:
    """As `user_line`, for an event of a stage that has one."""
    return user_line() if stage in _SOURCED else ""


def user_line() -> str:
    """`file:line` of the innermost running line that belongs to no installed package, or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = _user_file(frame.f_code.co_filename)
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@lru_cache(maxsize=1 << 12)
def _user_file(filename: str) -> str:
    """Name without folders of a file of the user's; "" for code of anybody else."""
    if filename.startswith(_NOT_USER_CODE) or "site-packages" in filename:
        return ""
    return Path(filename).name
