"""`tracediff demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracediff.cli import output


def demo(
    workdir: Annotated[
        Path | None,
        typer.Option(help="Folder for the traces of the demo; a temporary one by default."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder.")] = False,
) -> int:
    """Find a real fault between two stacks, mend it, and find a planted one."""
    from tracediff.demo import run

    return run(output.console(), workdir, keep)
