"""Why cases go wrong, as diagnosed by hand, not always verified; told in docs/accuracy.md."""

from __future__ import annotations

from typing import Final

REASONS: Final = {
    "trailing space trimmed": "the texts differ and their token IDs agree, so the report has it as "
    "a warning and not as the divergence",
}
