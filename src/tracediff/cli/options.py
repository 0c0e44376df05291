"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Baseline = Annotated[Path, typer.Argument(metavar="A", help="The baseline: a trace.")]
Target = Annotated[Path, typer.Argument(metavar="B", help="The trace to compare with it.")]
TracePath = Annotated[Path, typer.Argument(metavar="TRACE", help="The path of a trace.")]

Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="PATH", help="Write the result as JSON; '-' is stdout."),
]
Rules = Annotated[
    Path | None,
    typer.Option("--map", metavar="RULES.TOML", help="Your own names: rules that pair sites."),
]
MinCoverage = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        metavar="FRACTION",
        help="Fraction of the events that must be compared for a clean verdict.",
    ),
]
Rtol = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=VALUE",
        help="Relative tolerance (L2) for the sites that match; may be repeated.",
    ),
]
Atol = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=VALUE",
        help="Absolute tolerance for the sites that match; may be repeated.",
    ),
]
