"""`python -m benchmarks.fuzz`: mutated traces through the reader and all reports.

People bisect traces that they were sent. Whatever such a trace holds, the reader has to answer
with a verdict or with one sentence: no traceback, no hang, no flood of memory, no file touched
outside, and nothing that acts on the terminal or in the browser.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from tracediff.bisection import bisect, diff
from tracediff.errors import TracediffError
from tracediff.report.html import to_html
from tracediff.report.json import dumps, to_json
from tracediff.report.terminal import render
from tracediff.testing import build_trace
from tracediff.trace import Trace, verify
from tracediff.trace.archive import Archive, ArchiveWriter
from tracediff.trace.columns import COLUMNS, STRING_COLUMNS, decode_strings, encode_strings

SECONDS: Final = 5.0
MEGABYTES: Final = 1024

MARK: Final = "\x1b]0;taken\x07"
"""Sets a terminal's title. It must never reach one from a trace."""

_NASTY: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1 << 31, 1 << 63, 10**400, 1e308, float("nan"), float("inf"), "", "0",
    "../../../../../tmp/escaped", "/etc/passwd", "a/../b", "c:\\x", "x" * 100_000, "\0", "\ud800",
    f"{MARK}<script>alert(1)</script>[red]x[/red][link=http://x]", "‮evil", "float32", "uint64",
    "bfloat16", "tensor", "text", "setting", "labels", "mask", "state", "forward", "rendering",
    "optimizer", "root", "batch.input_ids", "sample[0].ids", "sample[999999999].text", [], {},
    [0], [-1], [1 << 62, 4], [10**12] * 8, [[[[]]]], {"a": {"a": {}}}, ["x"] * 1000,
    {"num_heads": -1, "eps": "x", "base": 0}, {"touched": 7, "level": "op", "leaf": 1},
)  # fmt: skip


def seed_traces(folder: Path) -> tuple[Path, Path]:
    """Two small traces of every stage that differ in one activation."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 4, 8), dtype=np.float32)
    w = rng.standard_normal((8, 8), dtype=np.float32)
    ids = np.arange(8, dtype=np.int64).reshape(2, 4)

    def operations(fault: float) -> list[tuple[str, Any]]:
        """Step 2: `x @ w.T * 2`, with its gradients, operation by operation."""
        y = x @ w.T

        def of(canonical: str, *inputs: int, **more: Any) -> dict[str, Any]:
            attributes = {"level": "op", "canonical": canonical, "args": {"alpha": 1}, **more}
            return {"op": f"aten.{canonical}", "source": "model.py:3", "inputs": inputs} | {
                "attributes": attributes
            }

        leaf = of("leaf", leaf=True, name="fc.weight")
        return [
            ("2/forward/fc@leaf#0:out", (x, leaf)),
            ("2/forward/fc@leaf#1:out", (w, leaf)),
            ("2/forward/fc@transpose#0:out", (w.T.copy(), of("transpose", 1, view_of=1))),
            ("2/forward/fc@matmul#0:out", (y, of("matmul", 0, 2))),
            ("2/forward/fc@mul#0:out", (y * 2 + fault, of("mul", 3, operands=[None, 2.0]))),
            ("2/backward/fc@mul#0:out", (y * 0.2, of("mul", 4, forward_order=4))),
        ]

    def values(fault: float) -> list[tuple[str, Any]]:
        linear = {"op": "Linear", "attributes": {"settings": {"bias": False}}}
        return [
            ("0/environment/config.rope_theta", 1e4),
            ("0/environment/version.numpy", "2"),
            ("0/rendering/sample[0].messages", [{"role": "user", "content": "hi"}]),
            ("0/rendering/sample[0].text", "<|user|>\nhi\n"),
            ("0/rendering/sample[0].ids", (ids[0], {"kind": "ids"})),
            ("0/rendering/batch.input_ids", (ids, {"kind": "ids"})),
            ("0/rendering/batch.attention_mask", (np.ones((2, 4), np.int64), {"kind": "mask"})),
            ("0/loading/fc.weight:param", w),
            ("0/rng/python:state", (np.arange(5, dtype=np.uint32), {"kind": "state"})),
            ("0/forward/fc#0:in", (x, linear)),
            ("0/forward/fc#0:out", (x @ w.T + fault, {**linear, "inputs": (9,)})),
            ("0/forward/norm#0:out", (x + fault, {"op": "LlamaRMSNorm", "inputs": (10,)})),
            ("0/loss/loss#0", 2.5 + fault),
            ("0/backward/fc#0:grad_out", (x * 0.1, {"inputs": (12,)})),
            ("0/backward/fc.weight#0:grad", (w * 0.1, {"inputs": (13,)})),
            ("0/optimizer/fc.weight:state.exp_avg", w * 0.01),
            ("0/optimizer/fc.weight:hyper", {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}),
            ("0/optimizer/fc.weight:param", w * 0.99),
            ("0/trajectory/loss#0", 2.5 + fault),
            ("1/forward/fc#0:in", (x, linear)),
            ("1/forward/fc#0:out", (x @ w.T, linear)),
            ("1/trajectory/loss#0", 2.25),
            *operations(fault),
        ]

    clean = build_trace(folder / "clean.zarr", values(0.0))
    return clean, build_trace(folder / "faulty.zarr", values(0.5), stack="mlx")


class Mutator:
    """Makes one mutant of a trace, told by its number alone."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._files = sorted(p.relative_to(source) for p in source.rglob("*") if p.is_file())

    def make(self, number: int, target: Path) -> str:
        """Writes mutant `number` to `target`; returns what was done, in words."""
        rng = random.Random(number)
        shutil.copytree(self._source, target)
        done = []
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            file = target / rng.choice(self._files)
            try:
                done.append(f"{file.name}: {self._mutate(file, rng)}")
            except (TracediffError, ValueError, KeyError, OSError, IndexError) as error:
                done.append(f"{file.name}: no second mutation, {type(error).__name__}")
        return "; ".join(done)

    def _mutate(self, file: Path, rng: random.Random) -> str:
        if rng.random() < 0.25:
            return _bytes(file, rng)
        if file.suffix == ".zip":
            return _segment(file, rng)
        file.write_text(json.dumps(_nested(json.loads(file.read_text()), rng)), "utf-8", "replace")
        return "a value of its JSON"


