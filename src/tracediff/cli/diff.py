"""`tracediff diff A B`."""

from __future__ import annotations

from typing import Annotated

import typer

from tracediff.cli import options, output

Stage = Annotated[str | None, typer.Option(help="List only the sites of this stage.")]
Step = Annotated[int | None, typer.Option(min=0, help="List only the sites of this step.")]


def diff(
    baseline: options.Baseline,
    target: options.Target,
    stage: Stage = None,
    step: Step = None,
    json: options.Json = None,
    rules: options.Rules = None,
    rtol: options.Rtol = None,
    atol: options.Atol = None,
    noise: options.Noise = None,
    rank: options.Rank = 0,
) -> int:
    """Compare two traces at every site, and list them all."""
    from tracediff import bisection
    from tracediff.report.json import dumps
    from tracediff.report.tables import agreement, select, sites, sites_json

    output.check_writable(json)
    with output.progress() as progress:
        found = bisection.diff(
            baseline,
            target,
            rules=rules,
            rtol=rtol or (),
            atol=atol or (),
            noise=noise,
            rank=rank,
            progress=progress,
        )
    rows = select(found, stage, step)
    if json is not None:
        output.write(json, dumps(sites_json(rows)))
    if json != output.STDOUT:
        output.show(sites(rows), whole_lines=True)
    return agreement(rows)
