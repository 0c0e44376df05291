"""JSON that may come from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

LARGEST_DIGITS: Final = 308
"""Of an integer: with more, no float64 holds it, and arithmetic with floats raises."""


def load_json(text: str | bytes) -> Any:
    """The value of a JSON text; `NaN` and infinities are floats, as in Python's `json`.

    Raises:
        ValueError: It is no JSON, or an integer in it is larger than every float64.
        RecursionError: It is nested too deeply.
    """
    if not isinstance(text, str):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    return _DECODER.decode(text)


def load_attributes(text: str | bytes) -> dict[str, Any]:
    """The attributes of an event from their JSON, "" for none.

    Raises:
        ValueError: They are no JSON object, or one that readers compute with is of another type.
        RecursionError: They are nested too deeply.
    """
    found = load_json(text) if text else {}
    if not isinstance(found, dict):
        raise ValueError(f"attributes are {str(found)[:40]}")
    for name in found.keys() & _TYPES.keys():
        if type(found[name]) not in _TYPES[name]:
            raise ValueError(f"attribute {name} is {str(found[name])[:40]}")
    if not all(isinstance(alias, str) for alias in found.get("aliases", ())):
        raise ValueError(f"attribute aliases is {str(found['aliases'])[:40]}")
    return found


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "args": (dict,),
    "operands": (list,),
    "aliases": (list,),
    "max_norm": (float, int),
    "forward_order": (int,),
}


def _integer(digits: str) -> int:
    if len(digits) > LARGEST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


_DECODER: Final = json.JSONDecoder(parse_int=_integer)
