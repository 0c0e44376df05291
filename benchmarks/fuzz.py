"""`python -m benchmarks.fuzz`: mutated traces through the reader and all reports.

People bisect traces that they were sent. Whatever such a trace holds, the reader has to answer
with a verdict or with one sentence: no traceback, no hang, no flood of memory, no file touched
outside, and nothing that acts on the terminal or in the browser.

Mutants are made and read in processes forked from one that has everything imported, thousands in
each. What the reader makes of a mutant is compared unless it was met before, and reported unless
only numbers in the verdict are new.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import xxhash
from rich.console import Console, RenderableType

from benchmarks.fuzz_mutations import Mutator
from benchmarks.fuzz_seeds import Seed, make_seeds
from tracediff.bisection import bisect, diff
from tracediff.errors import TracediffError
from tracediff.report.html import to_html
from tracediff.report.inspection import inspect_trace
from tracediff.report.json import dumps, to_json
from tracediff.report.tables import repaired, sites, verification
from tracediff.report.terminal import render
from tracediff.trace import Trace, repair, verify
from tracediff.trace.snapshot import read_snapshot, snapshot_files
from tracediff.trace.summary import digest

SECONDS: Final = 5.0
"""Of processor time: a busy machine is no hang."""

SILENCE: Final = 600.0
"""Seconds without a word from a process, after which it is taken to wait for ever."""

MEGABYTES: Final = 1024
BATCH: Final = 2000

_ACTING: Final = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")
_NUMBER: Final = re.compile(r"[0-9.]+(e[+-]?[0-9]+)?")
_VERDICT_ONLY: Final = ("baseline", "target", "cost")

Tell = Callable[[tuple[str, int, str]], Any]
"""Called with what happened (`made`, `ended` or `broken`), the mutant's number, and words."""


class Hang(BaseException):
    """A mutant took too long. Not an Exception: nothing may catch it."""


class Examiner:
    """Reads mutants as users do."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: set[str] = set()
        self._clean: dict[str, Trace] = {}

    def examine(self, seed: Seed, mutant: Path, number: int) -> str:
        """Says how it ended.

        Raises:
            AssertionError: Something in the trace would act on a terminal or in a browser.
        """
        clean = self._clean.setdefault(seed.name, Trace(seed.clean))
        reads = [lambda: self._compared(clean, mutant, reverse=number % 2 == 1)]
        if seed.name == "snapshots":
            reads.append(lambda: self._snapshots(mutant))
        if number % 16 == 0:
            reads += [lambda: self._verified(mutant), lambda: self._sites(clean, mutant)]
        if number % 32 == 0:
            reads += [lambda: self._shown(mutant), lambda: self._repaired(mutant)]
        ended = []
        for read in reads:
            try:
                ended.append(read())
            except TracediffError as error:
                ended.append(type(error).__name__ if str(error) else "an error without a word")
        return ", ".join(ended)

    def _compared(self, clean: Trace, mutant: Path, *, reverse: bool) -> str:
        """Bisects, unless a mutant was met before of which a reader sees the same."""
        with Trace(mutant) as trace:
            content = _content(trace)
            if f"{content}{reverse}" in self._seen:
                return "as before"
            self._seen.add(f"{content}{reverse}")
            pair = (clean, trace) if reverse else (trace, clean)
            return self._verdict(*pair)

    def _verdict(self, baseline: Trace, target: Trace) -> str:
        verdict = bisect(baseline, target)
        document = to_json(verdict)
        json.loads(dumps(document))
        told = dumps({k: v for k, v in document.items() if k not in _VERDICT_ONLY})
        told = _NUMBER.sub("0", told)
        if told not in self._seen:
            self._seen.add(told)
            self._print(render(verdict))
            page = to_html(verdict)
            assert "<script>alert" not in page, "markup reached the page"
            assert not _acting(page), f"{_acting(page)} reached the page"
        return verdict.outcome

    def _sites(self, baseline: Trace, target: Path) -> str:
        rows = diff(baseline, target)
        self._print(sites(rows[:5]))
        return f"{min(len(rows), 1)} rows"

    def _verified(self, target: Path) -> str:
        found = verify(target)
        self._print(verification(str(target), found))
        return "sound" if found.sound else "damaged"

    def _snapshots(self, target: Path) -> str:
        for step in snapshot_files(target):
            read_snapshot(target, step)
        return "snapshot"

    def _shown(self, target: Path) -> str:
        with Trace(target) as trace:
            view = inspect_trace(trace)
            self._print(view)
            dumps(view.as_json())
        return "shown"

    def _repaired(self, target: Path) -> str:
        new = self._root / "new.zarr"
        try:
            result = repair(target, new)
            self._print(repaired(str(target), result))
            assert verify(new).sound, "a repaired trace is damaged"
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return "whole" if result.whole else "in part"

    def _print(self, report: RenderableType) -> None:
        terminal = io.StringIO()
        Console(file=terminal, force_terminal=False, width=100).print(report)
        found = _acting(terminal.getvalue())
        assert not found, f"{found} reached the terminal"


def _content(trace: Trace) -> str:
    """A hash of all that a reader sees of a trace.

    Raises:
        TracediffError: The events of its only step cannot be read.
    """
    seen = xxhash.xxh3_128(repr(trace.run).encode("utf-8", "backslashreplace"))
    for step in trace.steps:
        try:
            events = trace.events(step)
            seen.update(repr((step, events, trace.index(step))).encode("utf-8", "backslashreplace"))
        except TracediffError as error:
            if len(trace.steps) == 1:
                raise
            seen.update(str(error).encode("utf-8", "backslashreplace"))
            continue
        for event in (event for event in events if event.payload is not None):
            try:
                seen.update(digest(trace.array(event)))
            except TracediffError as error:
                seen.update(str(error).encode("utf-8", "backslashreplace"))
    return seen.hexdigest()


def _acting(text: str) -> str:
    """Characters in a report that do something to a terminal, instead of standing in it."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return ""
    acting = {c for c in text if c in _ACTING or (unicodedata.category(c) == "Cc" and c != "\n")}
    return repr("".join(sorted(acting))) if acting else ""


