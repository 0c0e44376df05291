"""The table of rendered samples: whatever is rendered comes back, here and in readers of Zarr."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tracediff.errors import CorruptTraceError
from tracediff.events import Event, Run, Site
from tracediff.report.inspection import inspect_site
from tracediff.testing import build_event, build_trace
from tracediff.trace import Trace, TraceWriter, sample_writer, samples, verify
from tracediff.trace.archive import Archive
from tracediff.trace.archive_writer import ArchiveWriter
from tracediff.trace.compression import CHUNK_BYTES, NUMBERS, TEXTS, compress, decompress

TRAPS = "a\0b \ufeff\u200b\u0301e\u202e 😀 \U0010ffff \ud83d \udfff\r\n\u2028\x85 \\ud800 µ"


def segment(path: Path) -> Path:
    (file,) = path.glob("segments/0/*.zip")
    return file


def zarr_group(path: Path) -> zarr.Group:
    return zarr.open_group(zarr.storage.ZipStore(segment(path), mode="r"), mode="r")


def rendered(path: Path, count: int = 3) -> Path:
    values: list[tuple[str, Any]] = [("0/environment/device:out", "cpu")]
    for i in range(count):
        values += [(f"0/rendering/sample[{i}].messages", f'[{{"content": "dose {i}"}}]')]
        values += [(f"0/rendering/sample[{i}].text", f"dose {i}\n")]
        values += [(f"0/rendering/sample[{i}].ids", (np.arange(i + 2), {"kind": "ids"}))]
    return build_trace(path, [*values, ("0/forward/m#0:out", np.ones(2))])


# ---- what comes back ----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.text(st.characters(codec=None, categories=None), max_size=12), min_size=1, max_size=4
        ),
        min_size=1,
        max_size=4,
    )
)
@example([[TRAPS, ""], [TRAPS, TRAPS]])
def test_any_text_in_any_turns_comes_back(conversations: list[list[str]]) -> None:
    """Lone surrogates, NUL, characters of four bytes; the digest is that of the UTF-8 bytes."""
    turns = [[{"role": "user", "content": turn} for turn in turns] for turns in conversations]
    values: list[tuple[str, Any]] = []
    for i, messages in enumerate(turns):
        values += [(f"0/rendering/sample[{i}].messages", json.dumps(messages, ensure_ascii=False))]
        values += [(f"0/rendering/sample[{i}].text", "".join(conversations[i]))]
        values += [
            (
                f"0/rendering/sample[{i}].ids",
                np.array([*map(ord, "".join(conversations[i]))], np.int64),
            )
        ]
    with tempfile.TemporaryDirectory() as folder:
        path = build_trace(Path(folder) / "t", values)
        with Trace(path) as trace:
            rows = trace.samples(0)
            assert len(rows) == 3 * len(turns)
            for i, messages in enumerate(turns):
                first, text, ids = (rows.event(3 * i + k) for k in range(3))
                assert json.loads(first.value) == messages
                assert text.value == "".join(conversations[i])
                assert "".join(map(chr, trace.array(ids))) == text.value
            assert [str(e.site) for e in trace.events(0)] == [site for site, _ in values]
        assert verify(path).sound


INTEGERS = {
    "ids": np.array([1, 2, 70_000], np.int64),
    "mask": np.array([True, False, True]),
    "labels": np.array([-100, -100, 5], np.int32),
    "bytes": np.array([255, 0], np.uint8),
    "offsets": np.array([[0, 2], [2, 5]], np.int64),
    "negative": np.array([-(1 << 31), (1 << 31) - 1]),
    "empty": np.zeros(0, np.int64),
    "empty-pairs": np.zeros((0, 2), np.int64),
    "big-endian": np.array([1, 2], ">i8"),
    "strided": np.arange(10, dtype=np.int16)[::3],
    # What does not fit the table is kept as a payload of its own.
    "wide": np.array([1 << 40]),
    "unsigned": np.array([1 << 32], np.uint64),
    "scalar": np.array(3),
    "weights": np.array([0.5, 1.0], np.float32),
    "flat": np.zeros((2, 0), np.int64),
}


def test_every_kind_of_array_comes_back(tmp_path: Path) -> None:
    values = [(f"0/rendering/sample[0].{name}", array) for name, array in INTEGERS.items()]
    trace = Trace(build_trace(tmp_path / "t", values))
    for event, (name, array) in zip(trace.events(), INTEGERS.items(), strict=True):
        found = trace.array(event)
        assert (event.site.path, found.shape) == (f"sample[0].{name}", array.shape)
        assert found.dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, array)
        assert not found.flags.writeable
    assert len(trace.samples(0)) == len(INTEGERS) - 5
    assert verify(trace.path).sound


def test_equal_bytes_of_other_types_are_not_taken_for_each_other(tmp_path: Path) -> None:
    arrays = [np.array([200], np.uint8), np.array([-56], np.int8), np.array([200], np.uint8)]
    values = [(f"0/rendering/sample[{i}].ids", array) for i, array in enumerate(arrays)]
    trace = Trace(build_trace(tmp_path / "t", values))
    assert [trace.array(event).item() for event in trace.events()] == [200, -56, 200]


def test_all_fields_of_a_row_come_back(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "op": "Tokenizer",
        "source": "train.py:7",
        "inputs": (4, 2),
        "attributes": {"truncation": None, "nested": {"a": [1]}},
    }
    ids = np.array([5, 6, 7])
    event = build_event("3/rendering/sample[12].ids", ids, 9, kind="ids", dims=("seq",), **fields)
    json_value = build_event("3/rendering/sample[12].inputs", {"date": None}, 10, inputs=(9,))
    with TraceWriter(tmp_path / "t", Run(stack="mlx")) as writer:
        writer.add(event, ids)
        writer.add(json_value, None)
    with Trace(tmp_path / "t") as trace:
        first, second = trace.events(3)
        assert trace.find("3/rendering/sample[12].ids") == first
        for name in ("site", "order", "kind", "dtype", "shape", "dims", "digest", *fields):
            assert getattr(first, name) == getattr(event, name), name
        assert second == json_value


@pytest.mark.parametrize(
    "path", ["sample[x].text", "sample[01].text", "sample[1]", "a.sample[1].t"]
)
def test_other_paths_are_ordinary_events(tmp_path: Path, path: str) -> None:
    trace = Trace(build_trace(tmp_path / "t", [(f"0/rendering/{path}", "a")]))
    assert trace.events(0, samples=False)[0].site.path == path
    assert len(trace.samples(0)) == 0


def test_traces_that_hold_samples_as_events_have_rows_too(tmp_path: Path, monkeypatch: Any) -> None:
    table = Trace(rendered(tmp_path / "table"))
    monkeypatch.setattr(sample_writer.SampleWriter, "take", lambda *_: False)
    single = Trace(rendered(tmp_path / "single"))
    assert [e.site for e in single.events()] == [e.site for e in table.events()]
    assert single.events(0, samples=False) == table.events(0, samples=False)
    a, b = single.samples(0), table.samples(0)
    assert (len(a), a.steps) == (9, b.steps)
    for column in ("sample", "step", "order", "digest"):
        np.testing.assert_array_equal(getattr(a, column), getattr(b, column))
    assert a.root == b.root


# ---- size, chunks ------------------------------------------------------------------------------


def test_equal_values_are_stored_once_and_rows_are_small(tmp_path: Path) -> None:
    text = "".join(map(chr, np.random.default_rng(0).integers(32, 5000, 40_000)))
    values = [(f"0/rendering/sample[{i}].text", text) for i in range(50)]
    trace = Trace(build_trace(tmp_path / "t", values))
    assert [event.value for event in trace.samples(0)] == [text] * 50
    assert trace.bytes_stored < len(text.encode()) + 20_000


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sample_writer", "sample_table", "samples", "segment", "compression"):
        for name, size in (("ROWS", 4), ("CHUNK_BYTES", 64)):
            monkeypatch.setattr(f"tracediff.trace.{module}.{name}", size, raising=False)


@pytest.mark.usefixtures("small_chunks")
def test_values_that_cross_chunks_come_back(tmp_path: Path) -> None:
    texts = ["µ" * size for size in (0, 31, 1, 200, 32, 5)]
    values: list[tuple[str, Any]] = []
    for i, text in enumerate(texts):
        values += [(f"0/rendering/sample[{i}].text", text)]
        values += [(f"0/rendering/sample[{i}].ids", np.arange(len(text)) + i)]
    path = build_trace(tmp_path / "t", values)
    trace = Trace(path)
    rows = trace.samples(0)
    assert [rows.event(2 * i).value for i in range(6)] == texts
    for i, text in enumerate(texts):
        np.testing.assert_array_equal(trace.array(rows.event(2 * i + 1)), np.arange(len(text)) + i)
    assert len([n for n in Archive(segment(path)).entries if n.startswith("samples/text/c/")]) > 3
    assert zarr_group(path)["samples/order"][:].tolist() == list(range(12))
    assert verify(path).sound
    assert trace.index(0).root == Trace(rendered_again(path, tmp_path)).index(0).root


def rendered_again(path: Path, folder: Path) -> Path:
    trace = Trace(path)
    with TraceWriter(folder / "again", Run(stack="mlx")) as writer:
        for event in trace.events(0):
            payload = trace.array(event) if event.payload else None
            writer.add(event, payload)
    return folder / "again"


def test_equal_steps_give_equal_files(tmp_path: Path) -> None:
    files = [segment(rendered(tmp_path / name, 40)).read_bytes() for name in "ab"]
    assert files[0] == files[1]


# ---- other readers ----------------------------------------------------------------------------


def plain_values(columns: Callable[[str], Any], variants: Sequence[Any]) -> dict[str, Any]:
    """Samples as docs/trace-format.md says that any reader of Zarr can have them."""
    found = {}
    for i in range(len(columns("sample"))):
        variant = variants[columns("variant")[i]]
        start, stop = columns("start")[i], columns("start")[i] + columns("length")[i]
        values = columns(variant["pool"])[start:stop]
        name = f"sample[{columns('sample')[i]}].{variant['step']}"
        is_text = variant["pool"] == "text"
        found[name] = bytes(values).decode("utf-8", "surrogatepass") if is_text else values.tolist()
    return found


def test_zarr_and_xarray_read_the_table(tmp_path: Path) -> None:
    path = rendered(tmp_path / "t", 5)
    group = zarr_group(path)
    variants = group["samples"].attrs["tracediff"]["variants"]
    expected = {
        event.site.path: event.value if event.value else Trace(path).array(event).tolist()
        for event in Trace(path).samples(0)
    }
    assert expected["sample[4].ids"] == [0, 1, 2, 3, 4, 5]
    assert plain_values(lambda name: group[f"samples/{name}"][:], variants) == expected

    store = zarr.storage.ZipStore(segment(path), mode="r")
    data = xr.open_zarr(store, group="samples", consolidated=False)
    assert data["digest"].dims == ("row", "byte")
    assert data["text"].dims == ("text_byte",)
    assert plain_values(lambda name: data[name].values, variants) == expected


# ---- damage -----------------------------------------------------------------------------------


def rewrite(path: Path, changes: dict[str, Any]) -> None:
    source = Archive(segment(path))
    entries = {name: source.read(name) for name in source.entries}
    for name, change in changes.items():
        if change is None:
            del entries[name]
        elif callable(change):
            entries[name] = json.dumps(change(json.loads(entries[name]))).encode()
        else:
            entries[name] = change
    writer = ArchiveWriter(segment(path))
    for name, data in entries.items():
        writer.add(name, data)
    writer.close()


def variant(**fields: Any) -> Callable[[Any], Any]:
    def change(document: Any) -> Any:
        first = document["attributes"]["tracediff"]["variants"][0]
        first.update(fields)
        return document

    return change


def column(value: int) -> bytes:
    return compress(np.full(samples.ROWS, value, "<i8"), NUMBERS)


BOMB = compress(np.zeros(1 << 22, np.uint8), TEXTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"samples/zarr.json": b"[]"},
        {"samples/zarr.json": lambda d: {**d, "attributes": {}}},
        {"samples/zarr.json": variant(pool="rows")},
        {"samples/zarr.json": variant(inner_shape=[2])},
        {"samples/zarr.json": variant(dims="x")},
        {"samples/zarr.json": variant(inputs_back=["x"])},
        {"samples/variant/c/0": column(7)},
        {"samples/variant/c/0": column(-1)},
        {"samples/start/c/0": column(10**9)},
        {"samples/start/c/0": column(-1)},
        {"samples/length/c/0": column(10**9)},
        {"samples/attributes_length/c/0": column(5)},
        {"samples/sample/c/0": None},
        {"samples/sample/c/0": b""},
        {"samples/sample/c/0": column(0)[:-1]},
        {"samples/sample/c/0": column(0)[:16] + bytes(len(column(0)) - 16)},
        {"samples/sample/c/0": BOMB},
        {"samples/sample/zarr.json": lambda d: {**d, "shape": [10**12]}},
        {"samples/sample/zarr.json": lambda d: {**d, "data_type": "int32"}},
    ],
    ids="+".join,
)
def test_hostile_tables_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = rendered(tmp_path / "t")
    rewrite(path, changes)
    with pytest.raises(CorruptTraceError, match=r"00000000\.zip"):
        Trace(path).samples(0)
    assert not verify(path).sound


@pytest.mark.parametrize("data", [BOMB, b"", compress(np.zeros(CHUNK_BYTES, np.uint8), TEXTS)])
def test_damaged_values_are_named(tmp_path: Path, data: bytes) -> None:
    path = rendered(tmp_path / "t")
    rewrite(path, {"samples/text/c/0": data})
    damage = verify(path).damage
    assert any("sample[0].text" in item.where or "row 1" in item.where for item in damage)


def test_what_is_decompressed_is_what_was_compressed() -> None:
    array = np.arange(1000, dtype="<i4")
    data = compress(array, NUMBERS)
    assert decompress(data, 4000) == array.tobytes()
    for wrong in (3999, 4001):
        with pytest.raises(ValueError, match="holds 4000 bytes"):
            decompress(data, wrong)


def test_site_of_a_sample_round_trips() -> None:
    site = Site(0, "rendering", "sample[3].text")
    assert Site.parse(str(site)) == site
    assert samples.place_of(Event(site=site, order=0)) == (3, "text")


def test_a_sample_is_shown_without_making_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Trace(rendered(tmp_path / "t")) as trace:
        monkeypatch.setattr(Trace, "events", lambda *_: pytest.fail("all events were made"))
        view = inspect_site(trace, "0/rendering/sample[2].ids")
        assert [str(event.site) for event in view.events] == ["0/rendering/sample[2].ids"]
        assert view.values is not None
        assert view.values.tolist() == [0, 1, 2, 3]