def _bytes(file: Path, rng: random.Random) -> str:
    """Damage that knows nothing of the format."""
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data) + 1)
    length = rng.choice((1, 1, 4, 64, 1024))
    what = rng.choice(("flip", "cut", "delete", "insert", "repeat", "empty", "gone", "folder"))
    if what == "flip":
        for i in range(at, min(at + length, len(data))):
            data[i] ^= 1 << rng.randrange(8)
    elif what == "cut":
        del data[at:]
    elif what == "delete":
        del data[at : at + length]
    elif what == "insert":
        data[at:at] = rng.randbytes(length)
    elif what == "repeat":
        data[at:at] = data[at : at + length]
    elif what == "empty":
        data.clear()
    elif what in ("gone", "folder"):
        file.unlink()
        if what == "folder":
            file.mkdir()
        return what
    file.write_bytes(data)
    return f"{what} {length} bytes at {at}"


def _segment(file: Path, rng: random.Random) -> str:
    """A well-formed archive with right checksums whose content is wrong."""
    archive = Archive(file)
    entries = {name: archive.read(name) for name in archive.entries}
    kinds: Mapping[str, Callable[[dict[str, bytes], random.Random], str]] = {
        "metadata": _metadata,
        "strings": _strings,
        "numbers": _numbers,
        "entries": _entries,
    }
    what = kinds[rng.choice(("metadata", "strings", "strings", "numbers", "entries"))](entries, rng)
    file.unlink()
    writer = ArchiveWriter(file)
    for name, data in entries.items():
        writer.add(name, data)
    writer.close()
    return what


def _metadata(entries: dict[str, bytes], rng: random.Random) -> str:
    name = rng.choice([name for name in entries if name.endswith("zarr.json")])
    document = _nested(json.loads(entries[name]), rng)
    entries[name] = json.dumps(document).encode("ascii")
    return f"a value in {name}"


def _strings(entries: dict[str, bytes], rng: random.Random) -> str:
    name = rng.choice(STRING_COLUMNS)
    key = f"events/{name}/c/0"
    data = entries[key]
    rows = decode_strings(data, int.from_bytes(data[:4], "little"))
    at = rng.randrange(len(rows))
    text = rows[at]
    if text[:1] in ("[", "{") and rng.random() < 0.5:
        rows[at] = json.dumps(_nested(json.loads(text), rng))
    elif rng.random() < 0.1:
        rows[at] = "[" * 100_000
    else:
        value = rng.choice(_NASTY)
        rows[at] = value if isinstance(value, str) else json.dumps(value)
    if rng.random() < 0.2:
        rows[at] = rng.choice(rows)
    rows[at] = rows[at].encode("utf-8", "replace").decode()
    entries[key] = encode_strings(rows)
    return f"row {at} of column {name}"