def read_mutants(seeds: list[Seed], numbers: range, root: Path, tell: Tell) -> None:
    """Makes and reads the mutants of these numbers, one after the other."""
    mutators = [Mutator(seed.faulty) for seed in seeds]
    examiner = Examiner(root)
    mutant = root / "inner" / "mutant.zarr"
    mutant.parent.mkdir(parents=True)
    expected = _names(root)
    for number in numbers:
        place = number % len(seeds)
        tell(("begun", number, seeds[place].name))
        what = f"{seeds[place].name}, {mutators[place].make(number, mutant)}"
        tell(("made", number, what))
        try:
            with _limit(SECONDS):
                ended = examiner.examine(seeds[place], mutant, number)
        except Hang:
            tell(("broken", number, f"({what}) took more than {SECONDS} s"))
        except Exception:
            tell(("broken", number, f"({what}):\n{traceback.format_exc()}"))
        else:
            tell(("ended", number, ended))
        shutil.rmtree(mutant)
        if (_names(mutant.parent), _names(root)) != ([], expected):
            tell(("broken", number, f"({what}) left {_names(root)}"))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises Hang once the block has used that much processor time."""

    def hang(signum: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, hang)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _child(seeds: list[Seed], numbers: range, root: Path, pipe: Connection) -> None:
    """A forked process: of limited memory, and watched for what it touches outside of `root`."""
    own = os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (own + (MEGABYTES << 20),) * 2)
    inside = str(root.parent)
    outside: list[str] = []

    def watch(event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = given
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and isinstance(path, str | bytes) and not str(path).startswith(inside):
                outside.append(f"wrote {path!r}")
        elif event in ("os.remove", "os.rename", "os.mkdir", "shutil.rmtree"):
            if str(given[0]).startswith("/") and not str(given[0]).startswith(inside):
                outside.append(f"{event} {given[0]!r}")
        elif event in ("subprocess.Popen", "os.system", "socket.connect", "os.exec"):
            outside.append(event)

    sys.addaudithook(watch)

    def tell(message: tuple[str, int, str]) -> None:
        pipe.send(message)
        while outside:
            pipe.send(("broken", message[1], outside.pop()))

    read_mutants(seeds, numbers, root, tell)
    pipe.send(("done", numbers.stop, ""))


def fuzz(
    count: int,
    start: int = 0,
    folder: Path | None = None,
    *,
    forked: bool = True,
    progress: Callable[[int, Counter[str], list[str]], None] = lambda *_: None,
) -> tuple[Counter[str], list[str]]:
    """Runs `count` mutants.

    Args:
        folder: Where to keep traces meanwhile; memory is faster than a disk.
        forked: In processes of their own, with their memory limited.
        progress: Called after each process with how many mutants are done, and the results so far.

    Returns:
        How they ended, and a description of each that broke a promise.
    """
    endings: Counter[str] = Counter()
    broken: list[str] = []
    last = [start - 1, ""]

    def tell(message: tuple[str, int, str]) -> None:
        what, number, words = message
        if what == "ended":
            endings[words] += 1
        elif what == "broken":
            broken.append(f"mutant {number} {words}")
        last[:] = number, words

    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        seeds = make_seeds(Path(temporary))
        stop = start + count
        if not forked:
            read_mutants(seeds, range(start, stop), Path(temporary) / "run", tell)
        while forked and start < stop:
            numbers = range(start, min(start + BATCH, stop))
            why = _run(seeds, numbers, Path(temporary) / "run", tell)
            if why:
                broken.append(f"mutant {last[0]} ({last[1]}): the process {why}")
            start = numbers.stop if not why else int(last[0]) + 1
            progress(start - stop + count, endings, broken)
    return endings, broken


def _run(seeds: list[Seed], numbers: range, root: Path, tell: Tell) -> str:
    """Reads mutants in a forked process; says why it ended, if it was not done."""
    shutil.rmtree(root, ignore_errors=True)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(seeds, numbers, root, theirs))
    process.start()
    theirs.close()
    why = ""
    while not why:
        try:
            message = ours.recv() if ours.poll(SILENCE) else None
        except EOFError:
            process.join()
            return f"died ({process.exitcode})"
        if message is None:
            why = f"said nothing for {SILENCE} s"
        elif message[0] == "done":
            break
        else:
            tell(message)
    process.kill()
    process.join()
    return why


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="mutants to try")
    parser.add_argument("--start", type=int, default=0, help="number of the first one")
    parser.add_argument("--folder", type=Path, help="where to keep them, such as /dev/shm")
    given = parser.parse_args()
    told = 0

    def progress(done: int, endings: Counter[str], broken: list[str]) -> None:
        nonlocal told
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        each = 1000 * (used.ru_utime + used.ru_stime) / done
        print("\n".join(broken[told:]))
        told = len(broken)
        print(f"{done:,} mutants, {each:.1f} ms each; {told} broken", flush=True)

    endings, broken = fuzz(given.count, given.start, given.folder, progress=progress)
    for ending, times in endings.most_common(12):
        print(f"{times:8,d}  {ending}")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
