"""Bisection of long traces that differ in one event: bytes read and time.

    python -m benchmarks.long_traces [--gigabytes 10] [--folder DIR]

Prints the tables of docs/performance.md. The second trace of a pair shares the segments of the
first by hard links, all but one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection import bisect
from tracediff.events import Event, Run, Site
from tracediff.trace import Trace, TraceWriter
from tracediff.trace.index import write_index
from tracediff.trace.summary import digest, fingerprint

EVENTS = 20
STEPS = (10, 100, 1_000, 10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the large traces")
    parser.add_argument("--folder", type=Path, default=None, help="where to write them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print("| steps | size of a trace | bytes read | of both | time |")
        print("|---:|---:|---:|---:|---:|")
        for steps in STEPS:
            _row(Path(folder), steps, elements=64)
        steps = 1_000
        size = int(options.gigabytes * 1e9)
        _row(Path(folder), steps, elements=size // (4 * EVENTS * steps))


def _row(folder: Path, steps: int, elements: int) -> None:
    place = steps * 7 // 10
    a = _record(folder / "a.zarr", range(steps), elements)
    b = _with_a_fault(a, folder / "b.zarr", place, elements)
    seconds = []
    for _ in range(5):
        verdict = bisect(a, b)
        seconds.append(verdict.cost.seconds)
        assert verdict.first is not None
        assert verdict.first.site == f"{place}/forward/layer.{EVENTS - 1}#0:out"
    cost = verdict.cost
    share = cost.bytes_read / cost.bytes_stored
    print(
        f"| {steps:,} | {cost.bytes_stored / 2e6:,.1f} MB | {cost.bytes_read / 1e3:,.0f} KB "
        f"| {share:.4%} | {1e3 * sorted(seconds)[2]:.0f} ms |",
        flush=True,
    )
    shutil.rmtree(a)
    shutil.rmtree(b)


def _record(path: Path, steps: range, elements: int, factor: float = 1.0) -> Path:
    """A trace; the last event of its last step may be multiplied by a factor."""
    base = np.random.default_rng(0).normal(size=elements).astype(np.float32)
    with TraceWriter(path, Run(stack="pytorch")) as writer:
        for step in steps:
            for order in range(EVENTS):
                value: NDArray[np.float32] = base + np.float32(step + order / EVENTS)
                if step == steps[-1] and order == EVENTS - 1:
                    value = value * np.float32(factor)
                event = Event(
                    site=Site(step, "forward", f"layer.{order}"),
                    order=order,
                    dtype="float32",
                    shape=value.shape,
                    digest=digest(value),
                    fingerprint=fingerprint(value[:1024]),
                    inputs=(order - 1,) if order else (),
                )
                writer.add(event, value)
            writer.commit_step()
    return path


def _with_a_fault(a: Path, b: Path, place: int, elements: int) -> Path:
    """A second trace, whose segments are those of the first but for one."""
    shutil.copytree(a, b, copy_function=os.link)
    part = _record(b.with_name("part.zarr"), range(place, place + 1), elements, factor=1.5)
    segment = Path("segments") / "0" / f"{place:08d}.zip"
    (b / segment).unlink()
    (part / segment).rename(b / segment)
    shutil.rmtree(b / "index")
    with Trace(a) as first, Trace(b) as second:
        prefix = first.prefix(place - 1)
        for step in second.steps:
            index = second.index(step) if step == place else first.index(step)
            if step >= place:
                prefix = prefix.then(index)
                index = replace(index, prefix=prefix)
            write_index(b, 0, index)
    shutil.rmtree(part)
    return b


if __name__ == "__main__":
    main()
