"""Finds recorders and replayers by name and imports them only when they are asked for."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Final, cast

from tracediff.errors import StackError

if TYPE_CHECKING:
    from tracediff.recording import Given, Recorder, Tape
    from tracediff.replaying import Replayer

FRAMEWORKS: Final[Mapping[str, str]] = {"pytorch": "torch", "mlx": "mlx"}
"""The module whose absence means that a built-in stack is not installed."""

_STACK_OF_MODULE: Final[Mapping[str, str]] = {
    "torch": "pytorch",
    "peft": "pytorch",
    "trl": "pytorch",
    "accelerate": "pytorch",
    "mlx": "mlx",
    "mlx_lm": "mlx",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StackInfo:
    """One stack as `tracediff stacks` lists it; `hint` says how to install what is missing."""

    name: str
    recorder: bool
    replayer: bool
    installed: bool
    versions: Mapping[str, str] = field(default_factory=dict)
    hint: str = ""


def names(kind: str = "recorder") -> list[str]:
    """Names of all stacks with a recorder (or a replayer), built in or from entry points."""
    return sorted(_modules(kind) | {entry.name for entry in _entry_points(kind)})


def available() -> list[StackInfo]:
    """All stacks, with what each can do here. Imports no framework."""
    recorders, replayers = set(names("recorder")), set(names("replayer"))
    return [_describe(name, recorders, replayers) for name in sorted(recorders | replayers)]


def load_recorder(name: str) -> type[Recorder]:
    """Imports the recorder of a stack.

    Raises:
        StackError: The stack is unknown, or its framework is not installed. An import error from
            inside a framework that is there is raised as it is.
    """
    return cast("type[Recorder]", _load("recorder", name))


def load_replayer(name: str) -> type[Replayer]:
    """Imports the replayer of a stack; `reference` needs nothing but the core.

    Raises:
        StackError: As `load_recorder` does.
    """
    return cast("type[Replayer]", _load("replayer", name))


def load_substituter(
    name: str, attribute: str = "Substituter"
) -> Callable[[Tape, Given], Recorder]:
    """Imports what records a stack while it runs on given values.

    It is a class beside the stack's replayer: `Substituter` gives modules their inputs,
    `StageSubstituter` a run its batches and weights.

    Raises:
        StackError: As `load_recorder` does, or the stack has none.
    """
    return cast("Callable[[Tape, Given], Recorder]", _load("replayer", name, attribute))


def _load(kind: str, name: str, attribute: str = "") -> Any:
    for entry in _entry_points(kind):
        if entry.name == name:
            return entry.load()
    if name not in _modules(kind):
        known = ", ".join(names(kind))
        what = "stack" if kind == "recorder" else kind
        raise StackError(f"{what} {name!r} is unknown: use one of {known}")
    framework = FRAMEWORKS.get(name)
    if framework and importlib.util.find_spec(framework) is None:
        raise StackError(f"stack {name!r} needs {framework}: pip install 'tracediff-ml[{name}]'")
    module = importlib.import_module(f"tracediff.{kind}s.{name}_{kind}")
    found = getattr(module, attribute or kind.capitalize(), None)
    if found is None:
        raise StackError(f"{kind} {name!r} has no {attribute or kind.capitalize()}: use another")
    return found


def guess(script: Path) -> str:
    """The stack that a script imports, read from its source without running it.

    Raises:
        StackError: It imports none or several; the message says how to choose.
    """
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"), filename=str(script))
    except (SyntaxError, ValueError) as error:
        raise StackError(f"{script} is no Python source ({error}): give a Python script") from None
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    }
    found = sorted({_STACK_OF_MODULE[name] for name in imported if name in _STACK_OF_MODULE})
    if len(found) == 1:
        return found[0]
    seen = f"imports {' and '.join(found)}" if found else "imports no framework that is known"
    raise StackError(f"{script} {seen}: say which with --stack {'|'.join(names())}")


def imported() -> str:
    """The one stack whose framework this process has imported.

    Raises:
        StackError: None or several are imported; the message says how to choose.
    """
    found = [name for name, module in FRAMEWORKS.items() if module in sys.modules]
    if len(found) == 1:
        return found[0]
    seen = f"{' and '.join(found)} are imported" if found else "no framework is imported yet"
    raise StackError(f"{seen}: say which to record with stack=, one of {', '.join(names())}")


def _describe(name: str, recorders: set[str], replayers: set[str]) -> StackInfo:
    framework = FRAMEWORKS.get(name)
    installed = framework is None or importlib.util.find_spec(framework) is not None
    versions = {}
    if framework and installed:
        try:
            versions[framework] = version(framework)
        except PackageNotFoundError:
            versions[framework] = "unknown"
    hint = "" if installed else f"pip install 'tracediff-ml[{name}]'"
    return StackInfo(
        name=name,
        recorder=name in recorders,
        replayer=name in replayers,
        installed=installed,
        versions=versions,
        hint=hint,
    )


def _modules(kind: str) -> set[str]:
    package = importlib.import_module(f"tracediff.{kind}s")
    suffix = f"_{kind}"
    return {
        module.name.removesuffix(suffix)
        for module in iter_modules(package.__path__)
        if module.name.endswith(suffix)
    }


def _entry_points(kind: str) -> Any:
    return entry_points(group=f"tracediff.{kind}s")
