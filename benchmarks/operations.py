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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tracediff
from benchmarks.naming import Bench, Result, table
from tracediff.align import align
from tracediff.align.flow import FEW, is_operation, name_of
from tracediff.align.matching import ValuePair
from tracediff.align.operations import align_operations
from tracediff.events import Event
from tracediff.trace import Trace

FAMILIES = ("llama", "qwen3", "gpt2", "mistral", "qwen3_moe")
PHASES = ("forward", "loss", "backward", "optimizer")


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


# ---- command line -------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operations", description=__doc__)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=(*FAMILIES, "smollm2"))
    parser.add_argument("--pairs", nargs="+", default=["eager:mlx"], metavar="BASELINE:TARGET")
    parser.add_argument("--sides", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--each", type=int, default=1, help="calls of each operation and phase")
    parser.add_argument("--limit", type=int, help="at most so many cases of each pair and side")
    parser.add_argument("--phases", nargs="+", choices=PHASES)
    parser.add_argument("--sizes", nargs="+", type=float, default=(), help="every one of these")
    parser.add_argument("--keep", type=Path, help="folder of recordings, which are used again")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cost", action="store_true", help="only measure the cost of alignment")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    with ExitStack() as stack:
        folder = options.keep or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="operations-")
        )
        for family in options.families:
            for pair in options.pairs:
                bench = Bench(Path(folder), family, tuple(pair.split(":")), options.layers)
                if options.cost:
                    measure_cost(*bench.clean)
                    continue
                _report_clean(bench)
                for side in options.sides:
                    for result in _run(bench, side, options):
                        results.append(result)
                        if options.json:
                            found = [asdict(each) for each in results]
                            options.json.write_text(json.dumps(found, indent=1))
    if results:
        print(table(results))
    return 0


def _report_clean(bench: Bench) -> None:
    pairs = aligned(*bench.clean)
    verdict = tracediff.bisect(*bench.clean)
    print(f"{bench.family} {'/'.join(bench.stacks)}: {verdict.outcome}", flush=True)
    if verdict.first is not None:
        print(f"  FALSE ALARM {verdict.first.site} {verdict.first.meaning}", verdict.first.bound)
    for phase in PHASES:
        found, missing = coverage(pairs, bench.clean[1], phase)
        lacking = dict(Counter(name_of(e) for e in missing)) or ""
        print(f"  {phase}: aligned {found} of {found + len(missing)} {lacking}")


def _run(bench: Bench, side: int, options: Any) -> Iterator[Result]:
    generator = random.Random(f"{options.seed} {bench.family} {bench.stacks} {side}")
    cases = [
        case
        for case in bench.cases(side, generator, options.each, options.sizes)
        if not options.phases or case.event.site.phase in options.phases
    ]
    if options.limit is not None:
        cases = generator.sample(cases, min(options.limit, len(cases)))
    for case in cases:
        result = bench.run(case)
        if result.outcome not in ("named", "no effect"):
            print(f"  {result.outcome}: {result.case} x {result.size:g}: {result.why}", flush=True)
        yield result


if __name__ == "__main__":
    sys.exit(main())
