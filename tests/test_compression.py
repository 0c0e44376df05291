"""`--compress`: smaller files that hold the same values, for this reader and for others."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
import zarr

import tracediff.trace.zarr_types  # noqa: F401  (registers bfloat16 and float8 with zarr)
from tests.damage import flip, offset_of, rewrite
from tracediff.bisection import bisect
from tracediff.errors import CorruptTraceError
from tracediff.testing import build_trace
from tracediff.trace import Trace, repair, verify
from tracediff.trace.columns import encode_strings
from tracediff.trace.compression import PAYLOADS, TEXTS, compress
from tracediff.trace.dtypes import DTYPES
from tracediff.trace.snapshot import read_snapshot, write_snapshot

SITE = "0/forward/m#0:out"
KEY = "tensors/forward/m#0/out"


def weights(dtype: Any = np.float32, shape: tuple[int, ...] = (64, 48)) -> np.ndarray[Any, Any]:
    """Numbers as weights are: of like size, so that their exponents repeat."""
    return (np.random.default_rng(3).standard_normal(shape) * 0.02).astype(dtype)


def both(folder: Path, array: np.ndarray[Any, Any], **fields: Any) -> tuple[Path, Path]:
    values = [(SITE, (array, fields)), ("0/trajectory/loss#0", 2.5)]
    return build_trace(folder / "plain", values), build_trace(
        folder / "small", values, compress=True
    )


def segment(path: Path, step: int = 0) -> Path:
    return path / f"segments/0/{step:08d}.zip"


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_keeps_its_bits_and_its_digest(tmp_path: Path, name: str) -> None:
    raw = np.random.default_rng(7).integers(0, 256, 8192, dtype=np.uint8)
    array = (raw & 1).view(bool) if name == "bool" else raw.view(DTYPES[name])
    plain, small = both(tmp_path, array.reshape(2, -1))
    with Trace(plain) as a, Trace(small) as b:
        assert repr(a.events()) == repr(b.events())  # NaN in a fingerprint equals none
        found = b.array(b.find(SITE))
        assert found.tobytes() == array.tobytes()
        assert not found.flags.writeable
    assert verify(small).sound
    group = zarr.open_group(zarr.storage.ZipStore(segment(small), mode="r"), mode="r")
    assert np.asarray(group[KEY][...]).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [((1000, 300), 2), ((3, 500, 300), 3), ((1, 524289), 3), ((262144,), 1), ((8, 8), 0)],
    ids=str,
)
def test_chunks_hold_one_mebibyte_at_most(
    tmp_path: Path, shape: tuple[int, ...], chunks: int
) -> None:
    array = weights(shape=shape)
    _, small = both(tmp_path, array, dims=("x", "y", "z")[: len(shape)])
    with zipfile.ZipFile(segment(small)) as archive:
        metadata = json.loads(archive.read(f"{KEY}/zarr.json"))
        found = [name for name in archive.namelist() if name.startswith(f"{KEY}/c/")]
    if not chunks:  # too small to gain
        assert metadata["codecs"] == [{"name": "bytes", "configuration": {"endian": "little"}}]
    else:
        assert metadata["codecs"][1]["configuration"] == {
            "cname": "zstd",
            "clevel": 1,
            "shuffle": "shuffle",
            "typesize": 4,
            "blocksize": 1 << 20,
        }
        chunk = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        assert 4 * np.prod(chunk) <= 1 << 20
        assert len(found) == chunks
    with Trace(small) as trace:
        np.testing.assert_array_equal(trace.array(trace.find(SITE)), array)
    assert verify(small).sound


def test_xarray_opens_it(tmp_path: Path) -> None:
    array = weights(ml_dtypes.bfloat16, (900, 700))
    _, small = both(tmp_path, array, dims=("out", "in"))
    store = zarr.storage.ZipStore(segment(small), mode="r")
    found = xr.open_zarr(store, group=KEY.rpartition("/")[0], consolidated=False)["out"]
    assert found.dims == ("out", "in")
    assert found.values.tobytes() == array.tobytes()


def test_it_is_smaller_and_equal_runs_give_equal_files(tmp_path: Path) -> None:
    array = weights(ml_dtypes.bfloat16, (1024, 1024))
    plain, small = both(tmp_path, array)
    assert segment(small).stat().st_size < 0.8 * segment(plain).stat().st_size
    again = build_trace(
        tmp_path / "again", [(SITE, array), ("0/trajectory/loss#0", 2.5)], compress=True
    )
    assert segment(again).read_bytes() == segment(small).read_bytes()


def test_a_planted_fault_is_named_against_a_plain_trace(tmp_path: Path) -> None:
    array = weights()
    faulty = array.copy()
    faulty[3, 5] += 1
    plain, small = both(tmp_path, array)
    assert bisect(plain, small).outcome == "identical"
    other = build_trace(tmp_path / "x", [(SITE, faulty), ("0/trajectory/loss#0", 2.5)])
    found = bisect(small, other).first
    assert found is not None
    assert found.site == SITE
    assert found.error.max_abs == pytest.approx(1.0, rel=1e-6)


def test_verify_names_a_flipped_byte_and_repair_loses_that_value_only(tmp_path: Path) -> None:
    values = [(f"0/forward/m{i}#0:out", weights() + i) for i in range(3)]
    path = build_trace(tmp_path / "t", values, compress=True, settings={"compress": True})
    flip(segment(path), offset_of(segment(path), "tensors/forward/m1#0/out/c/0/0") + 200)
    assert any("m1" in damage.what for damage in verify(path).damage)
    result = repair(path, tmp_path / "new")
    assert result.rebuilt == {"segments/0/00000000.zip": ["value of 0/forward/m1#0:out"]}
    assert verify(tmp_path / "new").sound
    with Trace(tmp_path / "new") as trace:
        found = trace.array(trace.find("0/forward/m2#0:out"))
    np.testing.assert_array_equal(found, weights() + 2)
    assert b"blosc" in segment(tmp_path / "new").read_bytes()


def test_snapshots_are_compressed_too(tmp_path: Path) -> None:
    path = build_trace(tmp_path / "t", [("0/forward/m#0:out", weights())])
    sizes = []
    for packed in (False, True):
        tree = {"weights": {"w": {"value": weights(shape=(512, 512))}}}
        assert not write_snapshot(path, 1, tree, packed=packed)
        sizes.append((path / "snapshots/00000001.zip").stat().st_size)
        found = read_snapshot(path, 1)["weights"]["w"]["value"]
        np.testing.assert_array_equal(found, weights(shape=(512, 512)))
    assert sizes[1] < 0.95 * sizes[0]


# ---- bombs -----------------------------------------------------------------------------------

ZEROS = compress(np.zeros(1 << 20, np.uint8), PAYLOADS)


def grown(size: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Metadata of an array of `size` floats in chunks of a mebibyte."""
    grid = {"name": "regular", "configuration": {"chunk_shape": [1 << 18]}}
    return lambda document: {**document, "shape": [size], "chunk_grid": grid}


