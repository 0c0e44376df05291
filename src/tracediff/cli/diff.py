"""`tracediff diff A B`."""

from __future__ import annotations

from typing import Annotated

import typer

from tracediff.cli import comparing, options

Stage = Annotated[str | None, typer.Option(help="List only the sites of this stage.")]
Step = Annotated[int | None, typer.Option(min=0, help="List only the sites of this step.")]
Operations = Annotated[
    bool,
    typer.Option(
        "--operations",
        help="List operations instead: which is paired with which, by what pass, and how the "
        "target's value lies over the baseline's. Both traces need --level op.",
    ),
]


def diff(
    baseline: options.Baseline,
    target: options.Target,
    stage: Stage = None,
    step: Step = None,
    operations: Operations = False,
    json: options.Json = None,
    rules: options.Rules = None,
    rtol: options.Rtol = None,
    atol: options.Atol = None,
    noise: options.Noise = None,
    rank: options.Rank = 0,
) -> int:
    """Compare two traces at every site, and list them all."""
    return comparing.diff(
        baseline,
        target,
        stage=stage,
        step=step,
        operations=operations,
        json=json,
        rules=rules,
        rtol=rtol,
        atol=atol,
        noise=noise,
        rank=rank,
    )
