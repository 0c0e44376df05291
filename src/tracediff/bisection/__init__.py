"""Alignment -> Verdict: the descent down the ladder to the first divergent site."""

from tracediff.bisection.descent import Progress, SiteRow, bisect, diff

__all__ = ["Progress", "SiteRow", "bisect", "diff"]
