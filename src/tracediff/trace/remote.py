"""Traces on object storage, such as `s3://bucket/run.zarr`, written and read through local files.

A segment is finished locally and uploaded as one object. Object stores show an object whole or not
at all, so no partial step is ever visible, as with the rename on a local disk. The transport is
obstore's (an optional dependency); credentials and endpoints are those that it finds in the
environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL` ...).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tracediff.errors import (
    CorruptTraceError,
    NotATraceError,
    TraceError,
    TraceExistsError,
    UsageError,
)
from tracediff.trace.manifest import INDEX, MANIFEST, SEGMENTS, SNAPSHOTS
from tracediff.trace.seal import is_seal

_URL: Final = re.compile(r"(s3|gs|gcs|az|azure|abfs|abfss):/+(?P<rest>.+)", re.DOTALL)


def url_of(path: str | Path) -> str | None:
    """The URL that a path stands for, or None for a local one. `Path` folds `//` to `/`."""
    match = _URL.fullmatch(str(path))
    return f"{match[1]}://{match['rest'].rstrip('/')}" if match else None


def place(path: str | Path) -> str:
    """A trace as the user named it."""
    return url_of(path) or str(path)


class Prefix:
    """An object-store prefix that holds one trace.

    Every method raises TraceError, with one sentence, where the store refuses.
    """

    def __init__(self, url: str) -> None:
        """
        Raises:
            UsageError: obstore is not installed, or the URL is none that it knows.
        """
        self.url = url
        try:
            import obstore
        except ImportError:
            raise UsageError(f"{url} needs obstore: pip install 'tracediff-ml[remote]'") from None
        self._obstore: Any = obstore
        self._errors = (obstore.exceptions.BaseError, OSError)
        try:
            self._store: Any = obstore.store.from_url(url)
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise UsageError(f"{url} is no place for a trace: {_first_line(error)}") from None

    def put(self, name: str, data: bytes | Path, *, new: bool = False) -> None:
        """Stores one object, whole or not at all.

        Args:
            new: Refuse to replace one that is there.

        Raises:
            TraceExistsError: `new`, and there is one.
        """
        mode = "create" if new else "overwrite"
        try:
            self._obstore.put(self._store, name, data, mode=mode)
        except self._obstore.exceptions.AlreadyExistsError:
            raise TraceExistsError(
                f"{self.url} already holds a trace: choose another place, or delete it first"
            ) from None
        except self._errors as error:
            raise TraceError(f"cannot write {self.url}: {_first_line(error)}") from None

    def get(self, name: str) -> bytes | None:
        """The bytes of an object, None where there is none."""
        try:
            return bytes(self._obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None
        except self._errors as error:
            raise TraceError(f"cannot read {self.url}: {_first_line(error)}") from None

    def delete(self, name: str) -> None:
        """Removes an object."""
        try:
            self._obstore.delete(self._store, name)
        except self._errors as error:
            raise TraceError(f"cannot write {self.url}: {_first_line(error)}") from None

    def sizes(self) -> dict[str, int]:
        """Name -> size in bytes of every object."""
        try:
            batches = self._obstore.list(self._store)
            return {meta["path"]: meta["size"] for batch in batches for meta in batch}
        except self._errors as error:
            raise TraceError(f"cannot read {self.url}: {_first_line(error)}") from None


class Mirror:
    """A local folder into which the objects of a trace are fetched one by one.

    Attributes:
        folder: Has the layout of a trace on disk, with what was fetched so far.
        sizes: Name -> size in bytes of every object of the trace.
    """

    def __init__(self, url: str) -> None:
        """Fetches the manifest and lists the rest.

        Raises:
            NotATraceError: There is no trace.
            CorruptTraceError: An object has a name that could leave the folder.
            UsageError: See `Prefix`.
            TraceError: The store refuses.
        """
        self._prefix = Prefix(url)
        self._temporary = tempfile.TemporaryDirectory(prefix="tracediff-")
        self.folder = Path(self._temporary.name) / "trace"
        self.sizes = self._prefix.sizes()
        if MANIFEST not in self.sizes:
            raise NotATraceError(f"{url} is no trace (it has no {MANIFEST})")
        for name in self.sizes:
            if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name) or ".." in name:
                raise CorruptTraceError(f"{url} holds an object named {name!r:.80}")
        (self.folder / SEGMENTS).mkdir(parents=True)
        for name in self.sizes:
            if name == MANIFEST or is_seal(name):
                self.fetch(self.folder / name)

    def files(self, *parts: str) -> list[Path]:
        """Where the files of a folder of the trace are, once they are fetched."""
        start = "/".join((*parts, ""))
        return [self.folder / name for name in self.sizes if name.startswith(start)]

    def size(self, file: Path) -> int:
        return self.sizes[file.relative_to(self.folder).as_posix()]

    def fetch(self, file: Path) -> Path:
        """Makes a file of the folder be there, if the trace has it."""
        name = file.relative_to(self.folder).as_posix()
        if not file.exists() and name in self.sizes:
            data = self._prefix.get(name)
            if data is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
        return file

    def fetch_all(self) -> Path:
        """Fetches the whole trace; returns its folder."""
        for name in self.sizes:
            if name.startswith((f"{SEGMENTS}/", f"{INDEX}/", f"{SNAPSHOTS}/")):
                self.fetch(self.folder / name)
        return self.folder


@contextmanager
def local_copy(path: str | Path) -> Iterator[Path]:
    """The folder of a trace; of one on object storage, of a copy that lasts for the block.

    Raises:
        As `Mirror` does.
    """
    url = url_of(path)
    if url is None:
        yield Path(path)
        return
    mirror = Mirror(url)
    yield mirror.fetch_all()


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
