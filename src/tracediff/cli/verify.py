"""`tracediff verify TRACE`."""

from __future__ import annotations

from tracediff.cli import options, output


def verify(path: options.TracePath, json: options.Json = None) -> int:
    """Check every byte of a trace against its digests."""
    from tracediff import trace
    from tracediff.report.json import dumps
    from tracediff.report.tables import verification, verification_json

    output.check_writable(json)
    result = trace.verify(path)
    if json is not None:
        output.write(json, dumps(verification_json(trace.place(path), result)))
    if json != output.STDOUT:
        output.show(verification(trace.place(path), result))
    return 0 if result.sound else 1
