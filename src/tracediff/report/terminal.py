"""The verdict as a tired person reads it: the sentence first, then where, how far, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tracediff.report import samples, spans
from tracediff.report.marks import mark
from tracediff.report.text import (
    count,
    describe,
    elide,
    figure,
    inert,
    number,
    percent,
    text_diff,
    times,
)
from tracediff.verdict import Divergence, Neighbour, StageResult, Verdict

_SHOWN: Final = 5
_TELLING_ULP: Final = 9_999  # beyond, the count says no more than the relative error does
"""Rows of a secondary list before it is cut short with '… and N more'."""

_LABEL: Final = 11
"""Cells of the label column that most sections share."""

_COUNTS: Final = "{:>8} {:>7} {:>9} {:>8}"

_OPERATION: Final = 16
"""Cells of an operation's name among the neighbours."""

_TEXT_DETAIL: Final = frozenset(
    {
        "baseline_context",
        "target_context",
        "context_start",
        "baseline_ids",
        "target_ids",
        "removed",
        "added",
    }
)
"""Keys of `Divergence.detail` that the context diff shows."""


def render(verdict: Verdict) -> RenderableType:
    """A rich renderable of the whole report, which fits itself to the width it is given."""
    return _Report(verdict)


@dataclass(frozen=True, slots=True)
class _Report:
    verdict: Verdict

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = _Page(self.verdict, options.max_width, options.ascii_only)
        yield from page.sections()


