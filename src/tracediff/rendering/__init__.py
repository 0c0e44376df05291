"""Text, token and label differ; routes that render conversations, and their comparison."""

from tracediff.rendering.differ import Difference, differ_ids, differ_text
from tracediff.rendering.files import Vocabulary
from tracediff.rendering.steps import step

__all__ = ["Difference", "Vocabulary", "differ_ids", "differ_text", "step"]
