"""Two arrays and a bound: error figures, what rounding can explain, and the shape of an error."""

from tracediff.compare.bounds import bound, floor
from tracediff.compare.figures import Figures, is_float, largest_deviations, max_ulp, measure
from tracediff.compare.patterns import Pattern, recognise

__all__ = [
    "Figures",
    "Pattern",
    "bound",
    "floor",
    "is_float",
    "largest_deviations",
    "max_ulp",
    "measure",
    "recognise",
]
