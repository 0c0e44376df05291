"""Perturbs one operation of a run at a time and asks bisect which one it was."""

from __future__ import annotations

import gc
import hashlib
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tracediff
from benchmarks import smollm2
from benchmarks.faults import run_mlx, run_pytorch
from benchmarks.faults.job import Job
from benchmarks.perturbing import Meter, Perturbation, perturbing
from tracediff.align.flow import Flow, is_operation, name_of, output_of
from tracediff.bisection.spans import Engine, is_float, norm
from tracediff.events import Event
from tracediff.trace import Trace

SIZES = (1e-5, 1e-3, 1e-1)

_ROUNDING = 2.0**-20
"""Sixteen units of float32's roundoff: losses, gradients and updates that are no further apart are
the same."""


def record(
    stack: str,
    family: str,
    output: Path,
    perturbation: Perturbation | None = None,
    layers: int = 2,
) -> bool:
    """Records one training step of a tiny model; says whether the perturbation took place.

    Args:
        family: Of `benchmarks.faults`, or `smollm2`: the first layers of SmolLM2-135M.
        stack: `eager` or `sdpa` (PyTorch's attention), `foreach` (eager, and the optimizer on lists
            of tensors), or `mlx`.
    """
    name = "mlx" if stack == "mlx" else "pytorch"
    attention = "sdpa" if stack == "sdpa" else "eager"
    meter = Meter()
    with ExitStack() as contexts:
        if perturbation is not None:
            contexts.enter_context(perturbing(name, perturbation, meter))
        meter.tape = contexts.enter_context(
            tracediff.record(output, stack=name, level="op", overwrite=True)
        )
        if family == "smollm2":
            smollm2.run(name, layers, attention)
        else:
            (run_mlx if name == "mlx" else run_pytorch).run(_job(stack, family, attention, layers))
    return meter.done


def _job(stack: str, family: str, attention: str, layers: int) -> Job:
    config = {"n_layer" if family == "gpt2" else "num_hidden_layers": layers}
    job = Job(
        stack="mlx" if stack == "mlx" else "pytorch",
        family=family,
        steps=1,
        evaluate=False,
        attention=attention,
        config=config,
    )
    if stack == "foreach":
        job.optimizer.implementation = {"foreach": True}
    return job


@dataclass(frozen=True, slots=True)
class Case:
    """One operation to perturb: on which stack, in which trace of the pair, and how much."""

    family: str
    baseline: str
    target: str
    side: int
    event: Event
    size: float
    perturbation: Perturbation

    @property
    def stack(self) -> str:
        return (self.baseline, self.target)[self.side]

    @property
    def name(self) -> str:
        stacks = f"{self.baseline} against {self.target}"
        where = ("baseline", "target")[self.side]
        return f"{self.family}, {stacks}: {self.event.op} at {self.event.site} of the {where}"


@dataclass(frozen=True, slots=True)
class Result:
    """What bisect said.

    Attributes:
        outcome: `named`, `wrong`, `missed`, `rounding` (not named, and within the rounding bound of
            the operation itself) or `no effect` (on training).
    """

    case: str
    family: str
    stack: str
    canonical: str
    phase: str
    size: float
    outcome: str
    why: str = ""
    seconds: float = 0.0


class Bench:
    """Clean traces of one pair of stacks, and perturbed ones made against them.

    What is recorded stays in the folder and is used again.
    """

    def __init__(self, folder: Path, family: str, stacks: tuple[str, str], layers: int = 2) -> None:
        self.family, self.stacks, self.layers = family, stacks, layers
        self._folder = folder / f"{family}-{layers}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.clean = tuple(self._recorded(stack) for stack in stacks)

    def _recorded(self, stack: str) -> Trace:
        path = self._folder / f"{stack}.zarr"
        # What a first run of a process loads and compiles is seen differently by a second.
        record(stack, self.family, self._folder / "first.zarr", layers=self.layers)
        if not path.exists():
            record(stack, self.family, path, layers=self.layers)
        gc.freeze()  # recorders look through all objects, which takes half of a short recording
        return Trace(path)

    def cases(
        self,
        side: int,
        generator: random.Random,
        each: int = 1,
        sizes: Sequence[float] = (),
    ) -> Iterator[Case]:
        """For each operation of a stack and each phase, a few of its calls, with one size in turn,
        or with all that are given."""
        events = [e for e in self.clean[side].events(0) if is_operation(e)]
        by_order = {event.order: event for event in events}
        groups: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in events:
            floating = event.dtype.startswith("float") and event.fingerprint[6] > 0
            if floating and not event.attributes.get("leaf"):
                groups[event.op, event.site.phase].append(event)
        turn = generator.randrange(len(SIZES))
        for found in groups.values():
            for event in generator.sample(found, min(each, len(found))):
                turn += 1
                first = _first_output(event, by_order)
                for size in sizes or (SIZES[turn % len(SIZES)],):
                    where = Perturbation(first, event.op, size, event.order - first)
                    yield Case(self.family, *self.stacks, side, event, size, where)

    def run(self, case: Case) -> Result:
        started = time.process_time()
        phase = case.event.site.phase
        facts = (case.name, case.family, case.stack, name_of(case.event), phase, case.size)
        path = self._perturbed(case)
        if not path.exists():
            return Result(*facts, "no effect", "not reached")
        clean = self.clean[case.side]
        with Trace(path) as perturbed:
            if not _has_effect(clean, perturbed, case.event):
                return Result(*facts, "no effect")
            traces = [*self.clean]
            traces[case.side] = perturbed
            verdict = tracediff.bisect(traces[0], traces[1])
            outcome, why = _judge(verdict, case)
            if outcome != "named" and _is_rounding(perturbed, case.event):
                outcome = "rounding"
            elif outcome == "missed" and not _is_beyond_rounding(clean, perturbed, case.event):
                outcome, why = "no effect", "undone"
        return Result(*facts, outcome, why, time.process_time() - started)

    def _perturbed(self, case: Case) -> Path:
        key = hashlib.sha1(repr((case.perturbation, case.stack)).encode()).hexdigest()[:16]
        path, unreached = (self._folder / f"{key}.{end}" for end in ("zarr", "unreached"))
        if not path.exists() and not unreached.exists():
            partial = path.with_suffix(".partial")
            done = record(case.stack, self.family, partial, case.perturbation, self.layers)
            partial.rename(path if done else unreached)
        return path


