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
Noise = Annotated[
    Path | None,
    typer.Option(
        metavar="C", help="A replicate of A: how far it is from A is allowed to B as well."
    ),
]

Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The Python script to run, unchanged.")
]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")
]
Stack = Annotated[
    str, typer.Option(help="pytorch, mlx or another of `tracediff stacks`; auto looks.")
]
Level = Annotated[
    str,
    typer.Option(
        help="digest keeps summaries of all values; module also keeps the values; op records "
        "every operation as well; op-digest does so and keeps summaries only."
    ),
]
Steps = Annotated[
    str | None,
    typer.Option(
        metavar="STEPS", help="Keep values and operations only at these steps, such as 0:3,100."
    ),
]
Only = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="Keep values and operations only inside this module (or pattern)."
    ),
]
SketchEvery = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Where values are not kept, whole sketches of everything at every Nth step, and short "
        "ones of what modules return at the others.",
    ),
]
SketchState = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Likewise, whole sketches of weights, updates and gradients at every Nth step, short "
        "ones at the others.",
    ),
]
SnapshotEvery = Annotated[
    int | None,
    typer.Option(metavar="N", help="Keep what a replay needs before every Nth step: a snapshot."),
]
KeepSnapshots = Annotated[
    int | None, typer.Option(metavar="M", help="Keep only the latest M snapshots.")
]
Compress = Annotated[
    bool,
    typer.Option("--compress", help="Compress values and snapshots, for archives."),
]
Seal = Annotated[
    bool,
    typer.Option("--seal", help="Keep a SHA-256 of every file, for a trace that is evidence."),
]
Rank = Annotated[
    int, typer.Option(min=0, metavar="N", help="Of a run of several processes: which one.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a trace that is there.")]
MaxBuffer = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Write beside the script, which may be this far ahead (256M, 2G); 0 writes at once.",
    ),
]
OnFull = Annotated[
    str,
    typer.Option(
        metavar="wait|drop",
        help="When the buffer is full: wait, or drop values of tensors (never their digests).",
    ),
]
OnError = Annotated[
    str,
    typer.Option(
        metavar="stop|continue",
        help="When the trace cannot be written: stop the script, or let it run on without.",
    ),
]
