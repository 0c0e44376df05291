"""What a writer remembers of the steps before changes nothing in the next one's file."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tracediff.events import Event, Run, Site
from tracediff.trace import Trace, TraceWriter, verify
from tracediff.trace.direct import LONG, PIECE
from tracediff.trace.rows import row_of
from tracediff.trace.summary import digest

Value = tuple[str, str, NDArray[Any], tuple[str, ...]]
"""Phase, path, array and names of the dimensions of an event."""

RUN = Run(stack="pytorch")
DTYPES = ("<f4", ">f4", "<i8", "?", "<c8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0), (1,), (5,), (7, 3), (64,), (2, 3, 4)]


def some(generator: np.random.Generator, step: int) -> Iterator[Value]:
    """Events of a step: most sites come in every step, with most shapes as before."""
    for site in range(12):
        if generator.random() < 0.1:
            continue
        changed = generator.random() < 0.2
        shape = SHAPES[(site + changed * step) % len(SHAPES)]
        dtype = np.dtype(DTYPES[(site + changed * step) % len(DTYPES)])
        array = (generator.standard_normal(shape) * 9).astype(dtype)
        if array.ndim > 1 and generator.random() < 0.3:
            array = np.asfortranarray(array)
        named = generator.random() < 0.5 and len(shape) == 2
        path = f"layer.{site % 9}"  # some sites come twice
        yield ("forward", "backward")[site % 2], path, array, ("a", "b") if named else ()


def write(writer: TraceWriter, step: int, values: list[Value], by: str) -> None:
    """Writes a step, with `add` or with `store`."""
    rows = []
    for order, (phase, path, array, dims) in enumerate(values):
        site = Site(step, phase, path, 0, "out")
        name, found = array.dtype.name, digest(array)
        event = Event(
            site=site, order=order, dtype=name, shape=array.shape, dims=dims, digest=found
        )
        if by == "add":
            writer.add(event, array)
        else:
            fields = (step, phase, path, 0, "out")
            event.payload = writer.store(fields, order, dims, found, name, array)  # type: ignore[misc]
            rows.append(row_of(event))
    writer.add_stored(step, rows)
    writer.commit_step()


def segment(path: Path, step: int) -> bytes:
    return (path / f"segments/0/{step:08d}.zip").read_bytes()


@pytest.mark.parametrize("by", ["add", "store"])
@pytest.mark.parametrize("compress", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("seed", range(6))
def test_a_step_is_written_as_if_it_were_the_first(
    tmp_path: Path, seed: int, compress: bool, by: str
) -> None:
    generator = np.random.default_rng(seed)
    steps = [list(some(generator, step)) for step in range(8)]
    steps[3] = steps[2]  # the same once more
    steps[5] = []  # nothing
    with TraceWriter(tmp_path / "all", RUN, compress=compress) as writer:
        for step, values in enumerate(steps):
            write(writer, step, values, by)
    assert verify(tmp_path / "all").sound
    for step, values in enumerate(steps):
        if not values:
            continue
        with TraceWriter(tmp_path / f"{step}", RUN, compress=compress) as writer:
            write(writer, step, values, "add")
        assert segment(tmp_path / "all", step) == segment(tmp_path / f"{step}", step), step
    with Trace(tmp_path / "all") as trace:
        for step in trace.steps:
            for event, (_, _, array, _) in zip(trace.events(step), steps[step], strict=True):
                assert (
                    trace.array(event).tobytes()
                    == array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
                )


SIZES = [
    [10, LONG, 10],
    [PIECE - 4000, 3000, 100_000],
    [PIECE // 2, PIECE // 2, PIECE // 2, 1, PIECE * 2 + 3, 5],
    [3],
    [LONG // 2],
    [100_003] * 60,
]
"""Bytes of the payloads of one step after the other: long files come after short ones, and pieces
end within payloads and within what comes before them."""


def test_a_long_step_after_a_short_one_and_the_other_way_round(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    steps = [
        [("forward", f"m{i}", np.frombuffer(generator.bytes(size), np.uint8), ())
         for i, size in enumerate(sizes)]
        for sizes in SIZES + SIZES[::-1]
    ]  # fmt: skip
    with TraceWriter(tmp_path / "all", RUN) as writer:
        for step, values in enumerate(steps):
            write(writer, step, values, "store")
    assert verify(tmp_path / "all").sound
    with Trace(tmp_path / "all") as trace:
        for step, values in enumerate(steps):
            for event, value in zip(trace.events(step), values, strict=True):
                np.testing.assert_array_equal(trace.array(event), value[2])
    for step in (0, 3, len(steps) - 1):
        with TraceWriter(tmp_path / f"{step}", RUN) as writer:
            write(writer, step, steps[step], "add")
        assert segment(tmp_path / "all", step) == segment(tmp_path / f"{step}", step)


def test_a_stored_payload_has_been_read(tmp_path: Path) -> None:
    array = np.arange(5.0)
    with TraceWriter(tmp_path / "t", RUN) as writer:
        site = (0, "forward", "m", 0, "out")
        place = writer.store(site, 0, (), digest(array), "float64", array)
        event = Event(
            site=Site(*site), order=0, dtype="float64", shape=(5,), digest=digest(array),
            payload=place,
        )  # fmt: skip
        array[:] = -1
        writer.add_stored(0, [row_of(event)])
    with Trace(tmp_path / "t") as trace:
        np.testing.assert_array_equal(trace.array(trace.events(0)[0]), np.arange(5.0))


def test_what_is_stored_must_be_of_the_open_step(tmp_path: Path) -> None:
    array = np.arange(5.0)
    with TraceWriter(tmp_path / "t", RUN) as writer:
        writer.store((1, "forward", "m", 0, "out"), 0, (), digest(array), "float64", array)
        with pytest.raises(ValueError, match="step 1 is open"):
            writer.store((2, "forward", "m", 0, "out"), 0, (), digest(array), "float64", array)
        with pytest.raises(ValueError, match="step 1 is open"):
            writer.add_stored(2, [row_of(Event(site=Site(2, "forward", "m"), order=0))])
        writer.commit_step()
        with pytest.raises(ValueError, match="committed already"):
            writer.store((1, "forward", "m", 0, "out"), 0, (), digest(array), "float64", array)


def test_equal_steps_make_equal_files(tmp_path: Path) -> None:
    """Groups come in one order, whatever order this process has for sets of texts."""
    values = list(some(np.random.default_rng(0), 0))
    with TraceWriter(tmp_path / "t", RUN) as writer:
        write(writer, 0, values, "add")
    with zipfile.ZipFile(tmp_path / "t/segments/0/00000000.zip") as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        groups = [
            entry.filename.removesuffix("zarr.json") for entry in entries
            if entry.filename.endswith("zarr.json") and b'"group"' in archive.read(entry)
        ]  # fmt: skip
    *inner, root = groups
    assert len(inner) > 5
    assert inner == sorted(inner)
    assert root == ""
