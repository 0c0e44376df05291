"""The command `tracediff`: its subcommands, and one line and exit code 2 for every error."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from tracediff.cli import comparing
from tracediff.cli.output import flush, tell
from tracediff.errors import TracediffError

USAGE: int = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        arguments: What follows `tracediff` on the command line; `sys.argv[1:]` by default.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows its code
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        flush()
    except (TracediffError, OSError) as error:
        tell(_sentence(error))
        return USAGE
    except Exception:  # Python's own exit code for it, 1, would say that two runs diverged
        import traceback

        traceback.print_exc()
        tell("internal error: please report it with the lines above")
        return USAGE
    return code


def _run(arguments: Sequence[str]) -> int:
    plain = comparing.of_two_paths(arguments)
    if plain is not None:
        return plain()
    from tracediff.cli import parser

    return parser.run(arguments)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
