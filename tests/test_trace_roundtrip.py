"""What is written into a trace comes back, bit for bit, here and in other readers of Zarr."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import tracediff.trace.zarr_types  # noqa: F401  (registers bfloat16 and float8 with zarr)
from tracediff.errors import TraceError
from tracediff.events import Event, Run, Site
from tracediff.testing import build_event, build_trace
from tracediff.trace import Trace, TraceWriter, hierarchy, metadata, template, verify
from tracediff.trace.dtypes import DTYPES
from tracediff.trace.names import escape_text, node_name, payload_key, unescape_text


def bits(array: np.ndarray) -> bytes:
    """The elements in C order, little-endian, computed without the code under test."""
    if array.dtype.byteorder == ">":
        array = array.byteswap().view(array.dtype.newbyteorder("<"))
    return array.tobytes(order="C")


def every_bit_pattern(dtype: np.dtype) -> np.ndarray:
    """All values of a narrow type, NaN payloads included; random bits of a wide one."""
    if dtype == np.bool_:
        return np.array([True, False, True])
    if dtype.itemsize == 1:
        return np.arange(256, dtype=np.uint8).view(dtype)
    raw = np.random.default_rng(7).integers(0, 256, 512, dtype=np.uint8)
    return raw.view(dtype)


def layouts() -> dict[str, np.ndarray]:
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    return {
        "contiguous": base,
        "fortran": np.asfortranarray(base),
        "transposed": base.transpose(2, 0, 1),
        "strided": base[:, ::2, 1::2],
        "negative": base[::-1, :, ::-1],
        "broadcast": np.broadcast_to(np.float32(2.5), (3, 2)),
        "big-endian": base.astype(">f4"),
        "big-endian-int": np.array([1, -2, 1 << 40], dtype=">i8"),
        "zero-dimensional": np.array(-0.0, dtype=np.float32),
        "empty": np.zeros((0,), np.float32),
        "empty-inside": np.zeros((2, 0, 3), np.float32),
        "one": np.ones((1, 1, 1), np.float32),
        "all-zero": np.zeros((4, 4), np.float32),
        "read-only": np.frombuffer(b"\0\1\2\3" * 4, np.float32),
        "ml-transposed": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3).T,
    }


def write_one(path: Path, array: np.ndarray) -> Trace:
    return Trace(build_trace(path, [("0/forward/m#0:out", array)]))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_keeps_its_bits(tmp_path: Path, name: str) -> None:
    array = every_bit_pattern(DTYPES[name])
    trace = write_one(tmp_path / "t", array)
    (event,) = trace.events()
    found = trace.array(event)
    assert event.dtype == name
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("layout", sorted(layouts()))
def test_every_layout_keeps_its_values(tmp_path: Path, layout: str) -> None:
    array = layouts()[layout]
    trace = write_one(tmp_path / "t", array)
    (event,) = trace.events()
    found = trace.array(event)
    assert found.shape == array.shape
    assert found.tobytes() == bits(array)
    assert not found.flags.writeable
    assert verify(trace.path).sound


def test_large_arrays_are_chunked_along_leading_axes() -> None:
    assert metadata.chunk_shape((100, 10), 4, limit=4000) == (100, 10)
    assert metadata.chunk_shape((100, 10), 4, limit=3999) == (50, 10)
    assert metadata.chunk_shape((1, 7, 10), 4, limit=120) == (1, 3, 10)
    assert metadata.chunk_shape((5, 7, 10), 4, limit=120) == (1, 3, 10)
    assert metadata.chunk_shape((3, 10), 4, limit=100) == (2, 10)
    assert metadata.chunk_shape((3, 10), 4, limit=79) == (1, 10)
    assert metadata.chunk_shape((0, 3), 4) == (1, 3)
    assert metadata.chunk_shape((), 8, limit=4) == ()


@pytest.mark.parametrize("shape", [(7, 5), (1, 7, 5), (3, 4, 5), (35,)])
def test_chunked_arrays_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    for module in (hierarchy, template):
        monkeypatch.setattr(module, "CHUNK_LIMIT", 64)
    array = np.random.default_rng(1).standard_normal(shape)
    trace = write_one(tmp_path / "t", array)
    (event,) = trace.events()
    np.testing.assert_array_equal(trace.array(event), array)
    with zipfile.ZipFile(trace.path / "segments/0/00000000.zip") as archive:
        chunks = [n for n in archive.namelist() if n.startswith("tensors/forward/m#0/out/c/")]
    assert len(chunks) > 1
    group = zarr.open_group(zarr.storage.ZipStore(segments(trace.path)[0]), mode="r")
    np.testing.assert_array_equal(group["tensors/forward/m#0/out"][...], array)
    assert verify(trace.path).sound


def test_shards_come_back_and_what_is_whole_takes_no_column(tmp_path: Path) -> None:
    shard = "dp=4@1,tp=2@0|S(0),R|1024x512|256,0"
    sites = [f"0/loading/{name}:param" for name in ("w", "b")]
    value = np.ones((256, 512), np.float32)
    path = build_trace(tmp_path / "a", [(sites[0], (value, {"shard": shard})), (sites[1], value)])
    with Trace(path) as trace:
        assert [trace.find(site).shard for site in sites] == [shard, ""]
    whole = build_trace(tmp_path / "b", [(site, value) for site in sites])
    with Trace(whole) as trace:
        assert [trace.find(site).shard for site in sites] == ["", ""]
    stored = [zipfile.ZipFile(segments(each)[0]).namelist() for each in (path, whole)]
    assert ["events/shard/c/0" in names for names in stored] == [True, False]
    assert Trace(path).index(0).values != Trace(whole).index(0).values
    assert verify(path).sound


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("segments/*/*.zip"))


def test_one_chunk_is_mapped_and_outlives_its_trace(tmp_path: Path) -> None:
    array = np.arange(1000, dtype=np.float32)
    with write_one(tmp_path / "t", array) as trace:
        found = trace.array(trace.events()[0])
    address = found.__array_interface__["data"][0]
    assert address % 64 == 0
    np.testing.assert_array_equal(found, array)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


@pytest.fixture
def rich_trace(tmp_path: Path) -> Path:
    """Two steps with every phase, all dtypes, names that need care, and equal payloads."""
    values: list[tuple[str, object]] = []
    for step in (0, 3):
        values += [(f"{step}/environment/device:out", "cpu")]
        values += [(f"{step}/rendering/sample[{i}].text", f"Grüße\u00a0{i}\n") for i in range(2)]
        values += [(f"{step}/rendering/batch.ids", np.array([[1, 2], [3, 4]]))]
        values += [(f"{step}/rng/numpy:state", np.arange(5, dtype=np.uint32))]
        for i, dtype in enumerate(DTYPES.values()):
            values += [(f"{step}/forward/model.layers.{i}#0:out", every_bit_pattern(dtype))]
        for name, array in layouts().items():
            values += [(f"{step}/forward/layout.{name}#0:in", array)]
        values += [(f"{step}/forward/a/b.c%d..é#1:out[0]", np.ones((2, 2)))]
        values += [(f"{step}/trajectory/loss#0:out", 2.5 + step)]
    return build_trace(tmp_path / "rich.zarr", values)


@pytest.mark.parametrize("consolidated", [True, False])
def test_zarr_opens_every_segment_as_it_is(rich_trace: Path, consolidated: bool) -> None:
    trace = Trace(rich_trace)
    for step, file in zip(trace.steps, segments(rich_trace), strict=True):
        store = zarr.storage.ZipStore(file, mode="r")
        group = zarr.open_group(store, mode="r", use_consolidated=consolidated)
        assert group.attrs["tracediff"]["step"] == step
        events = trace.events(step, samples=False)
        assert list(group["events/path"][:]) == [escape_text(e.site.path) for e in events]
        assert list(group["events/order"][:]) == [e.order for e in events]
        checked = 0
        for event in events:
            if event.payload:
                found = group[event.payload]
                assert found.shape == event.shape
                assert np.asarray(found[...]).tobytes() == trace.array(event).tobytes()
                checked += 1
        assert checked > 25


def test_zarr_lists_the_same_nodes_with_and_without_consolidated_metadata(rich_trace: Path) -> None:
    def nodes(consolidated: bool) -> dict[str, str]:
        store = zarr.storage.ZipStore(segments(rich_trace)[0], mode="r")
        group = zarr.open_group(store, mode="r", use_consolidated=consolidated)
        found, queue = {}, [("", group)]
        while queue:
            prefix, parent = queue.pop()
            for name, child in parent.members():
                found[prefix + name] = type(child).__name__
                if isinstance(child, zarr.Group):
                    queue.append((f"{prefix}{name}/", child))
        return found

    assert nodes(True) == nodes(False)
    assert len(nodes(True)) > 60


def test_trace_root_is_a_zarr_group(rich_trace: Path) -> None:
    group = zarr.open_group(rich_trace, mode="r")
    assert group.attrs["tracediff"]["format"] == 1
    assert group.attrs["tracediff"]["run"]["stack"] == "pytorch"


def test_segments_are_plain_aligned_sorted_zip(rich_trace: Path) -> None:
    for file in segments(rich_trace):
        raw = file.read_bytes()
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
            names = archive.namelist()
            assert names == sorted(names)
            for info in archive.infolist():
                assert info.compress_type == zipfile.ZIP_STORED
                local = raw[info.header_offset : info.header_offset + 30]
                start = (
                    info.header_offset
                    + 30
                    + int.from_bytes(local[26:28], "little")
                    + int.from_bytes(local[28:30], "little")
                )
                assert start % 64 == 0


def test_xarray_opens_the_tensors_of_a_segment(tmp_path: Path) -> None:
    array = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    value = (array, {"dims": ("batch", "hidden")})
    path = build_trace(tmp_path / "t", [("0/forward/model.norm#0:out", value)])
    store = zarr.storage.ZipStore(segments(path)[0], mode="r")
    found = xr.open_zarr(store, group="tensors/forward/model.norm#0", consolidated=False)["out"]
    assert found.dims == ("batch", "hidden")
    assert found.dtype == ml_dtypes.bfloat16
    assert found.values.tobytes() == array.tobytes()


def test_equal_payloads_are_stored_once(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal(1000)
    other_shape = array.reshape(10, 100)
    other_dtype = array.view(np.int64)
    path = build_trace(
        tmp_path / "t",
        [
            ("0/forward/a#0:out", array),
            ("0/forward/b#0:in", array.copy()),
            ("0/forward/c#0:in", other_shape),
            ("0/forward/d#0:in", other_dtype),
        ],
    )
    trace = Trace(path)
    a, b, c, d = trace.events()
    assert a.payload == b.payload
    assert len({a.payload, c.payload, d.payload}) == 3
    np.testing.assert_array_equal(trace.array(c), other_shape)
    assert trace.array(d).dtype == np.int64
    assert trace.bytes_stored < 4 * array.nbytes + 25_000


def test_two_events_at_one_site_both_keep_their_payload(tmp_path: Path) -> None:
    values = [("0/loading/w:param", np.ones(2)), ("0/loading/w:param", np.zeros(2))]
    trace = Trace(build_trace(tmp_path / "t", values))
    assert [trace.array(e).tolist() for e in trace.events()] == [[1, 1], [0, 0]]


def test_a_payload_is_copied_before_add_returns(tmp_path: Path) -> None:
    array = np.arange(4.0)
    with TraceWriter(tmp_path / "t", Run(stack="mlx")) as writer:
        writer.add(build_event("0/forward/m#0:out", array), array)
        array[:] = -1
    trace = Trace(tmp_path / "t")
    assert trace.array(trace.events()[0]).tolist() == [0, 1, 2, 3]


def test_all_fields_of_an_event_come_back(tmp_path: Path) -> None:
    event = Event(
        site=Site(2, "backward", "model.layers.0", 3, "grad_out"),
        order=17,
        kind="tensor",
        op="Linear",
        source="train.py:41",
        dtype="float32",
        shape=(2, 3),
        dims=("batch", "hidden"),
        digest=bytes(range(16)),
        fingerprint=tuple(float(i) for i in range(16)),
        sketch=np.arange(256.0),
        inputs=(3, 5),
        attributes={"lr": 1e-4, "nested": {"a": [1, None, True]}},
    )
    plain = Event(site=Site(2, "environment", "x"), order=4, kind="setting", value={})
    with TraceWriter(tmp_path / "t", Run(stack="mlx")) as writer:
        writer.add(event, None)
        writer.add(plain, None)
    first, second = Trace(tmp_path / "t").events(2)
    assert (first, second) == (plain, event)
    assert second.sketch is not None
    assert second.sketch.tolist() == list(range(256))
    assert first.sketch is None


@pytest.mark.parametrize("value", [None, True, 0, -1.5, 1e300, [], {}, [1, [2]], {"a": None}, ""])
def test_values_come_back(tmp_path: Path, value: object) -> None:
    path = build_trace(tmp_path / "t", [("0/environment/x:out", value)])
    (event,) = Trace(path).events()
    assert event.value == value
    assert type(event.value) is type(value)
    assert verify(path).sound


def test_non_finite_scalars_come_back(tmp_path: Path) -> None:
    values = [(f"0/trajectory/l#{i}:out", v) for i, v in enumerate([math.nan, math.inf, -math.inf])]
    path = build_trace(tmp_path / "t", values)
    found = [event.value for event in Trace(path).events()]
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]
    assert verify(path).sound


def test_values_that_are_no_json_are_kept_as_plain_ones(tmp_path: Path) -> None:
    given = {10: np.float32(1.5), 9: (1, 2), "path": Path("a/b"), "array": np.arange(2)}
    path = build_trace(tmp_path / "t", [("0/environment/x:out", given)])
    (event,) = Trace(path).events()
    assert event.value == {"10": 1.5, "9": [1, 2], "path": "a/b", "array": [0, 1]}
    assert verify(path).sound


def test_a_dtype_without_a_zarr_name_is_refused(tmp_path: Path) -> None:
    array = np.array(["2020-01-01"], dtype="datetime64[D]")
    with TraceWriter(tmp_path / "t", Run(stack="mlx")) as writer:
        event = Event(site=Site(0, "forward", "m"), order=0, dtype=array.dtype.name, shape=(1,))
        with pytest.raises(TraceError, match="datetime64"):
            writer.add(event, array)


def test_an_event_and_a_payload_that_disagree_are_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", Run(stack="mlx")) as writer:
        event = build_event("0/forward/m#0:out", np.ones(3))
        with pytest.raises(ValueError, match=r"float64 \(3,\)"):
            writer.add(event, np.ones(3, np.float32))
        with pytest.raises(ValueError, match=r"\(4,\)"):
            writer.add(event, np.ones(4))


# ---- names and texts -------------------------------------------------------------------------

ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=()), max_size=40)
AWKWARD = (
    *("", ".", "..", "...", "__x", "a/b", "/", "zarr.json", "c", "%2F", "%-", "%5F_x"),
    *("\0", "\ud800", "a\\ud800", "\\", " ", "\u00a0", "../../etc", "a#1"),
    *("é" * 200, "x" * 300, "x" * 301),
)


@pytest.mark.parametrize("name", AWKWARD)
def test_node_names_are_safe(name: str) -> None:
    found = node_name(name)
    assert 0 < len(found) <= 200
    assert found.isascii()
    assert found.isprintable()
    assert "/" not in found
    assert found.strip(".")
    assert found != "zarr.json"
    assert not found.startswith("__")


def test_node_names_differ_where_names_do() -> None:
    assert len({node_name(name) for name in AWKWARD}) == len(AWKWARD)


@given(ANY_TEXT, ANY_TEXT)
@settings(max_examples=300, deadline=None)
def test_escapes_are_injective(left: str, right: str) -> None:
    assert unescape_text(escape_text(left)) == left
    escape_text(left).encode("utf-8")
    assert (node_name(left) == node_name(right)) == (left == right)


def test_payload_keys_tell_calls_and_paths_apart() -> None:
    keys = {
        payload_key(Site(0, "forward", path, call, port))
        for path in ("a", "a#1", "a#0", "a/b", "a%2Fb")
        for call in (0, 1)
        for port in ("in", "out", "c")
    }
    assert len(keys) == 30
    assert payload_key(Site(0, "rendering", "batch.ids")) == "rendering/batch.ids#0/out"


@given(st.lists(st.tuples(ANY_TEXT, ANY_TEXT, ANY_TEXT), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_any_names_and_texts_come_back(
    tmp_path_factory: pytest.TempPathFactory, items: list[tuple[str, str, str]]
) -> None:
    path = tmp_path_factory.mktemp("names") / "t"
    array = np.arange(2.0)
    with TraceWriter(path, Run(stack="mlx", argv=tuple(text for _, _, text in items))) as writer:
        for i, (name, port, text) in enumerate(items):
            site = Site(0, "forward", name, 0, port)
            writer.add(build_event(site, array + i, 2 * i, op=text, source=text), array + i)
            writer.add(build_event(site, text, 2 * i + 1, attributes={text: text}), None)
    trace = Trace(path)
    assert trace.run.argv == tuple(text for _, _, text in items)
    events = trace.events()
    for i, (name, port, text) in enumerate(items):
        tensor, value = events[2 * i : 2 * i + 2]
        assert (tensor.site.path, tensor.site.port, tensor.op) == (name, port, text)
        assert trace.array(tensor).tolist() == [i, i + 1]
        assert value.value == text
        assert value.attributes == {text: text}
    assert verify(path).sound
    group = zarr.open_group(zarr.storage.ZipStore(segments(path)[0], mode="r"), mode="r")
    assert [unescape_text(p) for p in group["events/path"][:]] == [e.site.path for e in events]


def test_rewritten_segments_are_equal(tmp_path: Path) -> None:
    """The same events give the same bytes: no dates, no addresses, no order of dictionaries."""
    values = [("0/forward/m#0:out", np.arange(5.0)), ("0/trajectory/loss#0:out", 1.5)]
    files = [segments(build_trace(tmp_path / name, values))[0] for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_manifest_is_strict_json(tmp_path: Path) -> None:
    def refuse(token: str) -> None:
        raise AssertionError(token)

    path = build_trace(tmp_path / "t", [], settings={"lr": math.nan, "a": (1, 2)})
    document = json.loads((path / "zarr.json").read_text("ascii"), parse_constant=refuse)
    assert document["node_type"] == "group"
    assert Trace(path).run.settings == {"lr": "NaN", "a": [1, 2]}
