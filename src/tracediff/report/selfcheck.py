"""The report of `tracediff selfcheck`, for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tracediff.report import terminal
from tracediff.report.json import FORMAT, plain, to_json
from tracediff.report.marks import mark
from tracediff.report.text import figure, inert
from tracediff.selfcheck import SelfCheck

_MARKS: Final = {
    "unchanged": "identical",
    "equal": "identical",
    "nondeterministic": "diverged",
    "varies": "diverged",
    "changed": "diverged",
}
"""Outcomes of a self-check by the outcomes that have marks."""


def render(found: SelfCheck) -> RenderableType:
    """The sentence, what the script produced in each run, and the bisection where it tells more."""
    return Group(*_sections(found))


def _sections(found: SelfCheck) -> Iterator[RenderableType]:
    shape = mark(_MARKS.get(found.outcome, found.outcome))
    line = Text(f"{shape.symbol} {found.outcome.upper()}", f"bold {shape.style}")
    yield line.append(f"  {inert(found.reason)}", "not bold default")
    yield Text()
    yield _outputs(found)
    for warning in found.warnings:
        yield Text(f"  warning  {inert(warning)}", "yellow")
    if found.wobble is not None:
        wobble = found.wobble
        yield Text()
        yield Text(f"  first differing  {inert(wobble.site)}  {figure(wobble.error.rel_l2)}")
        yield Text(f"  worst            {inert(wobble.worst_site)}  {figure(wobble.worst)}")
    for trace in found.traces:
        yield Text(f"  kept  {inert(trace)}", "dim", no_wrap=True, overflow="ignore")
    if found.verdict is not None and found.verdict.outcome != "identical":
        yield Text()
        yield Text("The two recordings, bisected", "bold")
        yield terminal.render(found.verdict)


def _outputs(found: SelfCheck) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("produced", overflow="fold")
    for name in found.outputs[0].values:
        table.add_column(name, overflow="fold")
    for row in found.outputs:
        shape = mark(_MARKS.get(row.mark, row.mark))
        cells = (Text(inert(value)) for value in row.values.values())
        table.add_row(Text(shape.symbol, shape.style), Text(inert(row.name)), *cells)
    return table


def selfcheck_json(found: SelfCheck) -> dict[str, Any]:
    """The object of `tracediff selfcheck --json`, JSON types only."""
    return dict(
        plain(
            {
                "format": FORMAT,
                "outcome": found.outcome,
                "reason": found.reason,
                "deterministic": None if found.verdict is None else found.wobble is None,
                "first_differing": asdict(found.wobble) if found.wobble else None,
                "outputs": [
                    {"name": row.name, "mark": row.mark, "runs": row.values}
                    for row in found.outputs
                ],
                "verdict": to_json(found.verdict) if found.verdict else None,
                "warnings": found.warnings,
                "traces": found.traces,
            }
        )
    )
