"""`python -m benchmarks.kills`: a recording process is killed at random moments, again and again.

After each SIGKILL every step that the process had reported as committed must read back verified,
with the values that belong to it, no other step may be visible than the one after it, and the
latest snapshots are there: in a folder, and on an S3 server; written at once, and by the thread of
a buffer that is too small, where the script waits or payloads are dropped. A payload may be missing
only where its event says that it was dropped. As a control, a plain directory of arrays with a
growing step axis is written and killed the same way.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final
from unittest import mock

import numpy as np
import obstore

from tracediff.events import Event, Run
from tracediff.testing import build_event
from tracediff.trace import BufferedWriter, Trace, TraceWriter, create_trace, verify
from tracediff.trace.remote import Prefix
from tracediff.trace.summary import digest

TENSORS: Final = 40
SHAPE: Final = (64, 64)
LONG: Final = (1024, 2560)
"""Of one tensor in every fourth step, whose file is written past the page cache."""
SNAPSHOT_EVERY: Final = 3
BUFFER: Final = 1 << 20
"""Bytes: less than two steps."""

_CHILD: Final = """
import sys
from benchmarks.kills import {writer}
{writer}(sys.argv[1])
"""


def value_of(step: int, tensor: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """What tensor number `tensor` holds at a step: never zero."""
    shape = LONG if tensor == 7 and step % 4 == 2 else SHAPE
    return np.random.default_rng((step, tensor)).standard_normal(shape, dtype=np.float32)


def write_trace(path: str) -> None:
    """Records until it is killed, and prints each step once it is committed."""
    writer = create_trace(path, Run(stack="pytorch"))
    for step in range(1_000_000):
        _write_step(writer, step)
        print(step, flush=True)


def write_waiting(path: str) -> None:
    """The same beside the script, which waits while the buffer is full."""
    _write_beside(path, "wait")


def write_dropping(path: str) -> None:
    """The same beside the script; payloads are dropped while the buffer is full."""
    _write_beside(path, "drop")


def _write_beside(path: str, on_full: str) -> None:
    inner = create_trace(path, Run(stack="pytorch"))
    assert isinstance(inner, TraceWriter)
    commit, committed = inner.commit_step, iter(range(1_000_000))

    def told() -> None:
        commit()
        print(next(committed), flush=True)

    with mock.patch.object(inner, "commit_step", told):
        writer = BufferedWriter(inner, BUFFER, on_full)
        for step in range(1_000_000):
            _write_step(writer, step)


def _write_step(writer: TraceWriter | BufferedWriter, step: int) -> None:
    if step % SNAPSHOT_EVERY == 1:
        writer.add_snapshot(step, {"weight": value_of(step, TENSORS)}, keep=2)
    for tensor in range(TENSORS):
        value = value_of(step, tensor)
        writer.add(build_event(f"{step}/forward/layer.{tensor}#0:out", value, tensor), value)
    writer.commit_step()


def write_plain(path: str) -> None:
    """The control: one Zarr array for each tensor with a growing step axis."""
    import zarr

    group = zarr.open_group(path, mode="w")
    arrays = [
        group.create_array(f"layer.{tensor}", shape=(0, *SHAPE), chunks=(1, *SHAPE), dtype="f4")
        for tensor in range(TENSORS)
    ]
    for step in range(1_000_000):
        for tensor, array in enumerate(arrays):
            array.resize((step + 1, *SHAPE))
            array[step] = value_of(step, tensor)[: SHAPE[0], : SHAPE[1]]
        print(step, flush=True)


def kill(writer: str, path: Path | str, seconds: float) -> int:
    """Starts a writer, kills it `seconds` after its first step; returns the last step reported."""
    program = _CHILD.format(writer=writer)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(seconds)
        child.send_signal(signal.SIGKILL)
        lines = [first, *child.stdout]
    return int(lines[-1] if lines[-1].endswith("\n") else lines[-2])


def check_trace(path: Path | str, reported: int) -> str:
    """How a killed trace reads: `sound`, or what is wrong with it."""
    checked = verify(path)
    if not checked.sound:
        return f"damaged: {checked.damage[0].what}"
    with Trace(path) as trace:
        if trace.steps not in (list(range(reported + 1)), list(range(reported + 2))):
            return f"{len(trace.steps)} steps where {reported + 1} were reported"
        for step in trace.steps:
            for event in trace.events(step):
                if not _holds(trace, event, value_of(step, event.order)):
                    return f"wrong values in step {step}"
        due = [step for step in range(reported + 1) if step % SNAPSHOT_EVERY == 1]
        found = trace.snapshots
        if not set(due[-1:]) <= set(found) or not min(2, len(due)) <= len(found) <= 3:
            return f"snapshots {found} where {due[-2:]} are due"
        for step in found:
            if not np.array_equal(trace.snapshot(step)["weight"], value_of(step, TENSORS)):
                return f"wrong values in the snapshot of step {step}"
    return "sound"


def _holds(
    trace: Trace, event: Event, value: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
) -> bool:
    """Whether an event has a value, or the digest of it and the word that it was dropped."""
    if event.attributes.get("dropped"):
        return event.payload is None and event.digest == digest(value)
    return np.array_equal(trace.array(event), value)


def check_plain(path: Path | str, reported: int) -> str:
    """How the control reads, over the steps that its arrays claim to have."""
    import zarr

    group = zarr.open_group(str(path), mode="r")
    zeros = lengths = 0
    for tensor in range(TENSORS):
        array = group[f"layer.{tensor}"]
        lengths |= array.shape[0] - 1 != reported
        zeros |= not np.asarray(array[-1]).any()
    return "silent zeros" if zeros else "arrays of different lengths" if lengths else "sound"


def run(writer: str, places: Iterable[Path | str], seed: int = 0) -> Counter[str]:
    """Kills a writer once at each place; returns how the results read."""
    rng = random.Random(seed)
    check = check_plain if writer == "write_plain" else check_trace
    endings: Counter[str] = Counter()
    for place in places:
        reported = kill(writer, place, rng.uniform(0.0, 0.3))
        endings[check(place, reported)] += 1
        if not sum(endings.values()) % 10:
            print(f"{writer}: {dict(endings)} so far", file=sys.stderr, flush=True)
    return endings


def folders(count: int) -> Iterator[Path]:
    """Paths in a temporary folder, each removed when the next one is asked for."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            path = Path(folder) / f"{number}.zarr"
            yield path
            shutil.rmtree(path)


