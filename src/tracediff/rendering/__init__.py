"""Text, token and label differ; routes that render conversations, and their comparison."""

from typing import TYPE_CHECKING

from tracediff.on_demand import on_demand

if TYPE_CHECKING:
    from tracediff.rendering.differ import Difference, differ_ids, differ_text
    from tracediff.rendering.files import Vocabulary
    from tracediff.rendering.steps import step

__all__ = ["Difference", "Vocabulary", "differ_ids", "differ_text", "step"]

__getattr__ = on_demand(
    __name__,
    {
        "Difference": "differ",
        "Vocabulary": "files",
        "differ_ids": "differ",
        "differ_text": "differ",
        "step": "steps",
    },
)
