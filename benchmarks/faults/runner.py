"""Records the two runs of a case, bisects them, and says whether the verdict is right."""

from __future__ import annotations

import gc
import hashlib
import logging
import math
import shutil
import time
import warnings
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults import run_mlx, run_pytorch
from benchmarks.faults.blames import expected
from benchmarks.faults.case import Case
from benchmarks.faults.job import Job
from tracediff.bisection import bisect
from tracediff.session import record
from tracediff.trace import Trace
from tracediff.verdict import Verdict

_RUN = {"pytorch": run_pytorch.run, "mlx": run_mlx.run}
_UNTOLD = ("environment", "rng")


@dataclass(slots=True)
class Result:
    """What came out of a case.

    Attributes:
        real: The planted run differs from the unplanted one on the same stack.
        effect: Largest relative change of the loss that the plant causes, over the steps.
        detected, located, blamed: For faults. `blamed` is `right` (the verdict blames whom it
            should: nobody where traces cannot tell), `wrong` (a side that is not to blame) or
            `missed`.
        blame, whom, because: The verdict's blame, the right one, and why it is that.
        silent: For twins.
        same: Meant to be bit-identical.
        why: What is wrong, in words; "" where all is right.
    """

    id: str
    name: str
    stage: str
    pair: str
    family: str
    dtype: str
    outcome: str
    real: bool
    effect: float
    first: str = ""
    expected: str = ""
    detected: bool = False
    located: bool = False
    blamed: str = "missed"
    blame: str = ""
    whom: str = ""
    because: str = ""
    silent: bool = False
    same: bool = False
    reason: str = ""
    why: str = ""
    seconds: float = 0.0


class Bench:
    """Runs cases in one process. Unplanted runs are recorded once and shared."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._traces: OrderedDict[str, Path] = OrderedDict()
        self._count = 0
        warnings.simplefilter("ignore")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()  # recorders look through all objects for optimizers

    def run(self, case: Case) -> Result:
        """Raises whatever a job raises; an error of the differ is a result."""
        started = time.perf_counter()
        clean = self._clean(case, case.side)
        other = "baseline" if case.side == "target" else "target"
        partner = self._clean(case, other)
        if case.same and case.pair[0] == case.pair[1]:
            partner = self._record(case.job(other))
        planted = self._record(case.job(case.side))
        sides = (partner, planted) if case.side == "target" else (planted, partner)
        result = self._judge(case, sides, *_change(Trace(clean), Trace(planted)))
        if case.stage == "twin":
            result.real = _differ(Trace(sides[0]), Trace(sides[1]))
        for path in {planted, partner} - set(self._traces.values()):
            shutil.rmtree(path)
        result.seconds = time.perf_counter() - started
        return result

    def _clean(self, case: Case, side: str) -> Path:
        """The run of a side with nothing planted, recorded once per job."""
        common = id(case.common) if case.common else ""
        job = case.job(side, planted=False)
        key = f"{job.stack}-{case.family}-{case.dtype}-{common}"
        if key not in self._traces:
            self._traces[key] = self._record(job)
            if len(self._traces) > 40:
                shutil.rmtree(self._traces.popitem(last=False)[1])
        self._traces.move_to_end(key)
        return self._traces[key]

    def _record(self, job: Job) -> Path:
        self._count += 1
        path = self._folder / f"{self._count}.zarr"
        with record(path, stack=job.stack, argv=("benchmark",)):
            _RUN[job.stack](job)
        return path

    def _judge(self, case: Case, sides: tuple[Path, Path], real: bool, effect: float) -> Result:
        result = Result(
            id=case.id,
            name=case.name,
            stage=case.stage,
            pair=case.pair,
            family=case.family,
            dtype=case.dtype,
            outcome="error",
            real=real,
            effect=effect,
            same=case.same,
            expected=" ".join(case.expect) and f"step {case.step} " + " ".join(case.expect),
        )
        try:
            verdict = bisect(*sides)
        except Exception as error:
            result.reason = result.why = f"{type(error).__name__}: {error}"
            return result
        result.outcome, result.reason = verdict.outcome, verdict.reason
        if verdict.first:
            result.first = verdict.first.site
        if case.expect:
            _score_fault(case, verdict, result)
        else:
            result.silent = verdict.outcome in ("identical", "equivalent")
            if case.same and verdict.outcome != "identical":
                result.why = "not bit-identical"
            if not result.silent:
                result.why = verdict.reason
        return result


def _score_fault(case: Case, verdict: Verdict, result: Result) -> None:
    first = verdict.first
    result.whom, result.because = expected(case.name, case.stage, case.side)
    result.detected = verdict.outcome == "diverged"
    if not result.detected or first is None:
        result.why = f"not detected: {verdict.reason}"
        return
    result.located = first.step == case.step and case.located(first.stage, first.path, first.port)
    result.blame = first.blame
    if first.blame == result.whom:
        result.blamed = "right"
    elif first.blame != "undecided":
        result.blamed = "wrong"
    if not result.located:
        result.why = f"named {first.site}"
    if result.blamed == "wrong":
        result.why = f"{result.why}, blamed {first.blame}".removeprefix(", ")


def _change(clean: Trace, planted: Trace) -> tuple[bool, float]:
    """Whether a plant changes anything recorded, and by how much it moves the loss."""
    effect = 0.0
    for step in sorted(set(clean.steps) & set(planted.steps)):
        a, b = (_losses(trace, step) for trace in (clean, planted))
        for x, y in zip(a, b, strict=False):
            effect = max(effect, abs(x - y) / abs(x) if x else abs(y))
    return _differ(clean, planted), effect


def _losses(trace: Trace, step: int) -> list[float]:
    events = trace.events(step)
    found = [e for e in events if e.site.phase == "trajectory" and e.site.path == "loss"]
    return [float(trace.array(e)) for e in found]


def _differ(a: Trace, b: Trace) -> bool:
    return _values(a) != _values(b)


def _values(trace: Trace) -> set[tuple[str, str]]:
    """Everything recorded but settings: site, and the digest or value."""
    return {
        (str(e.site), e.digest.hex() or hashlib.sha1(repr(e.value).encode()).hexdigest())
        for e in trace.events()
        if e.site.phase != "environment"
    }


def wilson(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """95% interval of a proportion (Wilson 1927)."""
    if not total:
        return 0.0, 1.0
    p = right / total
    centre = p + z * z / (2 * total)
    spread = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def as_json(result: Result) -> dict[str, Any]:
    return asdict(result)
