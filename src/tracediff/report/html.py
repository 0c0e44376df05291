"""The verdict as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, Final

from tracediff.report import samples, spans
from tracediff.report.marks import mark
from tracediff.report.text import figure, inert, number, percent, text_diff, times
from tracediff.verdict import Divergence, Verdict

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; opacity: .7; }
td, pre, code { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
pre, code { font-family: ui-monospace, monospace; font-size: .9em; }
pre { white-space: pre-wrap; }
tr.here { font-weight: 600; }
"""

_WIDTH: Final = 110
"""Cells of the two lines of a context diff."""

Row = Sequence[object]


def to_html(verdict: Verdict) -> str:
    """A complete document; every name and value in it is escaped and control-free."""
    body = [
        f"<h1>{_marked(verdict.outcome)}</h1>",
        f"<p>{_text(verdict.reason)}</p>",
        _table((), [("baseline", verdict.baseline), ("target", verdict.target)]),
        *_ladder(verdict),
        *(_divergence(verdict.first) if verdict.first else ()),
        *_neighbours(verdict),
        *_rest(verdict),
    ]
    title = f"tracediff: {_text(verdict.outcome)}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    return escape(inert(value))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return escape(number(value))
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return _text("" if value is None else value)


def _marked(outcome: str) -> str:
    shape = mark(outcome)
    return f'<span style="color:{shape.colour}">{shape.symbol}</span> {_text(outcome)}'


def _table(headings: Sequence[str], rows: Iterable[Row], *, raw: int = -1, here: int = -1) -> str:
    """A table of escaped cells. Column `raw` holds HTML already; row `here` is emphasised."""
    head = "".join(f"<th>{_text(heading)}</th>" for heading in headings)
    lines = [f"<tr>{head}</tr>"] if head else []
    for index, row in enumerate(rows):
        cells = (str(cell) if column == raw else _cell(cell) for column, cell in enumerate(row))
        emphasis = ' class="here"' if index == here else ""
        lines.append(f"<tr{emphasis}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _section(title: str, headings: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield f"<h2>{_text(title)}</h2>"
        yield _table(headings, rows)


def _ladder(verdict: Verdict) -> Iterator[str]:
    yield "<h2>Stages</h2>"
    headings = ("stage", "outcome", "compared", "differ", "diverged", "unmatched", "worst", "")
    rows = [
        (
            stage.stage,
            _marked(stage.outcome),
            stage.compared,
            stage.differing,
            stage.diverged,
            "{}/{}".format(*stage.unmatched),
            figure(stage.worst),
            stage.reason,
        )
        for stage in verdict.stages
    ]
    yield _table(headings, rows, raw=1)


def _divergence(first: Divergence) -> Iterator[str]:
    yield "<h2>First divergence</h2>"
    bound = first.bound
    error = f"{figure(first.error.rel_l2)} relative (L2)"
    rows: list[Row] = [
        ("site", first.site),
        ("target's site", first.target_site),
        ("stage", f"{first.stage}, step {first.step}"),
        ("operation", _sides(first.op)),
        ("kind", first.kind),
        ("pattern", first.pattern),
        ("meaning", first.meaning),
        ("error", f"{error}, {times(first.error.rel_l2, bound.rel_l2)}" if bound else error),
        ("bound", f"{figure(bound.rel_l2)}, from {bound.derivation}" if bound else None),
        ("origin", first.origin),
        ("blame", first.blame),
        ("source", _sides(first.where)),
        ("shapes", _sides(first.shapes)),
        *samples.facts(first),
    ]
    yield _table((), [row for row in rows if row[1]])
    yield from _context(first)
    hidden = samples.SHOWN | {"baseline_ids", "target_ids"}
    detail = [
        (key, value)
        for key, value in first.detail.items()
        if not key.endswith("_context") and key not in hidden
    ]
    yield from _section("Details", (), detail)
    if first.span is not None:
        for side in ("baseline", "target"):
            shown = [spans.cells(*row) for row in spans.rows(getattr(first.span, side))]
            yield from _section(f"Operations of the {side}", spans.HEADINGS, shown)
    yield from _section("Settings that bear on it", ("name", "baseline", "target"), first.settings)
    deviations = [(list(row.index), row.baseline, row.target) for row in first.deviations]
    yield from _section("Largest deviations", ("index", "baseline", "target"), deviations)


def _context(first: Divergence) -> Iterator[str]:
    baseline = first.detail.get("baseline_context")
    target = first.detail.get("target_context")
    if isinstance(baseline, str) and isinstance(target, str):
        (above, carets), (below, marks) = text_diff(baseline, target, _WIDTH)
        yield f"<pre>{escape(above)}\n{carets}\n{escape(below)}\n{marks}</pre>"
    yield from samples.as_html(first)


def _neighbours(verdict: Verdict) -> Iterator[str]:
    rows = verdict.neighbours
    if not rows:
        return
    site = verdict.first.site if verdict.first else ""
    here = next((index for index, row in enumerate(rows) if row.site == site), -1)
    cells = [(_marked(r.mark), r.site, r.op, figure(r.error), figure(r.bound)) for r in rows]
    yield "<h2>Around it, in execution order</h2>"
    yield _table(("", "site", "operation", "error", "bound"), cells, raw=0, here=here)


def _rest(verdict: Verdict) -> Iterator[str]:
    also = [(other.site, other.kind, other.pattern, other.meaning) for other in verdict.also]
    yield from _section("Also diverged, independently", ("site", "kind", "pattern", ""), also)
    headings = ("name", "baseline", "target")
    yield from _section("Learning curve", ("step", *headings), verdict.trajectory)
    yield from _section("Environment", headings, verdict.environment)
    covered = f"{percent(verdict.coverage)} of the events of the side that has fewer"
    yield f"<h2>Compared</h2><p>{covered}</p>"
    yield _table(("matched by", "pairs"), list(verdict.matched_by.items()))
    unmatched = [
        (group.side, group.count, group.reason, group.example) for group in verdict.unmatched
    ]
    yield from _section("Unmatched", ("only in", "events", "why", "such as"), unmatched)
    yield from _section("Warnings", (), [(warning,) for warning in verdict.warnings])
    if verdict.next_command:
        yield f"<h2>Next</h2><pre>{_text(verdict.next_command)}</pre>"


def _sides(values: Any) -> str:
    return " | ".join(inert(values[side]) for side in ("baseline", "target") if side in values)