def prefixes(count: int) -> Iterator[str]:
    """URLs of traces on an S3 server, whose objects are deleted when the next one is asked for."""
    from tests.s3 import s3_server  # not imported by what is killed: it takes a second

    with s3_server() as bucket:
        for number in range(count):
            url = f"{bucket}/{number}.zarr"
            yield url
            store = obstore.store.from_url(url)
            obstore.delete(store, list(Prefix(url).sizes()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="kills of each writer")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--where", nargs="*", choices=sorted(_WHERE), default=sorted(_WHERE))
    given = parser.parse_args()
    sound = True
    for where in given.where:
        writer, places = _WHERE[where]
        counts = run(writer, places(given.count), given.seed)
        told = ", ".join(f"{n} of {given.count} {how}" for how, n in counts.most_common())
        print(f"{writer} in {where}: {told}", flush=True)
        sound &= writer == "write_plain" or counts["sound"] == given.count
    sys.exit(0 if sound else 1)


_WHERE: Final[Mapping[str, tuple[str, Callable[[int], Iterator[Path | str]]]]] = {
    "folder": ("write_trace", folders),
    "folder-wait": ("write_waiting", folders),
    "folder-drop": ("write_dropping", folders),
    "s3": ("write_trace", prefixes),
    "s3-wait": ("write_waiting", prefixes),
    "s3-drop": ("write_dropping", prefixes),
    "control": ("write_plain", folders),
}


if __name__ == "__main__":
    main()
