"""Records two runs of the same training job and names the first operation at which they part.

    import tracediff

    with tracediff.record("run.zarr", stack="pytorch"):
        train()

    verdict = tracediff.bisect("pytorch.zarr", "mlx.zarr")
    print(verdict.outcome, verdict.reason)

Names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracediff.bisection import bisect
    from tracediff.errors import (
        CorruptTraceError,
        NotATraceError,
        RulesError,
        ScriptError,
        StackError,
        TracediffError,
        TraceError,
        TraceExistsError,
        TraceFormatError,
        UsageError,
    )
    from tracediff.session import record
    from tracediff.trace import Trace, verify
    from tracediff.verdict import Verdict

__version__ = "0.1.0"

__all__ = [
    "CorruptTraceError",
    "NotATraceError",
    "RulesError",
    "ScriptError",
    "StackError",
    "Trace",
    "TraceError",
    "TraceExistsError",
    "TraceFormatError",
    "TracediffError",
    "UsageError",
    "Verdict",
    "bisect",
    "record",
    "verify",
]

_HOMES = {
    "Trace": "trace",
    "Verdict": "verdict",
    "bisect": "bisection",
    "record": "session",
    "verify": "trace",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tracediff' has no attribute {name!r}")
    return getattr(import_module(f"tracediff.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
