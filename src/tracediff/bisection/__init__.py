"""Alignment -> Verdict: the descent down the ladder to the first divergent site."""

from tracediff.bisection.descent import Progress, bisect, diff, divergent_operation
from tracediff.bisection.generators import generator_parting
from tracediff.bisection.localised import operation_modules, operation_options
from tracediff.bisection.sentences import sentence
from tracediff.bisection.site_rows import SiteRow

__all__ = [
    "Progress",
    "SiteRow",
    "bisect",
    "diff",
    "divergent_operation",
    "generator_parting",
    "operation_modules",
    "operation_options",
    "sentence",
]
