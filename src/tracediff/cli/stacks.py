"""`tracediff stacks`."""

from __future__ import annotations

from tracediff.cli import options, output


def stacks(json: options.Json = None) -> int:
    """List the stacks that can be recorded, and what each needs."""
    from tracediff.report.json import dumps
    from tracediff.report.tables import stack_list
    from tracediff.stacks import available

    output.check_writable(json)
    found = available()
    if json is not None:
        output.write(json, dumps(found))
    if json != output.STDOUT:
        output.show(stack_list(found), whole_lines=True)
    return 0
