"""Why cases go wrong, as diagnosed by hand, not always verified; told in docs/accuracy.md."""

from __future__ import annotations

from typing import Final

REASONS: Final = {
    "values cut off from the backward pass": "the absent gradient is taken for an optional port",
}
