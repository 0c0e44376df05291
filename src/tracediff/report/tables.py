"""Tables of `diff`, `verify` and `stacks`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tracediff.errors import UsageError
from tracediff.events import STAGES, Site
from tracediff.report.json import FORMAT, plain
from tracediff.report.marks import mark
from tracediff.report.text import count, figure, inert

if TYPE_CHECKING:
    from tracediff.bisection import SiteRow
    from tracediff.stacks import StackInfo
    from tracediff.trace import Repair, Verification

_FIGURES: Final = ("error", "bound", "max abs")
_SITE_HEADINGS: Final = ("", "site", *_FIGURES, "origin", "matched by", "target's site")


def select(rows: Sequence[SiteRow], stage: str | None, step: int | None) -> list[SiteRow]:
    """The rows of one stage, of one step, or of both.

    Raises:
        UsageError: There is no such stage, or no row of it.
    """
    if stage is not None and stage not in STAGES:
        raise UsageError(f"--stage {stage!r} is unknown: use one of {', '.join(STAGES)}")
    if stage is None and step is None:
        return list(rows)
    places = [(row, Site.parse(row.site or row.target_site)) for row in rows]
    wanted = [
        row for row, site in places if stage in (None, site.phase) and step in (None, site.step)
    ]
    if not wanted:
        held = sorted({f"{site.phase} at step {site.step}" for _, site in places})
        raise UsageError(
            f"nothing was recorded of stage {stage or 'any'} at step "
            f"{'any' if step is None else step}: there is {', '.join(held[:20]) or 'nothing'}"
        )
    return wanted


def sites(rows: Sequence[SiteRow]) -> RenderableType:
    """Every site on a line of its own, in execution order, the unmatched ones last."""
    marks = Counter(row.mark for row in rows)
    compared = len(rows) - marks["unmatched"]
    healed = sum(row.origin == "healed" for row in rows)
    total = (
        f"{count(compared, 'site')} compared, {marks['diverged']:,} diverged"
        f"{f' ({healed:,} of them healed)' if healed else ''}, {marks['unmatched']:,} unmatched"
    )
    return Group(_Sites(rows), Text(), Text(total, "bold"))


class _Sites:
    """The table of sites.

    Where each row fits on a line, as in a pipe, it is put together here: rich measures and wraps
    every cell, which takes longer than comparing small traces.
    """

    def __init__(self, rows: Sequence[SiteRow]) -> None:
        self._rows = [tuple(_site_cells(row)) for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        headings = tuple(Text(heading, "dim") for heading in _SITE_HEADINGS)
        lines = [headings, *self._rows]
        widths = [max(cell.cell_len for cell in column) for column in zip(*lines, strict=True)]
        if sum(widths) + 2 * len(widths) > options.max_width:
            yield self._folded()
            return
        right = [heading in _FIGURES for heading in _SITE_HEADINGS]
        for cells in lines:
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
                gap = " " * (width - cell.cell_len)
                between = "  " if column else ""
                yield Segment(between + gap if right[column] else between)
                yield Segment(cell.plain, console.get_style(cell.style))
                if not right[column]:
                    yield Segment(gap)
            yield Segment.line()

    def _folded(self) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
        table.add_column("", no_wrap=True)
        table.add_column("site", overflow="fold", ratio=2)
        for heading in _FIGURES:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("origin", no_wrap=True)
        table.add_column("matched by", overflow="fold")
        table.add_column("target's site", overflow="fold", ratio=1)
        for cells in self._rows:
            table.add_row(*cells)
        return table


def _site_cells(row: SiteRow) -> Iterator[Text]:
    shape = mark(row.mark)
    figures = (row.error.rel_l2, row.bound, row.error.max_abs)
    compared = row.mark != "unmatched" and row.layout not in ("half", "part")
    yield Text(f"{shape.symbol} {inert(row.mark)}", shape.style)
    yield Text(inert(row.site))
    for value in figures:
        yield Text(figure(value) if compared and value is not None else "")
    yield Text(inert(row.origin))
    turned = f", {row.layout}" if row.layout not in ("", "same") else ""
    yield Text(inert(row.matched_by + turned), "dim")
    yield Text("" if row.target_site == row.site else inert(row.target_site), "dim")


def sites_json(rows: Sequence[SiteRow]) -> dict[str, Any]:
    """The object of `tracediff diff --json`."""
    return {"format": FORMAT, "sites": [plain(row) for row in rows]}


def agreement(rows: Sequence[SiteRow]) -> int:
    """The exit code of a list of sites: nothing compared is never agreement.

    What heals is no divergence of the runs, as `bisect` has it.
    """
    compared = [row for row in rows if row.mark != "unmatched"]
    if any(row.mark == "diverged" and row.origin != "healed" for row in compared):
        return 1
    return 0 if compared else 125


def verification(place: str, result: Verification) -> RenderableType:
    """Whether a trace is sound, what is damaged, and what a cut-off run left behind."""
    shape = mark("identical" if result.sound else "diverged")
    parts = [count(result.steps, "step"), count(result.events, "event"), f"{result.bytes:,} bytes"]
    if result.snapshots:
        parts.append(count(result.snapshots, "snapshot"))
    checked = ", ".join(parts)
    line = Text(f"{shape.symbol} {'SOUND' if result.sound else 'DAMAGED'}", f"bold {shape.style}")
    line.append(f"  {inert(place)}: {checked} checked", "not bold default")
    lines = [line]
    lines += [Text(f"  {inert(damage.where)}: {inert(damage.what)}") for damage in result.damage]
    if result.seal:
        lines.append(Text(f"  seal: {result.seal}"))
    if len(result.ranks) > 1:
        lines.append(Text(f"  {_ranks(result.ranks)}", "" if _even(result.ranks) else "yellow"))
    if result.cut_off:
        lines.append(Text("  the run was cut off, or is still recording", "yellow"))
    elif result.status != "finished":
        lines.append(Text(f"  the run {inert(result.status)}", "yellow"))
    lines += [Text(f"  never committed: {inert(name)}") for name in result.unfinished]
    return Group(*lines)


def _even(ranks: Mapping[int, int]) -> bool:
    """Whether no rank is missing, and all have as many steps."""
    return set(ranks) == set(range(len(ranks))) and len(set(ranks.values())) == 1


def _ranks(ranks: Mapping[int, int]) -> str:
    if _even(ranks):
        return f"{len(ranks)} ranks, {count(ranks[0], 'step')} each"
    lacking = sorted(set(range(max(ranks) + 1)) - set(ranks)) if max(ranks) < 10_000 else []
    told = [f"rank {rank} has {count(steps, 'step')}" for rank, steps in sorted(ranks.items())]
    return ", ".join([*(f"rank {rank} is missing" for rank in lacking[:3]), *told[:8]])


def verification_json(place: str, result: Verification) -> dict[str, Any]:
    """The object of `tracediff verify --json`."""
    flags = {"format": FORMAT, "path": place, "sound": result.sound, "cut_off": result.cut_off}
    return flags | asdict(result)


def repaired(place: str, result: Repair) -> RenderableType:
    """What a repair copied, rebuilt, salvaged and could not read."""
    shape = mark("identical" if result.whole else "diverged")
    line = Text(f"{shape.symbol} {'WHOLE' if result.whole else 'IN PART'}", f"bold {shape.style}")
    line.append(f"  {inert(place)}: {count(result.copied, 'step')} copied", "not bold default")
    lines = [line]
    for name, lost in result.rebuilt.items():
        lines.append(Text(f"  {inert(name)}: rebuilt without {inert(', '.join(lost[:3]))}"))
        if len(lost) > 3:
            lines.append(Text(f"    and {len(lost) - 3:,} more"))
    for name, found in result.salvaged.items():
        lines.append(Text(f"  {inert(name)}: never committed, {count(found, 'value')} salvaged"))
    lines += [Text(f"  {inert(name)}: lost, {inert(why)}") for name, why in result.lost.items()]
    lines += [Text(f"  {inert(name)}: altered since the seal") for name in result.altered]
    return Group(*lines)


def repair_json(place: str, result: Repair) -> dict[str, Any]:
    """The object of `tracediff repair --json`."""
    return {"format": FORMAT, "path": place, "whole": result.whole} | asdict(result)


def stack_list(stacks: Sequence[StackInfo]) -> RenderableType:
    """The stacks, what each can do here, and how to install what is missing."""
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    for heading in ("stack", "records", "replays", "installed"):
        table.add_column(heading, overflow="fold")
    for stack in stacks:
        versions = ", ".join(f"{name} {version}" for name, version in stack.versions.items())
        installed = Text(inert(versions or "yes")) if stack.installed else Text(f"no: {stack.hint}")
        table.add_row(
            Text(inert(stack.name), "bold"),
            Text("yes" if stack.recorder else "no"),
            Text("yes" if stack.replayer else "no"),
            installed,
        )
    return table
