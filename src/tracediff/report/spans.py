"""The operations around a divergence, both sides beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tracediff.report.text import elide, figure, inert
from tracediff.verdict import OperationSpan, SpanOperation

_SHOWN: Final = 12

HEADINGS: Final = ("", "operation", "shape", "error", "bound", "source")


def rows(side: Sequence[SpanOperation]) -> list[tuple[str, SpanOperation]]:
    """The operations to show, each with its mark: `>` errs, blank otherwise.

    Those that lay values out without an error are left out where there are many, and so is the
    middle of a long span.
    """
    shown = list(side)
    if len(shown) > _SHOWN:
        shown = [row for row in shown if row.errs or row.error != 0.0] or shown
    errs = next((place for place, row in enumerate(shown) if row.errs), len(shown) - 1)
    start = max(0, min(errs - _SHOWN // 2, len(shown) - _SHOWN))
    return [(">" if row.errs else " ", row) for row in shown[start : start + _SHOWN]]


def cells(mark: str, row: SpanOperation) -> tuple[str, str, str, str, str, str]:
    """One operation under `HEADINGS`."""
    shape = "x".join(map(str, row.shape)) or "scalar"
    error = figure(row.error) if row.error is not None else "-"
    bound = figure(row.bound) if row.bound is not None else "-"
    return mark, inert(row.op), f"{shape} {row.dtype}", error, bound, inert(row.where)


def terminal(span: OperationSpan, width: int) -> Iterator[RenderableType]:
    """A table of each side, one below the other on a narrow terminal and beside each other else."""
    tables = [_table(name, getattr(span, name), width) for name in ("baseline", "target")]
    if width >= 150:
        grid = Table.grid(padding=(0, 2))
        grid.add_row(*tables)
        yield grid
    else:
        yield from tables
    if span.inputs:
        shown = ", ".join(inert(a) for a, _ in span.inputs[:4])
        more = f" and {len(span.inputs) - 4} more" if len(span.inputs) > 4 else ""
        yield Text(f"  both from {shown}{more}", "dim")
    if span.matched_by:
        layout = f", layout: {inert(span.layout)}" if span.layout else ""
        yield Text(f"  outputs paired by {inert(span.matched_by)}{layout}", "dim")


def _table(name: str, side: Sequence[SpanOperation], width: int) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", collapse_padding=True)
    for heading in (name if heading == "operation" else heading for heading in HEADINGS):
        numeric = heading in ("error", "bound")
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    found = rows(side)
    for mark, row in found:
        texts = list(cells(mark, row))
        texts[1] = elide(texts[1], max(16, width // 3))
        table.add_row(*(Text(text, "bold" if row.errs else "") for text in texts))
    if len(found) < len(side):
        table.add_row("", Text(f"… and {len(side) - len(found)} more", "dim"))
    return table


def as_json(span: OperationSpan) -> dict[str, Any]:
    """The object under `first.span`."""
    return {
        "baseline": [_operation(row) for row in span.baseline],
        "target": [_operation(row) for row in span.target],
        "inputs": [{"baseline": a, "target": b} for a, b in span.inputs],
        "matched_by": span.matched_by,
        "layout": span.layout or None,
    }


def _operation(row: SpanOperation) -> dict[str, Any]:
    return {
        "site": row.site,
        "op": row.op,
        "where": row.where or None,
        "shape": row.shape,
        "dtype": row.dtype,
        "error": row.error,
        "bound": row.bound,
        "errs": row.errs,
    }
