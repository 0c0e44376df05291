"""Seals: a SHA-256 of every file of a trace, for traces that are evidence.

A seal is what `sha256sum` writes, one line per file, so that `sha256sum -c SHA256SUMS` checks it
without tracediff. Each rank has its own. It has its final name once the rank's process ended by
itself; until then it is `.SHA256SUMS.tmp`, and lists what was complete so far.

The seal itself is a file of the trace: who can change a segment can write a new seal. Its own
SHA-256, kept elsewhere, is what the trace can be held to.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Final

from tracediff.errors import CorruptTraceError
from tracediff.trace.manifest import INDEX, MANIFEST, SEGMENTS, SNAPSHOTS, write_atomically

SEAL: Final = "SHA256SUMS"

_LINE: Final = re.compile(
    rf"([0-9a-f]{{64}})  ({MANIFEST}|(?:{SEGMENTS}|{INDEX}|{SNAPSHOTS})/[\w./-]+)", re.ASCII
)
_LARGEST: Final = 64 << 20


def seal_name(rank: int) -> str:
    """Name of the seal of a rank's files, within the trace."""
    return f"{SEAL}.{rank}" if rank else SEAL


def is_seal(name: str) -> bool:
    """Whether a file of this name is a seal, finished or not."""
    return name.removeprefix(".").startswith(SEAL)


def _hashlib() -> ModuleType:
    """Loads OpenSSL, and few traces are sealed."""
    import hashlib

    return hashlib


def sha256(file: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as opened:
        found: str = _hashlib().file_digest(opened, "sha256").hexdigest()
        return found


class Sealer:
    """Writes the seal of one process's files, as they come."""

    def __init__(self, root: Path, rank: int) -> None:
        self._root = root
        self._final = root / seal_name(rank)
        self._partial = root / f".{seal_name(rank)}.tmp"
        self._sums: dict[str, str] = {}

    def add(self, file: Path) -> None:
        """Enters a file that is complete, or complete again."""
        name = file.relative_to(self._root).as_posix()
        changed = name in self._sums
        self._sums[name] = sha256(file)
        if changed:
            self._partial.write_text(self._text(), encoding="ascii")
        else:
            with self._partial.open("a", encoding="ascii") as partial:
                partial.write(_line(name, self._sums[name]))

    def forget(self, file: Path) -> None:
        """Strikes out a file that is removed."""
        if self._sums.pop(file.relative_to(self._root).as_posix(), None):
            self._partial.write_text(self._text(), encoding="ascii")

    def close(self) -> Path:
        """Gives the seal its final name; returns its file."""
        write_atomically(self._final, self._text().encode("ascii"))
        self._partial.unlink(missing_ok=True)
        return self._final

    def _text(self) -> str:
        return "".join(_line(name, self._sums[name]) for name in sorted(self._sums))


def _line(name: str, of_file: str) -> str:
    return f"{of_file}  {name}\n"


class Seal:
    """The seals of a trace, read.

    Attributes:
        sums: SHA-256 by name of the file within the trace.
        closed: Whether the run ended by itself, so that every file has to be listed.
        digest: SHA-256 of the seals themselves, by rank; where there is one rank, that of
            `SHA256SUMS`.
    """

    def __init__(self, root: Path, files: list[Path]) -> None:
        self._root = root
        self._checked: dict[str, tuple[int, int, int]] = {}
        self.sums: dict[str, str] = {}
        self.closed = True
        total = _hashlib().sha256()
        for file in files:
            if file.stat().st_size > _LARGEST:
                raise CorruptTraceError(f"{file} is damaged: it has {file.stat().st_size} bytes")
            data = file.read_bytes()
            self.closed &= not file.name.startswith(".")
            total.update(data)
            for line in data.decode("ascii", "replace").splitlines():
                match = _LINE.fullmatch(line)
                if match is None:
                    raise CorruptTraceError(f"{file} is damaged: it holds the line {line!r:.80}")
                self.sums[match[2]] = match[1]
        self.digest = total.hexdigest()

    def fault(self, file: Path) -> str | None:
        """What is wrong with a file, read whole; None where it is what was sealed."""
        name = file.relative_to(self._root).as_posix()
        if name not in self.sums:
            return "was added after the trace was sealed" if self.closed else None
        if not file.is_file():
            return "was sealed, and is gone"
        found = file.stat()
        state = found.st_ino, found.st_mtime_ns, found.st_size
        if self._checked.get(name) == state:
            return None
        if sha256(file) != self.sums[name]:
            return "is not the file that was sealed: it has another SHA-256"
        self._checked[name] = state
        return None

    def require(self, file: Path) -> None:
        """Refuses a file that was altered.

        Raises:
            CorruptTraceError: It was.
        """
        what = self.fault(file)
        if what is not None:
            raise CorruptTraceError(f"{file} {what}. Run `tracediff verify` on the trace")


def load_seal(root: Path, *, sealed: bool, finished: bool) -> Seal | None:
    """The seal of a trace; None where it has none.

    Args:
        sealed: Whether the manifest says that the trace has one.
        finished: Whether the run ended by itself.

    Raises:
        CorruptTraceError: The seal is damaged, or gone.
    """
    found = {file.name: file for file in root.iterdir() if is_seal(file.name) and file.is_file()}
    if not {SEAL, f".{SEAL}.tmp"} & found.keys() and sealed and finished:
        raise CorruptTraceError(f"{root} was sealed, and its seal {SEAL} is gone")
    files = [file for name, file in sorted(found.items(), key=lambda item: _rank(item[0]))]
    return Seal(root, files) if files else None


def _rank(name: str) -> tuple[int, str]:
    digits = re.sub(r"\D", "", name.removeprefix(".").removeprefix(SEAL))
    return int(digits or 0), name
