"""Trace format version 1: the only code that knows about zarr, numcodecs and ZIP segments."""

from typing import TYPE_CHECKING

from tracediff.on_demand import on_demand

if TYPE_CHECKING:
    from tracediff.trace.buffered import BufferedWriter
    from tracediff.trace.creation import create_trace
    from tracediff.trace.reader import Trace
    from tracediff.trace.remote import place
    from tracediff.trace.salvage import Repair, repair
    from tracediff.trace.verification import Damage, Verification, verify
    from tracediff.trace.writer import TraceWriter

__all__ = [
    "BufferedWriter",
    "Damage",
    "Repair",
    "Trace",
    "TraceWriter",
    "Verification",
    "create_trace",
    "place",
    "repair",
    "verify",
]

__getattr__ = on_demand(  # reading needs none of what writes, verifies and repairs
    __name__,
    {
        "BufferedWriter": "buffered",
        "Damage": "verification",
        "Repair": "salvage",
        "Trace": "reader",
        "TraceWriter": "writer",
        "Verification": "verification",
        "create_trace": "creation",
        "place": "remote",
        "repair": "salvage",
        "verify": "verification",
    },
)
