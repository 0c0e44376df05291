"""Alignment -> Verdict: the descent down the ladder to the first divergent site."""

from typing import TYPE_CHECKING

from tracediff.on_demand import on_demand

if TYPE_CHECKING:
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

__getattr__ = on_demand(
    __name__,
    {
        "Progress": "descent",
        "SiteRow": "site_rows",
        "bisect": "descent",
        "diff": "descent",
        "divergent_operation": "descent",
        "generator_parting": "generators",
        "operation_modules": "localised",
        "operation_options": "localised",
        "sentence": "sentences",
    },
)
