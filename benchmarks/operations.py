"""Is the operation named? One operation perturbed at a time, on either stack, and clean twins.

python -m benchmarks.operations --help
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tracediff
from benchmarks.faults import run_mlx, run_pytorch
from benchmarks.faults.job import Job
from benchmarks.perturbing import Meter, Perturbation, perturbing
from tracediff.align import align
from tracediff.align.flow import FEW, is_operation, name_of, output_of
from tracediff.align.operations import ValuePair, align_operations
from tracediff.events import Event
from tracediff.trace import Trace

FAMILIES = ("llama", "qwen3", "gpt2", "mistral", "qwen3_moe")
SIZES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
STACKS = ("eager", "sdpa", "mlx")
"""PyTorch with eager attention, PyTorch with SDPA, and MLX."""


def record(
    stack: str,
    family: str,
    output: Path,
    perturbation: Perturbation | None = None,
    layers: int = 2,
) -> bool:
    """Records one training step of a tiny model; says whether the perturbation took place."""
    name = "mlx" if stack == "mlx" else "pytorch"
    config = {"n_layer" if family == "gpt2" else "num_hidden_layers": layers}
    attention = "eager" if stack == "mlx" else stack
    job = Job(
        stack=name, family=family, steps=1, evaluate=False, attention=attention, config=config
    )
    meter = Meter()
    with ExitStack() as contexts:
        if perturbation is not None:
            contexts.enter_context(perturbing(name, perturbation, meter))
        meter.tape = contexts.enter_context(
            tracediff.record(output, stack=name, level="op", overwrite=True)
        )
        (run_mlx if name == "mlx" else run_pytorch).run(job)
    return meter.done


# ---- alignment ----------------------------------------------------------------------------------


def aligned(baseline: Trace, target: Trace, step: int = 0) -> list[ValuePair]:
    """The pairs of the operations of one step."""
    events = baseline.events(step), target.events(step)
    stacks = baseline.run.stack, target.run.stack
    modules = [[e for e in side if not is_operation(e)] for side in events]
    found = align(*modules, stacks)
    return align_operations(*events, stacks, found.paths, modules=found.pairs)[2]


def coverage(
    pairs: Sequence[ValuePair], target: Trace, phase: str = "forward"
) -> tuple[int, list[Event]]:
    """How many of the target's operations that make floating-point tensors of 16 elements or more
    are paired, and those that are not."""
    paired = {event.order for pair in pairs for event in pair.target.members}
    wanted = [
        event
        for event in target.events(0)
        if is_operation(event)
        and not event.attributes.get("leaf")
        and event.site.phase == phase
        and event.dtype.startswith(("float", "bfloat"))
        and event.fingerprint[0] >= FEW
    ]
    missing = [event for event in wanted if event.order not in paired]
    return len(wanted) - len(missing), missing


def enlarged(events: Sequence[Event], count: int) -> list[Event]:
    """At least `count` operation events: those of a step again and again, each time in modules and
    with values of their own."""
    own = [event for event in events if is_operation(event)]
    span = max(event.order for event in own) + 1
    found: list[Event] = []
    for copy in range(-(-count // len(own))):
        factor = 1 + 0.01 * copy
        for event in own:
            site = replace(event.site, path=f"copy{copy}.{event.site.path}")
            shift = copy * span
            scaled = (*event.fingerprint[:4], *(x * factor for x in event.fingerprint[4:]))
            moments = {7: factor**2, 8: factor**3}
            scaled = tuple(x * moments.get(i, 1.0) for i, x in enumerate(scaled))
            inputs = tuple(order + shift for order in event.inputs)
            digest = hash((event.digest, copy)).to_bytes(8, "little", signed=True)
            found.append(
                replace(
                    event,
                    site=site,
                    order=event.order + shift,
                    fingerprint=scaled,
                    inputs=inputs,
                    digest=digest,
                )
            )
    return found


def measure_cost(baseline: Trace, target: Trace) -> None:
    """Prints how long it takes to align more and more events."""
    stacks = baseline.run.stack, target.run.stack
    for count in (1_000, 3_000, 10_000, 30_000, 100_000):
        sides = [enlarged(trace.events(0), count) for trace in (baseline, target)]
        started = time.process_time()
        pairs = align_operations(*sides, stacks)[2]
        seconds = time.process_time() - started
        sizes = " and ".join(f"{len(side):,}" for side in sides)
        print(f"{sizes} events: {len(pairs):,} pairs in {seconds:.2f} s", flush=True)


# ---- perturbations ------------------------------------------------------------------------------


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
    def name(self) -> str:
        stacks = f"{self.baseline} against {self.target}"
        where = ("baseline", "target")[self.side]
        return f"{self.family}, {stacks}: {self.event.op} at {self.event.site} of the {where}"


@dataclass(frozen=True, slots=True)
class Result:
    """What bisect said. `outcome` is named, wrong, missed or no effect."""

    case: str
    canonical: str
    phase: str
    size: float
    outcome: str
    why: str = ""
    seconds: float = 0.0


class Bench:
    """Clean traces of one pair of stacks, and perturbed ones made against them."""

    def __init__(self, folder: Path, family: str, stacks: tuple[str, str], layers: int = 2) -> None:
        self.family, self.stacks, self.layers = family, stacks, layers
        self._folder = folder
        self.clean = tuple(self._recorded(side) for side in (0, 1))

    def _recorded(self, side: int) -> Trace:
        path = self._folder / f"{self.family}-{self.stacks[side]}-{side}.zarr"
        for _ in range(2):  # what a first run compiles is seen differently by a second
            record(self.stacks[side], self.family, path, layers=self.layers)
        return Trace(path)

    def cases(
        self,
        side: int,
        generator: random.Random,
        each: int = 1,
        sizes: Sequence[float] = (),
    ) -> Iterator[Case]:
        """For each operation of a stack and each phase, a few of its calls, each with one size
        drawn, or with all that are given."""
        events = [e for e in self.clean[side].events(0) if is_operation(e)]
        by_order = {event.order: event for event in events}
        groups: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in events:
            floating = event.dtype.startswith("float") and event.fingerprint[6] > 0
            if floating and not event.attributes.get("leaf"):
                groups[event.op, event.site.phase].append(event)
        for found in groups.values():
            for event in generator.sample(found, min(each, len(found))):
                first = _first_output(event, by_order)
                for size in sizes or (generator.choice(SIZES),):
                    where = Perturbation(first, event.op, size, event.order - first)
                    yield Case(self.family, *self.stacks, side, event, size, where)

    def run(self, case: Case) -> Result:
        started = time.perf_counter()
        path = self._folder / "perturbed.zarr"
        facts = (case.name, name_of(case.event), case.event.site.phase, case.size)
        stack = self.stacks[case.side]
        if not record(stack, self.family, path, case.perturbation, self.layers):
            return Result(*facts, "no effect", "not reached")
        clean = self.clean[case.side]
        with Trace(path) as perturbed:
            if not _has_effect(clean, perturbed, case.event):
                return Result(*facts, "no effect")
            traces = [*self.clean]
            traces[case.side] = perturbed
            verdict = tracediff.bisect(traces[0], traces[1])
        outcome, why = _judge(verdict, case)
        return Result(*facts, outcome, why, time.perf_counter() - started)


def _first_output(event: Event, by_order: dict[int, Event]) -> int:
    """Order of the first output of the call that made an event; operations on lists of tensors are
    recorded one by one."""
    first = event.order - output_of(event)
    while event.op.startswith("aten._foreach_"):
        before = by_order.get(first - 1)
        if before is None or (before.op, before.source) != (event.op, event.source):
            break
        first -= 1
    return first


def _has_effect(clean: Trace, perturbed: Trace, event: Event) -> bool:
    """Whether the operation's own value changed, and what training makes of it.

    A mask of -3.4e38 hides a score all the same if it is a tenth less.
    """
    before, after = clean.events(0), {e.order: e.digest for e in perturbed.events(0)}
    changed = [e for e in before if after.get(e.order) != e.digest]
    results = any(e.site.phase in ("loss", "backward", "optimizer") for e in changed)
    return results and len(changed) > 1 and any(e.order == event.order for e in changed)


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


# ---- command line -------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operations", description=__doc__)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--pairs", nargs="+", default=["eager:mlx"], metavar="BASELINE:TARGET")
    parser.add_argument("--sides", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--each", type=int, default=1, help="calls of each operation and phase")
    parser.add_argument("--limit", type=int, help="at most so many cases of each pair and side")
    parser.add_argument("--phases", nargs="+")
    parser.add_argument("--sizes", nargs="+", type=float, default=(), help="every one of these")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cost", action="store_true", help="only measure the cost of alignment")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="operations-") as folder:
        for family in options.families:
            for pair in options.pairs:
                bench = Bench(Path(folder), family, tuple(pair.split(":")), options.layers)
                if options.cost:
                    measure_cost(*bench.clean)
                    continue
                _report_clean(bench)
                for side in options.sides:
                    results += _run(bench, side, options)
    tally = Counter(result.outcome for result in results)
    real = sum(tally.values()) - tally["no effect"]
    print(f"{tally['named']} of {real} named, {dict(tally)}")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1))
    return 0


def _report_clean(bench: Bench) -> None:
    pairs = aligned(*bench.clean)
    found, missing = coverage(pairs, bench.clean[1])
    verdict = tracediff.bisect(*bench.clean)
    passes = dict(Counter(pair.matched_by for pair in pairs))
    print(
        f"{bench.family} {'/'.join(bench.stacks)}: {verdict.outcome}, aligned "
        f"{found} of {found + len(missing)} ({passes})",
        flush=True,
    )
    if verdict.first is not None:
        print(f"  FALSE ALARM {verdict.first.site} {verdict.first.meaning}", verdict.first.bound)
    if missing:
        print("  not aligned:", dict(Counter(name_of(e) for e in missing)))


def _run(bench: Bench, side: int, options: Any) -> list[Result]:
    generator = random.Random(options.seed)
    cases = [
        case
        for case in bench.cases(side, generator, options.each, options.sizes)
        if not options.phases or case.event.site.phase in options.phases
    ]
    if options.limit is not None:
        cases = generator.sample(cases, min(options.limit, len(cases)))
    results = []
    for case in cases:
        result = bench.run(case)
        results.append(result)
        if result.outcome not in ("named", "no effect"):
            print(f"  {result.outcome}: {result.case} x {result.size:g}: {result.why}", flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
