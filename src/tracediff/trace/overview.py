"""The overview of a trace that `tracediff show` and `rich.print(trace.summary())` print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tracediff.events import STAGES

if TYPE_CHECKING:
    from tracediff.trace.reader import Trace

SHOWN_STEPS: Final = 12
"""Longer traces show their first and last steps only."""


def overview(trace: Trace) -> RenderableType:
    """The run in a few lines, then a table of its steps with events by stage and sizes."""
    run = trace.run
    head = Text()
    head.append(Path(trace.place).name, style="bold")
    head.append(f"  {run.stack}, level {run.level}, ")
    head.append(run.status, style="green" if run.status == "finished" else "bold red")
    if not trace.is_complete:
        head.append(" (the run was cut off, or still records)")
    lines: list[RenderableType] = [head]
    if len(trace.ranks) > 1:
        others = ", ".join(str(rank) for rank in trace.ranks)
        lines.append(Text(f"ranks {others}; these are the steps of rank {trace.rank}"))
    if run.argv:
        lines.append(Text(" ".join(run.argv), style="dim", overflow="fold"))
    if run.error:
        lines.append(Text(f"the script's own error: {run.error}", style="red"))
    lines.append(_steps(trace))
    lines += [Text(f"note: {note}") for note in run.notes]
    return Group(*lines)


def stage_counts(trace: Trace, step: int) -> Counter[str]:
    """Events of a step by stage."""
    counts = Counter(event.site.phase for event in trace.events(step, samples=False))
    rendered = len(trace.samples(step))
    return counts + Counter(rendering=rendered)


def _steps(trace: Trace) -> Table:
    shown = _shown(trace.steps)
    counts = {step: stage_counts(trace, step) for step in shown}
    present = {phase for count in counts.values() for phase in count}
    phases = [*(p for p in STAGES if p in present), *sorted(present - set(STAGES))]
    table = Table(caption=f"{len(trace.steps)} steps, {size_text(trace.bytes_stored)} stored")
    table.add_column("step", justify="right")
    for phase in phases:
        table.add_column(phase, justify="right")
    table.add_column("size", justify="right")
    previous = -1
    for place, step in enumerate(shown):
        if place and trace.steps.index(step) != previous + 1:
            table.add_row("...")
        previous = trace.steps.index(step)
        cells = [str(counts[step][phase] or "") for phase in phases]
        table.add_row(str(step), *cells, size_text(trace.index(step).segment_bytes))
    return table


def _shown(steps: list[int]) -> Iterable[int]:
    if len(steps) <= SHOWN_STEPS:
        return steps
    half = SHOWN_STEPS // 2
    return [*steps[:half], *steps[-half:]]


def size_text(size: float) -> str:
    """A number of bytes as a person reads it."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
