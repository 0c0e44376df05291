"""`tracediff bisect A B`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracediff.cli import options, output

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
) -> int:
    """Name the first place at which two runs of the same job part."""
    # Imported here, as in every command: `--help` must not wait for zarr.
    from tracediff import bisection
    from tracediff.report.html import to_html
    from tracediff.report.json import dumps, to_json
    from tracediff.report.terminal import render

    output.check_writable(json, html)
    with output.progress() as progress:
        verdict = bisection.bisect(
            baseline,
            target,
            rules=rules,
            min_coverage=min_coverage,
            rtol=rtol or (),
            atol=atol or (),
            noise=noise,
            replayed=replayed,
            progress=progress,
        )
    if html is not None:
        output.write(html, to_html(verdict))
    if json is not None:
        output.write(json, dumps(to_json(verdict)))
    if output.STDOUT in (json, html):
        for warning in verdict.warnings:
            output.tell(f"warning: {warning}")
    else:
        output.show(render(verdict))
    return verdict.exit_code
