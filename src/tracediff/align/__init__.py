"""Alignment: which event of one trace is the same cross-check point as which of the other."""

from tracediff.align.alignment import Alignment, align
from tracediff.align.names import Rules, canonical, load_rules

__all__ = ["Alignment", "Rules", "align", "canonical", "load_rules"]
