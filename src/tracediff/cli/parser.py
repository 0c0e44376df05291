"""The parser of the command line: all subcommands with their arguments and options."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer
from typer.main import get_command

from tracediff import __version__
from tracediff.cli.app import USAGE
from tracediff.errors import UsageError

COMMANDS: tuple[str, ...] = (
    "record",
    "replay",
    "selfcheck",
    "bisect",
    "diff",
    "render",
    "show",
    "verify",
    "repair",
    "stacks",
    "demo",
)
"""Each is a function in a module of its own, both called like it; listed by `--help` in this order.
"""

_SCRIPT = {"allow_interspersed_args": False}  # what follows SCRIPT is the script's, `--` or not
_OF_SCRIPTS = ("record", "selfcheck")


def _print_version(wanted: bool) -> None:
    if wanted:
        from tracediff.kernels import engine

        typer.echo(f"tracediff {__version__} ({engine()} kernels)")
        raise typer.Exit


def application(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """The command line with some of its commands, whose modules are imported here."""
    app = typer.Typer(
        name="tracediff",
        help="Records two runs of the same training job, on PyTorch and MLX, and names the first "
        "operation at which they part. Record each run with `record`, then `bisect` the two "
        "traces; `demo` shows it on a real model.",
        epilog="Exit codes: 0 the runs agree, 1 they diverge, 2 usage error or unreadable input, "
        "125 they cannot be compared.",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for name in commands:
        module = import_module(f"tracediff.cli.{name}")
        settings = _SCRIPT if name in _OF_SCRIPTS else {}
        app.command(name, context_settings=settings)(getattr(module, name))
    return app


def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(USAGE)


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code.

    Raises:
        UsageError: It is no command line of `tracediff`.
    """
    named = arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS
    try:
        code = get_command(application(named)).main(
            args=list(arguments),
            prog_name="tracediff",
            standalone_mode=False,
        )
    except typer.TyperException as error:
        raise UsageError(f"{error.format_message()} ({_help_hint(error)})") from error
    return code if isinstance(code, int) else 0


def _help_hint(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f"see '{context.command_path if context else 'tracediff'} --help'"
