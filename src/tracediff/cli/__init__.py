"""The command line: parses, calls, reports, and turns the outcome into an exit code."""

from tracediff.cli.app import main

__all__ = ["main"]
