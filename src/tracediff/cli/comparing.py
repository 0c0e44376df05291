"""What `tracediff bisect` and `tracediff diff` do, without their parser.

To build the parser takes as long as to compare two small traces of equal values. A command line of
two paths and no option has nothing to parse, and goes without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tracediff.cli import output
from tracediff.cli.process import leave_at_once
from tracediff.errors import UsageError

if TYPE_CHECKING:
    from tracediff.verdict import Verdict

COVERAGE: Final = 0.9
"""Fraction of the events that must be compared, unless an option says otherwise."""


def of_two_paths(arguments: Sequence[str]) -> Callable[[], int] | None:
    """The command, where it is one of these with two paths and nothing else."""
    command = _COMMANDS.get(arguments[0]) if len(arguments) == 3 else None
    if command is None or any(path.startswith("-") for path in arguments[1:]):
        return None
    return partial(command, *map(Path, arguments[1:]))


def bisect(
    baseline: Path,
    target: Path,
    *,
    json: Path | None = None,
    html: Path | None = None,
    rules: Path | None = None,
    min_coverage: float = COVERAGE,
    rtol: Sequence[str] | None = None,
    atol: Sequence[str] | None = None,
    noise: Path | None = None,
    replayed: Path | None = None,
    every_step: bool = False,
    replay: bool = False,
    deepen: bool = False,
    level: str = "module",
    keep: Path | None = None,
    scripts: Sequence[str] | None = None,
) -> int:
    """Writes the verdict on two traces, and returns its exit code. See the command's help."""
    # Imported here, as in every command: `--help` must not wait for zarr.
    from tracediff import bisection

    output.check_writable(json, html)
    if replay and deepen:
        raise UsageError("--replay takes two traces and --deepen two scripts: give one of them")
    if scripts and not replay and not deepen:
        raise UsageError(f"{scripts[0]}: scripts are given with --replay only")
    if not replay and not deepen:
        leave_at_once()
    with output.progress() as progress:

        def compare(a: Path, b: Path) -> Verdict:
            return bisection.bisect(
                a,
                b,
                rules=rules,
                min_coverage=min_coverage,
                rtol=rtol or (),
                atol=atol or (),
                noise=noise if a == baseline else None,
                replayed=replayed if a == baseline else None,
                every_step=every_step,
                progress=progress,
            )

        if deepen:
            from tracediff import deepening

            chosen: dict[str, Any] = {
                "rules": rules,
                "min_coverage": min_coverage,
                "rtol": rtol or (),
                "atol": atol or (),
            }
            a, b = deepening.scripts([str(baseline), str(target), *(scripts or ())])
            verdict = deepening.deepen(a, b, keep=keep, progress=progress, **chosen)
        elif replay:
            from tracediff.postmortem import post_mortem, split_scripts

            both = split_scripts(scripts or [])
            verdict = post_mortem(
                compare, baseline, target, both, level=level, keep=keep, rules=rules
            )
        else:
            verdict = compare(baseline, target)
    if html is not None:
        from tracediff.report.html import to_html

        output.write(html, to_html(verdict))
    if json is not None:
        from tracediff.report.json import dumps, to_json

        output.write(json, dumps(to_json(verdict)))
    if output.STDOUT in (json, html):
        for warning in verdict.warnings:
            output.tell(f"warning: {warning}")
    else:
        from tracediff.report.terminal import render

        output.show(render(verdict))
    return verdict.exit_code


def diff(
    baseline: Path,
    target: Path,
    *,
    stage: str | None = None,
    step: int | None = None,
    operations: bool = False,
    json: Path | None = None,
    rules: Path | None = None,
    rtol: Sequence[str] | None = None,
    atol: Sequence[str] | None = None,
    noise: Path | None = None,
    rank: int = 0,
) -> int:
    """Lists all sites of two traces, and returns the exit code. See the command's help."""
    from tracediff import bisection
    from tracediff.report.json import dumps
    from tracediff.report.tables import agreement, select, sites, sites_json

    output.check_writable(json)
    leave_at_once()
    with output.progress() as progress:
        found = bisection.diff(
            baseline,
            target,
            rules=rules,
            rtol=rtol or (),
            atol=atol or (),
            noise=noise,
            rank=rank,
            operations=operations,
            progress=progress,
        )
    rows = select(found, stage, step)
    if json is not None:
        output.write(json, dumps(sites_json(rows)))
    if json != output.STDOUT:
        output.show(sites(rows), whole_lines=True)
    return agreement(rows)


_COMMANDS: Final[Mapping[str, Callable[[Path, Path], int]]] = {"bisect": bisect, "diff": diff}
