"""JSON that may come from anywhere."""

from __future__ import annotations

import json
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


def _integer(digits: str) -> int:
    if len(digits) > LARGEST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


_DECODER: Final = json.JSONDecoder(parse_int=_integer)
