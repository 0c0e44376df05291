"""The command line: parses, calls, reports, and turns the outcome into an exit code."""

from __future__ import annotations

from collections.abc import Sequence

from tracediff.cli.process import prepare

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code, see `tracediff.cli.app.main`."""
    prepare()  # before anything large is imported
    from tracediff.cli.app import main as run

    return run(arguments)
