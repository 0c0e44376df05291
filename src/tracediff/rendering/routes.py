"""A route renders a conversation to text and token IDs through one implementation.

Routes are the files `rendering_<name>.py` among the replayers; each exports a class `Route` that is
imported only when it is asked for.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import iter_modules
from typing import Final, cast

from tracediff.errors import TracediffError, UsageError
from tracediff.rendering.files import Vocabulary
from tracediff.rendering.records import Record

_PREFIX: Final = "rendering_"


class RouteError(TracediffError):
    """A route cannot be opened: a library is missing, or the files need what it does not have."""


class RefusedError(Exception):
    """A route does not render this one record; the message says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a route makes of a record; `ids` is None where the route has no tokenizer.

    Attributes:
        text: What was given to the tokenizer.
        template: What the template made, where a script may have changed it before.
    """

    text: str
    ids: tuple[int, ...] | None = None
    template: str | None = None


class Route(ABC):
    """One implementation of the way from a record to text and IDs.

    Attributes:
        parts: What does the work, by part (`template engine`, `template set-up`, `tokenizer`,
            `Unicode tables`, `template`, `vocabulary`). A part that two routes name alike is one
            that they share, and whose faults a comparison of the two cannot show.
        vocabulary: For the naming of differences; None without a tokenizer.
    """

    parts: Mapping[str, str]
    vocabulary: Vocabulary | None

    @abstractmethod
    def __init__(self, path: Path) -> None:
        """Opens the route on a folder of tokenizer files (or a template, where it says so).

        Raises:
            RouteError: A library is missing, or the files need what the route does not have.
            UsageError: The path holds no such files.
        """

    @abstractmethod
    def render(self, record: Record) -> Rendered:
        """Renders one record. Any error that this raises counts as a refusal of the record."""

    def close(self) -> None:  # noqa: B027 - most routes hold nothing
        """Ends what the route has started."""


@dataclass(frozen=True, slots=True)
class Named:
    """An open route under the name that the command line gave it."""

    name: str
    route: Route


def names() -> list[str]:
    """Names of the routes that are built in."""
    package = importlib.import_module("tracediff.replayers")
    found = (module.name for module in iter_modules(package.__path__))
    return sorted(name.removeprefix(_PREFIX) for name in found if name.startswith(_PREFIX))


def open_route(spec: str) -> Named:
    """Opens the route that `NAME:PATH` names.

    Raises:
        UsageError: The text has another form, the name is unknown, or the path is wrong.
        RouteError: The route cannot be opened here.
    """
    name, colon, path = spec.partition(":")
    if not colon or not path:
        raise UsageError(f"route {spec!r} has no path: write it as hf:DIR")
    if name not in names():
        raise UsageError(f"route {name!r} is unknown: use one of {', '.join(names())}")
    if not Path(path).exists():
        raise UsageError(f"route {spec!r}: {path} is missing: give a folder of tokenizer files")
    try:
        module = importlib.import_module(f"tracediff.replayers.{_PREFIX}{name}")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("tracediff"):
            raise
        raise RouteError(f"route {name!r} needs {error.name}: pip install {error.name}") from None
    try:
        return Named(spec, cast("type[Route]", module.Route)(Path(path)))
    except TracediffError:
        raise
    except Exception as error:  # a foreign library may raise anything about files it cannot read
        told = " ".join(str(error).split())[:300]
        message = f"{type(error).__name__}: {told}; check the files with another route"
        raise RouteError(f"route {spec!r} cannot be opened: {message}") from error


def shared(first: Route, second: Route) -> list[str]:
    """What two routes have in common, and so cannot check: `part (implementation)` each."""
    return [
        f"{part} ({value})"
        for part, value in first.parts.items()
        if second.parts.get(part) == value
    ]
