"""Writes the bulk of a long file past the page cache, beside the program that makes it.

A step is on the disk before it is committed, so the page cache can put off the disk's work but not
save any, and it costs a copy by the system, the memory of pages that nobody reads soon, and, in a
virtual machine, the handing over of that memory by its host: several times the cost of everything
else that is done with a payload.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from tracediff.kernels import stream

PIECE: Final = 4 << 20
"""Bytes that are written at a time; larger pieces are no faster."""
BLOCK: Final = max(4096, mmap.PAGESIZE)
"""Offsets, sizes and addresses of direct writes are multiples of this: a disk's block is 4096 at
most, and no page is written both ways."""

_NOT_HERE: Final = (errno.EINVAL, errno.EOPNOTSUPP)

_spare: Final[list[mmap.mmap]] = []
"""Pieces to write in: memory that was used before costs less than new one."""
_thread = ThreadPoolExecutor(1, "tracediff-disk")


def _after_fork() -> None:
    """A forked child has the executor and not its thread."""
    global _thread
    _thread = ThreadPoolExecutor(1, "tracediff-disk")


os.register_at_fork(after_in_child=_after_fork)


class DirectWriter:
    """Appends to a file in whole pieces, of which one is filled while another is written.

    Where the file system knows no direct writes, they go through the page cache.
    """

    def __init__(self, path: Path, start: int) -> None:
        """
        Args:
            path: A file that is there.
            start: Where the first byte goes: a multiple of `BLOCK`.
        """
        self._flag = getattr(os, "O_DIRECT", 0)  # not on macOS
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | self._flag)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            self._flag = 0
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._at = start
        self._piece = _taken()
        self._filled = 0
        self._pending: Future[None] | None = None
        self._writing: mmap.mmap | None = None

    def write(self, data: memoryview) -> None:
        """Takes a copy of the bytes.

        Raises:
            OSError: A piece before cannot be written.
        """
        while data:
            taken = min(len(data), PIECE - self._filled)
            free = memoryview(self._piece)[self._filled : self._filled + taken]
            stream(data[:taken], free)
            self._filled += taken
            data = data[taken:]
            if self._filled == PIECE:
                self._hand_over()

    def close(self) -> bytes:
        """Waits for the disk; returns the bytes since the last whole piece, which are the caller's
        to write.

        Raises:
            OSError: A piece cannot be written.
        """
        try:
            self._wait()
            return self._piece[: self._filled]
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Ends without writing what is left."""
        if self._fd < 0:
            return
        if self._pending is not None:
            self._pending.exception()
        _spare.extend(piece for piece in (self._piece, self._writing) if piece is not None)
        os.close(self._fd)
        self._fd = -1

    def _hand_over(self) -> None:
        """Has the full piece written, and begins another one."""
        self._wait()
        full, at, self._at = self._piece, self._at, self._at + PIECE
        self._piece, self._writing, self._filled = self._writing or _taken(), full, 0
        try:
            self._pending = _thread.submit(self._put, full, at)
        except RuntimeError:  # the interpreter is about to end
            self._put(full, at)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _put(self, piece: mmap.mmap, at: int) -> None:
        data = memoryview(piece)
        while data:
            try:
                written = os.pwrite(self._fd, data, at)
            except OSError as error:
                if error.errno not in _NOT_HERE or not self._flag:
                    raise
                self._through_the_page_cache()
                continue
            data, at = data[written:], at + written
            if written % BLOCK:
                self._through_the_page_cache()

    def _through_the_page_cache(self) -> None:
        """Switches direct writes off for the rest of the file."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~self._flag)
        self._flag = 0


def _taken() -> mmap.mmap:
    try:
        return _spare.pop()
    except IndexError:
        piece = mmap.mmap(-1, PIECE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # the system looks up every page of a direct write
            with suppress(OSError):
                piece.madvise(mmap.MADV_HUGEPAGE)
        return piece