@dataclass(frozen=True, slots=True)
class _Page:
    """The sections of one report at one width. Empty sections are left out."""

    verdict: Verdict
    width: int
    ascii: bool

    def sections(self) -> Iterator[RenderableType]:
        verdict = self.verdict
        yield from self.headline()
        yield from self.ladder()
        if verdict.first is not None:
            yield from self.divergence(verdict.first)
        elif verdict.last_agreeing:
            room = self.width - len("  last agreeing  ")
            yield Text("  last agreeing  ", "dim").append(
                elide(inert(verdict.last_agreeing), room), "not dim"
            )
        yield from self.also()
        yield from self.replayed()
        yield from self.trajectory()
        yield from self.environment()
        yield from self.coverage()
        for warning in verdict.warnings:
            yield self.labelled("warning", Text(inert(warning)), "yellow")
        if verdict.next_command:
            yield from self.title("Next")
            # Not wrapped: a command is there to be copied.
            yield Text(f"  {inert(verdict.next_command)}", no_wrap=True, overflow="ignore")

    # ---- building blocks -------------------------------------------------------------------

    def labelled(self, label: str, body: RenderableType, style: str = "") -> RenderableType:
        """A label and, beside it, text that wraps under itself."""
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=_LABEL)
        grid.add_column(ratio=1, overflow="fold")
        grid.add_row(Text(f"  {label}", style or "dim"), body)
        return grid

    def field(self, label: str, value: str, style: str = "") -> RenderableType:
        """A label and one line, cut in its middle where it is too long."""
        room = self.width - _LABEL - 1
        return self.labelled(label, Text(elide(inert(value), room), style))

    def title(self, text: str) -> Iterator[RenderableType]:
        yield Text()
        yield Text(text, "bold")

    def mark(self, outcome: str) -> Text:
        shape = mark(outcome)
        return Text(shape.drawn(self.ascii), shape.style)

    # ---- sections --------------------------------------------------------------------------

    def headline(self) -> Iterator[RenderableType]:
        verdict = self.verdict
        shape = mark(verdict.outcome)
        line = Text(f"{shape.drawn(self.ascii)} {verdict.outcome.upper()}", f"bold {shape.style}")
        yield line.append(f"  {inert(verdict.reason)}", "not bold default")
        yield Text()
        yield self.field("baseline", verdict.baseline)
        yield self.field("target", verdict.target)

    def ladder(self) -> Iterator[RenderableType]:
        if not self.verdict.stages:
            return
        table = _table()
        table.add_column("stage", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column(_COUNTS.format("compared", "differ", "unmatched", "worst"), ratio=1)
        for stage in self.verdict.stages:
            style = "bold" if stage.outcome == "diverged" else ""
            outcome = self.mark(stage.outcome).append(f" {inert(stage.outcome)}")
            table.add_row(Text(inert(stage.stage), style), outcome, _tally(stage))
        yield Text()
        yield table

    def divergence(self, first: Divergence) -> Iterator[RenderableType]:
        yield from self.title("First divergence")
        yield self.field("site", first.site, "bold")
        if first.target_site and first.target_site != first.site:
            yield self.field("target's", first.target_site)
        yield self.labelled("stage", Text(_place(first)))
        yield self.labelled("what", Text(_what(first)))
        if first.meaning and first.meaning not in self.verdict.reason:
            yield self.labelled("means", Text(inert(first.meaning)))
        if first.shapes:
            yield self.labelled("shapes", Text(_sides(first.shapes)))
        if first.kind in {"value", "nonfinite", "dtype", "shape"}:
            yield self.labelled("error", Text(_error(first)))
        if first.bound is not None and first.bound.derivation:
            derived = f"{figure(first.bound.rel_l2)}, from {inert(first.bound.derivation)}"
            yield self.labelled("bound", Text(derived))
        yield self.labelled("origin", Text(_origin(first)))
        if first.where:
            yield self.labelled("source", Text(_sides(first.where)))
        for label, told in samples.facts(first):
            yield self.labelled(label, Text(told))
        for name, baseline, target in first.settings:
            yield self.labelled("setting", _change(name, baseline, target))
        yield from self.context(first)
        if first.span is not None:
            yield from self.title("Operations, held to their float64 formulas on their own inputs")
            yield from spans.terminal(first.span, self.width)
        yield from self.deviations(first)
        yield from self.neighbours(first)

    def context(self, first: Divergence) -> Iterator[RenderableType]:
        """What a text, its IDs or its labels look like around the first difference."""
        detail = first.detail
        baseline, target = detail.get("baseline_context"), detail.get("target_context")
        if isinstance(baseline, str) and isinstance(target, str):
            sides = text_diff(baseline, target, self.width - _LABEL - 1)
            yield Text()
            for label, (text, carets) in zip(("baseline", "target"), sides, strict=True):
                yield self.labelled(label, Text(text, no_wrap=True, overflow="crop"))
                if carets:
                    yield self.labelled("", Text(carets, "red", no_wrap=True, overflow="crop"))
            yield from self.characters(baseline, target)
        for side in samples.SIDES:
            line = samples.as_text(first, side)
            if line is not None:
                yield self.labelled(side, line)

    def characters(self, baseline: str, target: str) -> Iterator[RenderableType]:
        """Names the first pair of characters that differ, since many characters look alike."""
        pairs = zip(baseline, target, strict=False)
        pair = next(((a, b) for a, b in pairs if a != b), None)
        if pair is not None:
            first, second = map(describe, pair)
            yield self.labelled("differ in", Text(f"{first} against {second}"))

    def deviations(self, first: Divergence) -> Iterator[RenderableType]:
        if not first.deviations:
            return
        yield from self.title("Largest deviations")
        table = _table()
        for heading in ("index", "baseline", "target", "difference"):
            table.add_column(heading, justify="right", overflow="fold")
        for row in first.deviations[:_SHOWN]:
            cells = (_listed(row.index), row.baseline, row.target)
            table.add_row(*(Text(inert(c)) for c in cells), _difference(row.baseline, row.target))
        yield table

    def neighbours(self, first: Divergence) -> Iterator[RenderableType]:
        if not self.verdict.neighbours:
            return
        yield from self.title("Around it, in execution order")
        table = _table()
        for heading in ("", "site", "operation"):
            table.add_column(heading, no_wrap=True)
        table.add_column("error", justify="right", no_wrap=True)
        table.add_column("bound", justify="right", no_wrap=True)
        rows = self.verdict.neighbours
        operation = max(len(elide(inert(row.op), _OPERATION)) for row in rows)
        room = max(20, self.width - max(operation, len("operation")) - 25)
        for row in rows:
            table.add_row(*self.neighbour(row, row.site == first.site, room))
        yield table

    def neighbour(self, row: Neighbour, here: bool, room: int) -> list[Text]:
        style = "bold" if here else ""
        return [
            self.mark(row.mark).append(">" if here else " ", style),
            Text(elide(inert(row.site), room), style),
            Text(elide(inert(row.op), _OPERATION), style),
            Text(figure(row.error), style),
            Text(figure(row.bound), "dim"),
        ]

    def also(self) -> Iterator[RenderableType]:
        others = self.verdict.also
        if not others:
            return
        yield from self.title(f"Also diverged, independently: {count(len(others), 'site')}")
        for other in others[:_SHOWN]:
            line = Text("  ").append(self.mark("diverged")).append(" ")
            line.append(elide(inert(other.site), max(20, self.width - 30)))
            yield line.append(f"  {inert(other.pattern or other.kind)}", "dim")
        yield from self.more(len(others))

    def replayed(self) -> Iterator[RenderableType]:
        found = self.verdict.replayed
        if found is None:
            return
        yield from self.title("By replay on the baseline's inputs")
        line = (
            f"{count(found.decided, 'site')} decided: {len(found.introduced):,} introduced, "
            f"{found.inherited:,} inherited"
        )
        yield Text(f"  {line}")
        for site in found.introduced[:_SHOWN]:
            yield Text("  ").append(self.mark("diverged")).append(f" {inert(site)}")
        yield from self.more(len(found.introduced))

    def trajectory(self) -> Iterator[RenderableType]:
        rows = self.verdict.trajectory
        if not rows:
            return
        yield from self.title("Learning curve")
        table = _table()
        table.add_column("step", justify="right")
        table.add_column("", overflow="fold")
        for heading in ("baseline", "target", "difference"):
            table.add_column(heading, justify="right")
        for step, name, baseline, target in _spread(rows):
            values = (Text(number(baseline)), Text(number(target)), _difference(baseline, target))
            table.add_row(Text(str(step)), Text(inert(name)), *values)
        yield table
        if len(rows) > _SHOWN:
            yield Text(f"  ({_SHOWN} of {len(rows)} rows)", "dim")

    def environment(self) -> Iterator[RenderableType]:
        rows = self.verdict.environment
        if not rows:
            return
        yield from self.title(f"Environment: {count(len(rows), 'difference')}")
        for name, baseline, target in rows[:_SHOWN]:
            yield Padding(_change(name, baseline, target), (0, 0, 0, 2))
        yield from self.more(len(rows))

    def coverage(self) -> Iterator[RenderableType]:
        verdict = self.verdict
        if not verdict.matched_by and not verdict.unmatched:
            return
        yield from self.title("Compared")
        by = ", ".join(
            f"{amount:,} by {inert(name)}" for name, amount in verdict.matched_by.items()
        )
        line = f"{percent(verdict.coverage)} of the events of the side that has fewer"
        yield self.labelled("coverage", Text(line + (f": {by}" if by else "")))
        for group in verdict.unmatched[:_SHOWN]:
            text = f"{group.count:,} only in the {inert(group.side)}: {inert(group.reason)}"
            yield self.labelled("unmatched", Text(text))
        yield from self.more(len(verdict.unmatched))

    def more(self, total: int) -> Iterator[RenderableType]:
        if total > _SHOWN:
            yield Text(f"  … and {total - _SHOWN} more", "dim")


def _table() -> Table:
    """A table without lines, indented by the padding of its first column."""
    return Table(box=None, pad_edge=True, padding=(0, 1), header_style="dim", collapse_padding=True)


def _tally(stage: StageResult) -> Text:
    """The counts of a stage, its reason, or both, one below the other."""
    lines = []
    if stage.compared or any(stage.unmatched):
        unmatched = "{}/{}".format(*stage.unmatched) if any(stage.unmatched) else ""
        worst = figure(stage.worst) if stage.worst else ""
        counts = f"{stage.compared:,}", f"{stage.differing:,}", unmatched, worst
        lines.append(_COUNTS.format(*counts).rstrip())
    if stage.reason:
        lines.append(inert(stage.reason))
    return Text("\n".join(lines), overflow="fold")


def _place(first: Divergence) -> str:
    op = _sides(first.op) if first.op else ""
    return f"{first.stage}, step {first.step}" + (f": {op}" if op else "")


def _what(first: Divergence) -> str:
    figures = ", ".join(
        f"{inert(key).replace('_', ' ')} {_listed(value)}"
        for key, value in first.detail.items()
        if key not in _TEXT_DETAIL | samples.SHOWN and not isinstance(value, Mapping)
    )
    what = f"{first.kind} differs" if first.kind not in {"missing", "extra"} else first.kind
    if first.pattern and first.pattern != first.kind:
        what += f": {inert(first.pattern)}"
    return what + (f" ({figures})" if figures else "")


def _error(first: Divergence) -> str:
    error, bound = first.error, first.bound
    text = f"{figure(error.rel_l2)} relative (L2)"
    if bound is not None:
        text += f", {times(error.rel_l2, bound.rel_l2)}"
    text += f"; at most {figure(error.max_abs)} absolute, {figure(error.max_rel)} relative"
    if error.max_ulp and error.max_ulp <= _TELLING_ULP:
        text += f", {error.max_ulp:,} ulp"
    text += f"; {percent(error.differing)} of the elements differ"
    return text + (" (estimated from sketches)" if error.estimated else "")


def _origin(first: Divergence) -> str:
    origin = {
        "introduced": "introduced here: the inputs agree",
        "inherited": "inherited: the inputs differ already",
    }.get(first.origin, "undecided whether introduced here or inherited")
    blame = {
        "baseline": "; the baseline is wrong",
        "target": "; the target is wrong",
        "both": "; both sides are wrong",
    }.get(first.blame, "")
    return origin + blame


def _sides(values: Any) -> str:
    """`baseline | target`, or one value where both are the same."""
    shown = [inert(_listed(values[side])) for side in ("baseline", "target") if side in values]
    return shown[0] if len(set(shown)) == 1 else " | ".join(text or "-" for text in shown)


def _change(name: str, baseline: Any, target: Any) -> Text:
    before, after = (elide(inert(_listed(value)), 200) for value in (baseline, target))
    return Text(f"{inert(name)}  ").append(f"{before} | {after}", "bold")


def _difference(baseline: Any, target: Any) -> Text:
    try:
        return Text(figure(float(target) - float(baseline)))
    except (TypeError, ValueError):
        return Text("-")


def _listed(value: Any) -> str:
    """Sequences as `1, 2, 3` in brackets, floats as figures, the rest as printed."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_listed, value))}]"
    return number(value) if isinstance(value, float) else inert("none" if value is None else value)


def _spread(rows: Sequence[Any]) -> list[Any]:
    """At most `_SHOWN` rows, evenly spread, the first and last among them."""
    if len(rows) <= _SHOWN:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (_SHOWN - 1))] for i in range(_SHOWN)]
