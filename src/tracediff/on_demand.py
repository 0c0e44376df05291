"""Names of a package whose modules are imported when one of them is first asked for.

A command needs few of the modules that the packages together have, and the time of a short one is
the time that its imports take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_demand(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        homes: For each public name, the module of the package that it is in. No module is called
            like a name of another one: the module would hide it.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get
