"""Writes a file from its first byte to its last: the bulk of a long one past the page cache, beside
the program that makes it.

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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tracediff.kernels import crc32, place, stream

LONG: Final = 1 << 20
"""Bytes of a file that is read again soon, or hardly worth a second way of writing."""
PIECE: Final = 4 << 20
"""Bytes that are written at a time; larger pieces are no faster."""
BLOCK: Final = max(4096, mmap.PAGESIZE)
"""Offsets, sizes and addresses of direct writes are multiples of this: a disk's block is 4096 at
most, and no page is written both ways."""

_SMALL: Final = 1 << 14
"""Bytes that are soon read again."""
_HELD: Final = 1 << 16
"""Bytes of a short file that are written at a time."""

Bytes = bytes | memoryview

_NOT_HERE: Final = (errno.EINVAL, errno.EOPNOTSUPP)

_spare: Final[list[mmap.mmap]] = []
"""Pieces to write in: memory that was used before costs less than new one."""
_thread = ThreadPoolExecutor(1, "tracediff-disk")


def _after_fork() -> None:
    """A forked child has the executor and not its thread."""
    global _thread
    _thread = ThreadPoolExecutor(1, "tracediff-disk")


os.register_at_fork(after_in_child=_after_fork)


class FileWriter:
    """Appends to a new file in whole pieces, of which one is filled while another is written.

    Up to `LONG` bytes go through the page cache as they come, so that little is lost with a process
    that is killed. Past them the file is long, and its pieces are written past the page cache;
    where the file system knows no direct writes, they go through it.
    """

    def __init__(self, path: Path, *, long: bool = False) -> None:
        """
        Args:
            long: Whether the file is expected to be long: then nothing is written until a piece
                is full.
        """
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._direct = -1
        self._flag = getattr(os, "O_DIRECT", 0)  # not on macOS
        self._piece = _taken()
        self._start = 0  # of the piece, within the file
        self._filled = 0
        self._written = 0  # of what is filled
        self._limit = PIECE if long else _HELD
        self._pending: Future[None] | None = None
        self._writing: mmap.mmap | None = None

    def write(self, data: Bytes) -> None:
        """Takes a copy of the bytes.

        Raises:
            OSError: They cannot be written, or a piece before.
        """
        size, at = len(data), self._filled
        if size <= _SMALL and size <= PIECE - at:
            self._piece[at : at + size] = data
            self._fill(size)
        else:
            self._write_parts(memoryview(data))

    def _write_parts(self, data: memoryview) -> None:
        while data:
            taken = min(len(data), PIECE - self._filled)
            stream(data[:taken], memoryview(self._piece)[self._filled : self._filled + taken])
            data = data[taken:]
            self._fill(taken)

    def place(self, head: bytes, crc_at: int, data: Any, size: int) -> int:
        """Takes a copy of the bytes that come before an entry's, and of these.

        Args:
            crc_at: Where in `head` the CRC-32 of `data` is to be put.
            data: A C-contiguous buffer.
            size: Of `data`, in bytes.

        Returns:
            The CRC-32 of `data`.

        Raises:
            As `write`.
        """
        filled = self._filled + len(head) + size
        if filled <= PIECE:
            crc = place(self._piece, self._filled, head, crc_at, data)
            if filled < self._limit:
                self._filled = filled
            else:
                self._fill(len(head) + size)
            return crc
        with memoryview(data) as whole:
            flat = whole.cast("B")
            crc = crc32(flat)
            self.write(head[:crc_at] + crc.to_bytes(4, "little") + head[crc_at + 4 :])
            self._write_parts(flat)
        return crc

    def close(self) -> None:
        """Writes what is left, and waits until all is on the disk.

        Raises:
            OSError: Something cannot be written.
        """
        try:
            self._wait()
            if self._start + self._filled > LONG:
                self._write_blocks(self._filled // BLOCK * BLOCK, self._put)
            self._write_through(self._filled)
            os.fsync(self._fd)
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
        if self._direct >= 0:
            os.close(self._direct)
        self._fd = self._direct = -1

    def _fill(self, size: int) -> None:
        """Counts bytes that were put into the piece; writes what waits, where that is enough."""
        self._filled += size
        if self._filled < self._limit:
            return
        if self._filled == PIECE:
            self._next_piece()
        elif self._filled <= LONG:
            self._write_through(self._filled)
            self._limit = self._filled + _HELD
        else:
            self._limit = PIECE

    def _next_piece(self) -> None:
        """Has the full piece written, and begins another one."""
        self._wait()
        self._write_blocks(PIECE, self._submit)
        self._piece, self._writing = self._writing or _taken(), self._piece
        self._start += PIECE
        self._filled = self._written = 0
        self._limit = PIECE

    def _write_blocks(self, end: int, put: Callable[[mmap.mmap, int, int, int], None]) -> None:
        """Writes the piece up to the end of a block; what shares a block with bytes that were
        written already goes as these did."""
        start = -(-self._written // BLOCK) * BLOCK
        if start < end:
            if self._direct < 0:
                self._open()
            self._write_through(start)
            put(self._piece, start, end, self._start)
            self._written = end

    def _write_through(self, end: int) -> None:
        """Writes the piece up to a place through the page cache."""
        while self._written < end:
            part = memoryview(self._piece)[self._written : end]
            self._written += os.pwrite(self._fd, part, self._start + self._written)

    def _open(self) -> None:
        """Opens the file once more, for direct writes."""
        try:
            self._direct = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | self._flag)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            self._flag = 0
            self._direct = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)

    def _submit(self, piece: mmap.mmap, start: int, end: int, at: int) -> None:
        try:
            self._pending = _thread.submit(self._put, piece, start, end, at)
        except RuntimeError:  # the interpreter is about to end
            self._put(piece, start, end, at)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _put(self, piece: mmap.mmap, start: int, end: int, at: int) -> None:
        """Writes a part of a piece that begins at a place in the file."""
        data, at = memoryview(piece)[start:end], at + start
        while data:
            try:
                written = os.pwrite(self._direct, data, at)
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
        flags = fcntl.fcntl(self._direct, fcntl.F_GETFL)
        fcntl.fcntl(self._direct, fcntl.F_SETFL, flags & ~self._flag)
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