def _numbers(entries: dict[str, bytes], rng: random.Random) -> str:
    name = rng.choice([name for name in COLUMNS if name not in STRING_COLUMNS])
    names = [key for key in entries if key.startswith((f"events/{name}/c", "tensors/"))]
    key = rng.choice([key for key in names if "/c" in key])
    data = bytearray(entries[key])
    if not data:
        return "nothing"
    width = rng.choice((1, 4, 8))
    at = rng.randrange(0, len(data), width)
    patterns = (b"\0" * 8, b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\0\0\0\0\0\0\xf8\x7f")
    data[at : at + width] = (rng.choice(patterns) if rng.random() < 0.7 else rng.randbytes(8))[
        :width
    ]
    entries[key] = bytes(data)
    return f"a number of {key}"


def _entries(entries: dict[str, bytes], rng: random.Random) -> str:
    name = rng.choice(list(entries))
    what = rng.choice(("drop", "swap", "shorten", "lengthen", "rename", "add"))
    if what == "drop":
        del entries[name]
    elif what == "swap":
        other = rng.choice(list(entries))
        entries[name], entries[other] = entries[other], entries[name]
    elif what == "shorten":
        entries[name] = entries[name][: rng.randrange(len(entries[name]) + 1)]
    elif what == "lengthen":
        entries[name] += rng.randbytes(rng.choice((1, 8, 4096)))
    elif what == "rename":
        entries[rng.choice(("../../escaped", "/tmp/escaped", "x", "events"))] = entries.pop(name)
    else:
        entries["../" * 6 + "tmp/escaped"] = b"x"
    return f"{what} {name}"


def _nested(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """The value with one place in it replaced, somewhere at random."""
    if isinstance(value, dict) and value and (depth < 1 or rng.random() < 0.85):
        key = rng.choice(list(value))
        if rng.random() < 0.08:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _nested(value[key], rng, depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], _nested(value[at], rng, depth + 1), *value[at + 1 :]]
    return rng.choice(_NASTY)


def examine(baseline: Path, target: Path, thorough: bool) -> str:
    """Reads a pair of traces as users do; says how it ended.

    Args:
        thorough: Also lists every site, and verifies the target.

    Raises:
        AssertionError: Something in the trace would act on a terminal or in a browser.
    """
    ended = []
    for read in (_verdict, _sites, _verified)[: 3 if thorough else 1]:
        try:
            ended.append(read(baseline, target))
        except TracediffError as error:
            text = str(error)
            assert text, "an error without a word"
            ended.append(type(error).__name__)
    return ", ".join(ended)


def _verdict(baseline: Path, target: Path) -> str:
    verdict = bisect(baseline, target)
    terminal = io.StringIO()
    Console(file=terminal, force_terminal=False, width=100).print(render(verdict))
    text, page = terminal.getvalue(), to_html(verdict)
    assert "\x1b" not in text, "a control sequence reached the terminal"
    assert "\x07" not in text + page, "a bell reached a report"
    assert "<script>alert" not in page, "markup reached the page"
    json.loads(dumps(to_json(verdict)))
    return verdict.outcome


def _sites(baseline: Path, target: Path) -> str:
    return f"{len(diff(baseline, target))} rows"


def _verified(_: Path, target: Path) -> str:
    found = verify(target)
    with Trace(target) as trace:
        Console(file=io.StringIO(), width=100).print(trace.summary())
    return "sound" if found.sound else "damaged"


def fuzz(count: int, start: int = 0, progress: bool = False) -> tuple[Counter[str], list[str]]:
    """Runs `count` mutants.

    Returns:
        How they ended, and a description of each that broke a promise.
    """
    endings: Counter[str] = Counter()
    broken: list[str] = []
    before = _peak()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        clean, faulty = seed_traces(root)
        mutator, mutant = Mutator(faulty), root / "inner" / "mutant.zarr"
        mutant.parent.mkdir()
        for number in range(start, start + count):
            what = mutator.make(number, mutant)
            pair = (clean, mutant) if number % 2 else (mutant, clean)
            began = time.process_time()  # a busy machine is no hang
            try:
                endings[examine(*pair, thorough=number % 4 == 0)] += 1
            except Exception:
                broken.append(f"mutant {number} ({what}):\n{traceback.format_exc()}")
            seconds = time.process_time() - began
            if seconds > SECONDS:
                broken.append(f"mutant {number} ({what}): took {seconds:.1f} s")
            shutil.rmtree(mutant)
            strays = sorted(p.name for p in (*root.iterdir(), *mutant.parent.iterdir()))
            if strays != ["clean.zarr", "faulty.zarr", "inner"]:
                broken.append(f"mutant {number} ({what}): touched {strays}")
            if progress and number % 1000 == 999:
                print(f"{number + 1 - start} of {count}", file=sys.stderr)
    if (grown := _peak() - before) > MEGABYTES:
        broken.append(f"the process grew by {grown:.0f} MB")
    return endings, broken


def _peak() -> float:
    """Most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="mutants to try")
    parser.add_argument("--start", type=int, default=0, help="number of the first one")
    given = parser.parse_args()
    began = time.perf_counter()
    endings, broken = fuzz(given.count, given.start, progress=True)
    for line in broken:
        print(line)
    for ending, times in endings.most_common(12):
        print(f"{times:8,d}  {ending}")
    megabytes = _peak()
    seconds = time.perf_counter() - began
    print(f"{given.count:,} mutants in {seconds:.0f} s, {megabytes:.0f} MB; {len(broken)} broken")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
