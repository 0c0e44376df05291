"""`tracediff bisect A B`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracediff.cli import comparing, options

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
    min_coverage: options.MinCoverage = comparing.COVERAGE,
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
    return comparing.bisect(
        baseline,
        target,
        json=json,
        html=html,
        rules=rules,
        min_coverage=min_coverage,
        rtol=rtol,
        atol=atol,
        noise=noise,
        replayed=replayed,
        every_step=every_step,
        replay=replay,
        deepen=deepen,
        level=level,
        keep=keep,
        scripts=scripts,
    )
