"""Where output goes: data to stdout or to files, progress and messages to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

from rich.console import Console, RenderableType

from tracediff.errors import UsageError
from tracediff.report.text import inert

STDOUT: Final = Path("-")

_BROKEN_PIPE: Final = 141
"""What a shell reports for a program that SIGPIPE ended: not 1, which would say 'diverged'."""

_UNLIMITED: Final = 100_000
"""Cells of a line in a pipe, where a table must keep its names whole."""


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        _leave_quietly()


def console(*, whole_lines: bool = False) -> Console:
    """A console on stdout.

    Args:
        whole_lines: Do not wrap or cut lines where stdout is no terminal: for tables that other
            programs read.
    """
    plain = _Console(markup=False, emoji=False, highlight=False)
    if whole_lines and not plain.is_terminal:
        plain.width = _UNLIMITED
    return plain


def show(report: RenderableType, *, whole_lines: bool = False) -> None:
    """Prints a report on stdout."""
    console(whole_lines=whole_lines).print(report, crop=False)


def tell(message: str) -> None:
    """Prints one line on stderr: a message, a warning or an error."""
    text = " ".join(part.strip() for part in message.splitlines() if part.strip())
    try:
        print(f"tracediff: {inert(text)}", file=sys.stderr)
    except BrokenPipeError:
        _leave_quietly()


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar on stderr, fed by calling `(what, done, total)`; None in a pipe."""
    errors = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if not errors.is_terminal:
        yield None
        return
    from rich.progress import (  # takes a while, and most runs are in a pipe
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), console=errors, transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=inert(what))

        yield update


def check_writable(*paths: Path | None) -> None:
    """Refuses output paths that cannot be written, before the work that fills them.

    Raises:
        UsageError: A path is a folder, its folder is missing or closed, or two are stdout.
    """
    given = [path for path in paths if path is not None]
    if given.count(STDOUT) > 1:
        raise UsageError("two outputs are '-': only one can go to stdout, give the other a path")
    for path in given:
        if path == STDOUT:
            continue
        if path.is_dir():
            raise UsageError(f"{path} is a folder: give the path of a file to write")
        if not path.resolve().parent.is_dir():
            raise UsageError(f"{path} cannot be written: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
            raise UsageError(f"{path} cannot be written: permission denied")


def write(path: Path, text: str) -> None:
    """Writes a text to stdout (`-`) or to a file, which is complete or not there at all.

    Raises:
        OSError: The file cannot be written.
    """
    if path == STDOUT:
        try:
            sys.stdout.write(text)
        except BrokenPipeError:
            _leave_quietly()
        return
    if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
        path.write_text(text, encoding="utf-8")
        return
    final = path.resolve()  # a link stays a link
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)


def flush() -> None:
    """Flushes stdout while a reader that has gone can still be handled."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_quietly()


def _leave_quietly() -> NoReturn:
    """Ends the command when the reader of its output has gone, as `head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(_BROKEN_PIPE)
