"""Where two records, lists of messages or of tools part, and the class of the difference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tracediff.rendering.text_classes import Class


def differing_leaf(baseline: str, target: str) -> tuple[str, Any, Any] | None:
    """The first place at which two JSON values part: `[1].content`, and what each side has there.

    None where one of them is no JSON, or they are equal but for their spelling.
    """
    try:
        return _leaf("", json.loads(baseline), json.loads(target))
    except ValueError:
        return None


def classify_record(leaf: tuple[str, Any, Any]) -> Class | None:
    """The class of what differs at a place, where its type tells; texts are classified as texts."""
    place, a, b = leaf
    for side, one, other in (("baseline", a, b), ("target", b, a)):
        if isinstance(one, str) and isinstance(other, list) and _joined(other) == one:
            meaning = f"{place} is a text in the {side} and a list of text parts on the other side"
            return Class("content parts", meaning, {"place": place})
    both = isinstance(a, list) and isinstance(b, list)
    if both and sorted(map(_key, a)) == sorted(map(_key, b)):
        return Class("order", f"{place or 'the list'} has the same items in another order")
    return None


def lacks_tools(tools: str, baseline: str, target: str) -> Class | None:
    """Whether one text tells of the tools and the other of none, by their names."""
    names = _names(tools)
    told = [[name for name in names if name in text] for text in (baseline, target)]
    if bool(told[0]) == bool(told[1]):
        return None
    side = "baseline" if not told[0] else "target"
    named = ", ".join((told[0] or told[1])[:3])
    return Class("tools missing", f"the {side} says nothing of the tools it was given ({named})")


def _leaf(place: str, a: Any, b: Any) -> tuple[str, Any, Any] | None:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = [*a, *(key for key in b if key not in a)]
        pairs = [(f"{place}.{key}", a.get(key), b.get(key)) for key in keys]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(f"{place}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    elif a == b and type(a) is type(b):
        return None
    else:
        return place.lstrip("."), a, b
    return next((found for pair in pairs if (found := _leaf(*pair))), None)


def _joined(parts: Sequence[Any]) -> str | None:
    """The text of a list of text parts."""
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return None
    return "".join(part["text"] for part in parts)


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _names(tools: str) -> list[str]:
    try:
        found = json.loads(tools)
    except ValueError:
        return []
    functions = [t.get("function", t) for t in found if isinstance(t, dict)]
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]
