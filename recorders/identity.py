"""What is known about objects that nothing here keeps alive: modules, parameters, methods."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """Values by the identity of weakly held objects, in the order in which they were set.

    As `torch.utils.weak.WeakIdKeyDictionary`, which takes twenty times as long for a look-up.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def __len__(self) -> int:
        """How many of them are alive."""
        return len(self._entries)

    def get(self, thing: Any) -> Value | None:
        entry = self._entries.get(id(thing))
        return entry[1] if entry is not None and entry[0]() is thing else None

    def set(self, thing: Any, value: Value) -> None:
        key, entries = id(thing), self._entries

        def forget(reference: weakref.ref[Any]) -> None:
            if key in entries and entries[key][0] is reference:
                del entries[key]

        entries.pop(key, None)  # of another object that had this address
        entries[key] = weakref.ref(thing, forget), value

    def forget(self, thing: Any) -> None:
        if self.get(thing) is not None:
            del self._entries[id(thing)]

    def items(self) -> list[tuple[Any, Value]]:
        """Those that are alive."""
        found = []
        for reference, value in list(self._entries.values()):
            thing = reference()
            if thing is not None:
                if hasattr(thing, "_fix_weakref"):  # of a tensor that only C++ held until now
                    thing._fix_weakref()
                found.append((thing, value))
        return found
