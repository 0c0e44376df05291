"""Bisection of long traces that differ in one event: bytes read, time and memory.

    python -m benchmarks.long_traces [--gigabytes 10] [--folder DIR] [--plot docs/long-runs.svg]

Prints the tables of docs/long-runs.md. The second trace of a pair shares the segments of the first
by hard links, all but one. Times are those of the processor, of the least of three runs.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
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
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the largest trace")
    parser.add_argument("--folder", type=Path, default=None, help="where to write them")
    parser.add_argument("--plot", type=Path, default=None, help="write the time as an SVG file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print("| steps | size of a trace | bytes read | of both | bisect |")
        print("|---:|---:|---:|---:|---:|", flush=True)
        points = [(steps, _row(Path(folder), steps, elements=64)) for steps in STEPS]
        if options.plot is not None:
            options.plot.write_text(plot(points), encoding="utf-8")
        print("\n| size of a trace | steps | write | open | read | bytes read | of both | bisect |")
        print("|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
        size = 1e6
        while size <= options.gigabytes * 1e9:
            steps = min(1_000, max(10, int(size / 1e6)))
            _sized(Path(folder), steps, int(size) // (4 * EVENTS * steps))
            size *= 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"\npeak memory of this process, which wrote them too: {peak / 1024:.0f} MiB")


def _row(folder: Path, steps: int, elements: int) -> float:
    place = steps * 7 // 10
    a = _record(folder / "a.zarr", range(steps), elements)
    b = _with_a_fault(a, folder / "b.zarr", place, elements)
    seconds, read, stored = _bisected(a, b, place)
    print(
        f"| {steps:,} | {stored / 2e6:,.1f} MB | {read / 1e3:,.0f} KB | {read / stored:.4%} "
        f"| {1e3 * seconds:.0f} ms |",
        flush=True,
    )
    shutil.rmtree(a)
    shutil.rmtree(b)
    return seconds


def _sized(folder: Path, steps: int, elements: int) -> None:
    started = time.process_time()
    a = _record(folder / "a.zarr", range(steps), elements)
    written = time.process_time()
    with Trace(a) as trace:
        opened = time.process_time()
        first = trace.events(0)
        total = sum(float(trace.array(event).sum(dtype=np.float64)) for event in first)
        one_read = time.process_time()
        assert np.isfinite(total)
    place = steps * 7 // 10
    b = _with_a_fault(a, folder / "b.zarr", place, elements)
    seconds, read, stored = _bisected(a, b, place)
    print(
        f"| {stored / 2e6:,.1f} MB | {steps:,} | {written - started:.2f} s "
        f"| {1e3 * (opened - written):.0f} ms | {1e3 * (one_read - opened):.0f} ms "
        f"| {read / 1e3:,.0f} KB | {read / stored:.4%} | {1e3 * seconds:.0f} ms |",
        flush=True,
    )
    shutil.rmtree(a)
    shutil.rmtree(b)


def _bisected(a: Path, b: Path, place: int) -> tuple[float, int, int]:
    """Processor seconds, bytes read and bytes stored; checks that the place is found."""
    least = float("inf")
    for _ in range(3):
        started = time.process_time()
        verdict = bisect(a, b)
        least = min(least, time.process_time() - started)
        assert verdict.first is not None
        assert verdict.first.site == f"{place}/forward/layer.{EVENTS - 1}#0:out"
    return least, verdict.cost.bytes_read, verdict.cost.bytes_stored


def plot(points: Sequence[tuple[int, float]]) -> str:
    """An SVG of seconds against the number of steps, on a logarithmic axis: a straight line is
    a logarithm."""
    width, height, left, bottom = 480, 280, 60, 40
    decades = math.log10(points[-1][0])
    top = max(seconds for _, seconds in points) * 1.1

    def x(steps: float) -> float:
        return left + (width - left - 20) * math.log10(steps) / decades

    def y(seconds: float) -> float:
        return height - bottom - (height - bottom - 20) * seconds / top

    line = " ".join(f"{x(steps):.1f},{y(seconds):.1f}" for steps, seconds in points)
    marks = "".join(
        f'<circle cx="{x(steps):.1f}" cy="{y(seconds):.1f}" r="3"/>'
        f'<text x="{x(steps):.1f}" y="{y(seconds) - 8:.1f}" text-anchor="middle">'
        f"{1e3 * seconds:.0f} ms</text>"
        f'<text x="{x(steps):.1f}" y="{height - bottom + 18}" text-anchor="middle">{steps:,}</text>'
        for steps, seconds in points
    )
    axes = f"M{left},20 V{height - bottom} H{width - 10}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        f'<path d="{axes}" fill="none" stroke="black"/>\n'
        f'<polyline points="{line}" fill="none" stroke="black" stroke-dasharray="4 3"/>\n'
        f"{marks}\n"
        f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">steps of each run</text>\n'
        f'<text x="12" y="16">bisect, processor time</text>\n</svg>\n'
    )


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
