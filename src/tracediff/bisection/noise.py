"""A replicate of the baseline as measured floor: how far one stack's run is from itself.

Atomic additions, threads that sum in another order, kernels that are chosen by alignment: a job
that is not deterministic differs from its own replicate at each site by some amount. No derived
bound knows of it. Twice the measured difference is allowed, since one replicate is one draw.
"""

from __future__ import annotations

from typing import Final

from tracediff.compare.figures import measure
from tracediff.compare.padding import Padding
from tracediff.errors import UsageError
from tracediff.events import EXACT_KINDS, Event, Site
from tracediff.trace import Trace
from tracediff.trace.summary import FINGERPRINT_FIELDS, sketched_distance
from tracediff.verdict import Bound

HEADROOM: Final = 2.0
"""Draws of the same noise: another one may be larger than the one that was measured."""

_L2: Final = FINGERPRINT_FIELDS.index("l2")


class Noise:
    """The differences between a baseline and a replicate of it, measured where they are asked for.

    Args:
        baseline, replicate: Traces of two runs of the same script on the same stack.

    Raises:
        UsageError: The replicate is the baseline itself, of another stack, or of another job.
    """

    def __init__(self, baseline: Trace, replicate: Trace) -> None:
        if baseline.identity == replicate.identity:
            raise UsageError(
                f"--noise {replicate.place} is the baseline itself: record the same script again"
            )
        if baseline.run.stack != replicate.run.stack:
            raise UsageError(
                f"--noise {replicate.place} is of stack {replicate.run.stack}, the baseline of "
                f"{baseline.run.stack}: record the baseline's script again"
            )
        self._baseline = baseline
        self._replicate = replicate
        self._sites: dict[int, dict[Site, Event]] = {}
        self._seen = 0
        self._worst: tuple[float, str] = (0.0, "")

    def widen(self, event: Event, bound: Bound, padding: Padding) -> Bound | None:
        """A wider bound for a site of the baseline, or None where the derived one holds.

        Raises:
            UsageError: The replicate was given other data.
        """
        size = self._difference(event, padding)
        if not size:
            return None
        self._seen += 1
        self._worst = max(self._worst, (size, str(event.site)))
        if HEADROOM * size <= bound.rel_l2:
            return None
        return Bound(
            rel_l2=HEADROOM * size,
            derivation=f"{HEADROOM:g} x the {size:.1e} between the baseline and its replicate "
            f"(derived: {bound.rel_l2:.1e}, {bound.derivation})",
        )

    def told(self) -> str:
        """What the replicate showed, in one sentence."""
        name = self._replicate.path.name
        if not self._seen:
            return f"noise: the replicate {name} is bit-equal wherever the runs differ"
        size, site = self._worst
        return (
            f"noise: the replicate {name} differs from the baseline at {self._seen} of the sites "
            f"where the runs differ, by up to {size:.1e} ({site})"
        )

    def _difference(self, event: Event, padding: Padding) -> float:
        """Relative L2 difference at a site; 0 where the replicate has no such value, or an equal
        one, or one that is not finite."""
        other = self._events(event.site.step).get(event.site)
        if other is None or other.digest == event.digest or other.shape != event.shape:
            return 0.0
        if event.payload is not None and other.payload is not None:
            a, c = self._baseline.array(event), self._replicate.array(other)
            figures = measure(a, c, padding.counts(event, a.shape))
            return 0.0 if figures.nonfinite else figures.error.rel_l2
        if not event.fingerprint or not other.fingerprint or not event.fingerprint[_L2]:
            return 0.0
        scale = event.fingerprint[_L2]
        if event.sketch is not None and other.sketch is not None:
            return sketched_distance(event.sketch, other.sketch) / scale
        return abs(scale - other.fingerprint[_L2]) / scale

    def _events(self, step: int) -> dict[Site, Event]:
        if step not in self._sites:
            there = step in self._replicate.steps
            events = self._replicate.events(step, samples=False) if there else []
            self._sites = {step: {event.site: event for event in events}}
            self._check(step)
        return self._sites[step]

    def _check(self, step: int) -> None:
        """A run on other data is no replicate: its distance says nothing about noise."""
        sites = self._sites[step]
        if step in self._replicate.steps and (
            self._replicate.samples(step).root != self._baseline.samples(step).root
        ):
            raise UsageError(
                f"--noise {self._replicate.path} is no replicate of the baseline: the samples "
                f"rendered in step {step} differ; record the same script again with the same seeds"
            )
        for event in self._baseline.events(step, samples=False):
            if event.site.phase != "rendering" or event.kind not in EXACT_KINDS:
                continue
            other = sites.get(event.site)
            if other is not None and other.digest != event.digest:
                raise UsageError(
                    f"--noise {self._replicate.path} is no replicate of the baseline: they differ "
                    f"at {event.site}; record the same script again with the same seeds"
                )
