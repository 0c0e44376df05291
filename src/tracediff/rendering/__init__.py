"""Text, token and label differ."""

from tracediff.rendering.differ import Difference, differ_ids, differ_text

__all__ = ["Difference", "differ_ids", "differ_text"]
