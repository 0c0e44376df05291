"""Errors that end a command with one sentence and exit code 2.

Every message says what was found, what was expected, and what to do.
"""

from __future__ import annotations


class TracediffError(Exception):
    """Base of all errors that a user can cause and mend."""


class UsageError(TracediffError):
    """An option or argument is out of its range, or two of them contradict each other."""


class TraceError(TracediffError):
    """A path is no trace, or the trace at it cannot be read."""


class NotATraceError(TraceError):
    """The path is missing, or holds something else than a trace."""


class TraceFormatError(TraceError):
    """The trace has a format version that this release does not read."""


class CorruptTraceError(TraceError):
    """Bytes of the trace are damaged: a torn segment, a wrong digest, impossible metadata."""


class TraceExistsError(TraceError):
    """The output path already holds something."""


class StackError(TracediffError):
    """The stack is unknown, or its framework is not installed."""


class ScriptError(TracediffError):
    """The recorded script raised, or never ran a model.

    Attributes:
        status: Exit status that the script would have ended with by itself.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class RerunError(TracediffError):
    """A script cannot be executed once more as it was recorded: it, its data or objects differ."""


class RulesError(TracediffError):
    """A rules file given with `--map` is malformed."""
