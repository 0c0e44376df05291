"""`tracediff bisect A B`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracediff.cli import options, output
from tracediff.errors import UsageError

if TYPE_CHECKING:
    from tracediff.verdict import Verdict

Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="PATH", help="Write the report as one HTML file."),
]

Replayed = Annotated[
    Path | None,
    typer.Option(
        metavar="R", help="A replay of B with A: what errs there is introduced, the rest inherited."
    ),
]


EveryStep = Annotated[
    bool,
    typer.Option(
        "--every-step",
        help="Look at every step of runs that differ by rounding, also where sums of norms and "
        "sketches say that it is no further apart than the steps before.",
    ),
]
Replay = Annotated[
    bool,
    typer.Option(
        "--replay",
        help="Execute the step at which they part again on both sides, in full, compare that, and "
        "name the operation.",
    ),
]
Deepen = Annotated[
    bool,
    typer.Option(
        "--deepen",
        help="Record two scripts and name the operation: --deepen -- SCRIPT_A ARGS -- SCRIPT_B "
        "ARGS. The module at which they part is recorded again, with its operations.",
    ),
]
Keep = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="With --replay or --deepen: keep the traces in this folder."),
]
Scripts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- SCRIPT_A ARGS -- SCRIPT_B ARGS]",
        help="With --replay: what A and B are recordings of; one script stands for both.",
    ),
]


def bisect(
    baseline: options.Baseline,
    target: options.Target,
    json: options.Json = None,
    html: Html = None,
    rules: options.Rules = None,
    min_coverage: options.MinCoverage = 0.9,
    rtol: options.Rtol = None,
    atol: options.Atol = None,
    noise: options.Noise = None,
    replayed: Replayed = None,
    every_step: EveryStep = False,
    replay: Replay = False,
    deepen: Deepen = False,
    level: options.Level = "module",
    keep: Keep = None,
    scripts: Scripts = None,
) -> int:
    """Name the first place at which two runs of the same job part."""
    # Imported here, as in every command: `--help` must not wait for zarr.
    from tracediff import bisection

    output.check_writable(json, html)
    if replay and deepen:
        raise UsageError("--replay takes two traces and --deepen two scripts: give one of them")
    if scripts and not replay and not deepen:
        raise UsageError(f"{scripts[0]}: scripts are given with --replay only")
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