def test_what_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    """300 MB of zeros in 300 chunks of a few bytes each."""
    path = build_trace(tmp_path / "t", [(SITE, weights(shape=(3000,)))], compress=True)
    size = 300 << 18
    shape = encode_strings([f"[{size}]"])
    packed = compress(np.frombuffer(shape, np.uint8), TEXTS)
    chunks: dict[str, Any] = {f"{KEY}/c/{i}": ZEROS for i in range(300)}
    rewrite(path, chunks | {f"{KEY}/zarr.json": grown(size), "events/shape/c/0": packed}, step=0)
    with Trace(path) as trace, pytest.raises(CorruptTraceError, match="too large"):
        trace.array(trace.find(SITE))


def test_the_number_of_events_is_bounded_by_the_size_of_the_file(tmp_path: Path) -> None:
    """Digests are 16 bytes of the file for each event; all other columns may be compressed."""
    path = build_trace(tmp_path / "t", [(SITE, weights())])
    codec = PAYLOADS.codec_json(1)
    document = {"events/digest/zarr.json": lambda d: {**d, "codecs": [*d["codecs"], codec]}}
    rewrite(path, document, step=0)
    with Trace(path) as trace, pytest.raises(CorruptTraceError, match="digest is compressed"):
        trace.events()


def test_more_events_than_the_file_can_hold_are_refused_first(tmp_path: Path) -> None:
    path = build_trace(tmp_path / "t", [(SITE, weights())])
    count = 1 << 22

    def promised(document: dict[str, Any]) -> dict[str, Any]:
        document["attributes"]["tracediff"]["events"] = count
        return document

    shape = {"events/digest/zarr.json": lambda d: {**d, "shape": [count, 16]}}
    rewrite(path, {"zarr.json": promised} | shape, step=0)
    with Trace(path) as trace, pytest.raises(CorruptTraceError, match="does not fit into the file"):
        trace.events()
