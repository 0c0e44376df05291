"""The command `tracediff`: its subcommands, and one line and exit code 2 for every error."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer
from typer.main import get_command

from tracediff import __version__
from tracediff.cli.output import flush, tell
from tracediff.errors import TracediffError

USAGE: int = 2

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        arguments: What follows `tracediff` on the command line; `sys.argv[1:]` by default.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows its code
            stream.reconfigure(errors="backslashreplace")
    given = sys.argv[1:] if arguments is None else list(arguments)
    named = given[:1] if given and given[0] in COMMANDS else COMMANDS  # others need no imports
    try:
        code = get_command(application(named)).main(
            args=given,
            prog_name="tracediff",
            standalone_mode=False,
        )
        flush()
    except typer.TyperException as error:
        tell(f"{error.format_message()} ({_help_hint(error)})")
        return USAGE
    except (TracediffError, OSError) as error:
        tell(_sentence(error))
        return USAGE
    except Exception:  # Python's own exit code for it, 1, would say that two runs diverged
        traceback.print_exc()
        tell("internal error: please report it with the lines above")
        return USAGE
    return code if isinstance(code, int) else 0


def _help_hint(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f"see '{context.command_path if context else 'tracediff'} --help'"


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
