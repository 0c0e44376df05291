"""`python -m benchmarks.throughput`: bytes a second of what is done with every tensor.

Writing (past the page cache, as long files are), reading back with verification (from the disk, and
again from the page cache), comparing and summarising, with the C kernels and with NumPy in turns,
beside what the memory gives. Processor time and the clock, the best of the rounds each: on a busy
machine the clock says little.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tracediff import kernels
from tracediff.compare import max_ulp, measure
from tracediff.events import Run
from tracediff.testing import build_event
from tracediff.trace import Trace, TraceWriter, verify
from tracediff.trace.summary import SKETCH_SIZE, digest, fingerprint, sketch, summary

Array = NDArray[Any]
BUCKETS = np.empty(SKETCH_SIZE)
Best = dict[tuple[str, str], tuple[float, float]]
"""Name and engine -> GB a second of processor time, and by the clock."""


class Meter:
    """Keeps the best of all rounds."""

    def __init__(self) -> None:
        self.best: Best = {}

    @contextmanager
    def measuring(self, name: str, count: int, engine: str = "") -> Iterator[None]:
        """Measures what runs inside, which handles `count` bytes."""
        processor, clock = time.process_time(), time.perf_counter()
        yield
        found = (time.process_time() - processor, time.perf_counter() - clock)
        before = self.best.get((name, engine), (0.0, 0.0))
        by_processor, by_clock = (
            max(old, count / max(seconds, 1e-9) / 1e9)
            for old, seconds in zip(before, found, strict=True)
        )
        self.best[name, engine] = by_processor, by_clock


def limits(meter: Meter, tensors: list[Array], folder: Path) -> None:
    """What the memory and the page cache give, without anything of ours."""
    total = sum(tensor.nbytes for tensor in tensors)
    copy = np.empty_like(tensors[0])
    with meter.measuring("memory: read", total):
        for tensor in tensors:
            tensor.view(np.int64).max()
    with meter.measuring("memory: copy", total):
        for tensor in tensors:
            np.copyto(copy, tensor)
    with meter.measuring("page cache: write", total), (folder / "plain").open("wb", 0) as file:
        for tensor in tensors:
            os.writev(file.fileno(), [tensor.data])
    (folder / "plain").unlink()


def trace(meter: Meter, tensors: list[Array], folder: Path, engine: str) -> None:
    """Through a trace: digest, checksum and write; then map, check and read."""
    total = sum(tensor.nbytes for tensor in tensors)
    path = folder / f"{engine}.zarr"
    events = [
        replace(build_event(f"0/forward/m{place}#0:out", tensor, place), digest=b"")
        for place, tensor in enumerate(tensors)
    ]
    writer = TraceWriter(path, Run(stack="benchmark"), overwrite=True)
    with meter.measuring("write", total, engine):
        for event, tensor in zip(events, tensors, strict=True):
            writer.add(event, tensor)
    writer.finish()
    for place in ("the disk", "the page cache"):
        with Trace(path) as reader:
            recorded = reader.events(0)
            with meter.measuring(f"read back from {place}, verified", total, engine):
                for event in recorded:
                    reader.array(event)
    with meter.measuring("`tracediff verify`", total, engine):
        assert verify(path).sound


def values(meter: Meter, tensors: list[Array], engine: str) -> None:
    """Error figures and summaries."""
    total = sum(tensor.nbytes for tensor in tensors)
    factor = np.float32(1 + ml_dtypes.finfo(tensors[0].dtype).eps)
    others = [(tensor * factor).astype(tensor.dtype) for tensor in tensors[:2]]
    name = str(tensors[0].dtype)
    pair = sum(other.nbytes for other in others) * 2
    with meter.measuring(f"compare, {name}: errors", pair, engine):
        for a, b in zip(tensors, others, strict=False):
            assert measure(a, b).error.differing
    with meter.measuring(f"compare, {name}: ulp", pair, engine):
        for a, b in zip(tensors, others, strict=False):
            assert max_ulp(a, b)
    functions: dict[str, Callable[[Array], object]] = {
        "digest": digest,
        "fingerprint": fingerprint,
        "sketch": sketch,
        "all three in one pass": lambda tensor: summary(tensor, brief=True, buckets=BUCKETS),
    }
    for what, function in functions.items():
        with meter.measuring(f"{what}, {name}", total, engine):
            for tensor in tensors:
                function(tensor)


def small(meter: Meter, engine: str) -> None:
    """Tensors of a tiny model: 16,000 elements."""
    a = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    b = a * np.float32(1 + 2**-20)
    functions: dict[str, tuple[int, Callable[[], object]]] = {
        "digest": (1, lambda: digest(a)),
        "fingerprint, brief": (1, lambda: fingerprint(a, brief=True)),
        "fingerprint, full": (1, lambda: fingerprint(a)),
        "sketch": (1, lambda: sketch(a)),
        "all three in one pass": (1, lambda: summary(a, brief=True, buckets=BUCKETS)),
        "compare": (2, lambda: measure(a, b)),
    }
    for what, (sides, function) in functions.items():
        with meter.measuring(f"{what}, 16,000 float32", 100 * sides * a.nbytes, engine):
            for _ in range(100):
                function()


def table(best: Best) -> str:
    """GB a second as a Markdown table: processor time, with the clock in brackets."""
    names = list(dict.fromkeys(name for name, _ in best))
    lines = ["| | NumPy | C | times |", "|---|---|---|---|"]
    for name in names:
        if (name, "") in best:
            lines.append(f"| {name} | | {_rates(best[name, ''])} | |")
            continue
        before, after = best[name, "numpy"], best.get((name, "native"), (0.0, 0.0))
        ratio = f"{after[0] / before[0]:.1f}"
        lines.append(f"| {name} | {_rates(before)} | {_rates(after)} | {ratio} |")
    return "\n".join(lines)


def _rates(rates: tuple[float, float]) -> str:
    return f"{rates[0]:.2f} ({rates[1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=16, help="size of a tensor")
    parser.add_argument("--tensors", type=int, default=8, help="number of tensors")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--folder", help="where traces are written (default: a temporary folder)")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    count = given.megabytes * 250_000
    tensors = [rng.standard_normal(count, np.float32) for _ in range(given.tensors)]
    short = [tensor.astype(ml_dtypes.bfloat16) for tensor in tensors]
    meter = Meter()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        for _ in range(given.rounds):
            for engine in ("numpy", "native"):
                limits(meter, tensors, Path(name))
                with kernels.using(engine):
                    trace(meter, tensors, Path(name), engine)
                    values(meter, tensors, engine)
                    values(meter, short, engine)
                    small(meter, engine)
    print(f"GB per second of processor time (by the clock), {os.cpu_count()} processors")
    print(f"{given.tensors} tensors of {given.megabytes} MB, best of {given.rounds} rounds\n")
    print(table(meter.best))


if __name__ == "__main__":
    main()
