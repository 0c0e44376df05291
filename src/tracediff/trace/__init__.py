"""Trace format version 1: the only code that knows about zarr, numcodecs and ZIP segments."""

from tracediff.trace.buffered import BufferedWriter
from tracediff.trace.reader import Trace
from tracediff.trace.remote import create_trace, place
from tracediff.trace.repair import Repair, repair
from tracediff.trace.verify import Damage, Verification, verify
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