def _first_output(event: Event, by_order: dict[int, Event]) -> int:
    """Order of the first output of the call that made an event; operations on lists of tensors are
    recorded one by one."""
    if event.site.port.startswith("grad_"):
        return event.order  # gradients of several outputs come one by one
    first = event.order - output_of(event)
    while event.op.startswith("aten._foreach_"):
        before = by_order.get(first - 1)
        if before is None or (before.op, before.source) != (event.op, event.source):
            break
        first -= 1
    return first


def _has_effect(clean: Trace, perturbed: Trace, event: Event) -> bool:
    """Whether the operation's own value changed, and what training makes of it: the loss, gradients
    of parameters, or an update.

    A mask of -3.4e38 hides a score all the same if it is a tenth less.
    """
    before, after = clean.events(0), {e.order: e.digest for e in perturbed.events(0)}
    changed = [e for e in before if after.get(e.order) != e.digest]
    stages = ("loss", "backward", "optimizer", "trajectory")
    results = any(e.site.phase in stages and not is_operation(e) for e in changed)
    return results and any(e.order == event.order for e in changed)


def _is_beyond_rounding(clean: Trace, perturbed: Trace, event: Event) -> bool:
    """Whether training makes something else of a perturbed operation, and not of rounding alone:
    what log-sum-exp subtracts it adds again."""
    ports = ("update",) if event.site.phase == "optimizer" else ("out", "grad")
    after = {e.order: e for e in perturbed.events(0)}
    for before in clean.events(0):
        if is_operation(before) or before.site.port not in ports or not is_float(before):
            continue
        if before.site.phase == "forward" or before.digest == after[before.order].digest:
            continue
        x, y = clean.array(before).astype(float), perturbed.array(after[before.order]).astype(float)
        if norm(x - y) > _ROUNDING * norm(x):
            return True
    return False


def _judge(verdict: Any, case: Case) -> tuple[str, str]:
    first = verdict.first
    if first is None:
        return "missed", verdict.reason
    side = ("baseline", "target")[case.side]
    site = first.site if case.side == 0 else first.target_site
    op, where = first.op.get(side), first.where.get(side)
    if (site, op, where) == (str(case.event.site), case.event.op, case.event.source):
        return ("named", "") if first.blame in (side, "undecided") else ("wrong", "blame")
    return "wrong", f"named {op} at {site} ({where}), {first.meaning}"


def _is_rounding(perturbed: Trace, event: Event) -> bool:
    """Whether the operation is within the rounding bound of its float64 formula all the same."""
    operations = [e for e in perturbed.events(0) if is_operation(e)]
    flow = Flow(operations)
    check = Engine(perturbed, flow).check(flow.events[event.order])
    return check is not None and check.ratio <= 1


def table(results: Sequence[Result]) -> str:
    """A Markdown table: how many of the perturbations with an effect were named."""
    rows: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for result in results:
        if result.outcome != "no effect":
            rows[result.family, result.stack, result.phase][result.outcome] += 1
            rows["all", "", ""][result.outcome] += 1
    lines = ["| model | stack | phase | named | wrong | missed | rounding | of |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for key in sorted(rows):
        tally = rows[key]
        cells = *key, *(tally[o] for o in ("named", "wrong", "missed", "rounding")), tally.total()
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
