"""Opening, browsing and selecting from a trace."""

from __future__ import annotations

import io
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from rich.console import Console

from tracediff.errors import CorruptTraceError, TraceError
from tracediff.events import Site
from tracediff.testing import build_trace
from tracediff.trace import Trace, reader
from tracediff.trace.reader import CACHED_STEPS


def tensor(*shape: int, start: float = 0.0) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + np.float32(start)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    named = {"dims": ("batch", "hidden"), "op": "Linear", "source": "train.py:3"}
    values: list[tuple[str, object]] = [
        ("0/loading/model.layers.0.q_proj.weight:param", tensor(4, 4))
    ]
    for step in range(3):
        for layer in range(2):
            site = f"{step}/forward/model.layers.{layer}.q_proj"
            values += [(f"{site}#0:in", (tensor(2, 3, start=step), {"dims": ("batch", "hidden")}))]
            values += [(f"{site}#0:out", (tensor(2, 4, start=10 * step + layer), named))]
        for call in range(2):
            out = tensor(3, start=100 * step + call).astype(ml_dtypes.bfloat16)
            values += [(f"{step}/forward/model.norm#{call}:out", out)]
        ragged = tensor(step + 1, 2)
        values += [(f"{step}/forward/model.head#0:out", ragged)]
        values += [(f"{step}/rendering/sample[0].text", f"dose {step}")]
        values += [(f"{step}/trajectory/loss#0:out", 3.0 - step)]
    return build_trace(
        tmp_path / "run.zarr", values, argv=("train.py", "--lr", "1"), notes=("a note",)
    )


def test_opening_reads_no_segment(path: Path) -> None:
    for file in path.glob("segments/0/*.zip"):
        file.write_bytes(b"")
    trace = Trace(path)
    assert trace.steps == [0, 1, 2]
    assert trace.bytes_read == 0
    assert repr(trace) == "<Trace run.zarr: pytorch, 3 steps, finished>"
    with pytest.raises(CorruptTraceError):
        trace.events(0)


def test_events_are_sorted_by_order_whatever_the_order_of_writing(tmp_path: Path) -> None:
    values = [
        ("0/forward/b#0:out", (1.0, {"order": 5})),
        ("0/forward/a#0:out", (2.0, {"order": 1})),
    ]
    assert [e.order for e in Trace(build_trace(tmp_path / "t", values)).events()] == [1, 5]


def test_find_takes_sites_and_their_text(path: Path) -> None:
    trace = Trace(path)
    text = "1/forward/model.norm#1:out"
    event = trace.find(text)
    assert str(event.site) == text
    assert trace.find(Site.parse(text)) == event
    np.testing.assert_array_equal(trace.array(event).astype(float), [101, 102, 103])
    for wrong in ("1/forward/model.norm#2:out", "nonsense", "9/forward/model.norm#0:out"):
        with pytest.raises(
            TraceError, match=r"no event at|is no site|no step 9: it has steps 0 to 2"
        ):
            trace.find(wrong)


def test_read_labels_the_payload(path: Path) -> None:
    trace = Trace(path)
    found = trace.read(trace.find("2/forward/model.layers.1.q_proj#0:out"))
    assert isinstance(found, xr.DataArray)
    assert found.name == "2/forward/model.layers.1.q_proj#0:out"
    assert found.dims == ("batch", "hidden")
    assert found.attrs["op"] == "Linear"
    assert found.attrs["source"] == "train.py:3"
    np.testing.assert_array_equal(found.values, tensor(2, 4, start=21))
    weight = trace.read(trace.find("0/loading/model.layers.0.q_proj.weight:param"))
    assert weight.dims == ("dim_0", "dim_1")


@pytest.mark.parametrize("dims", [("a",), ("a", "a"), ("", ""), ("dim_1", ""), ("a_1", "a")])
def test_read_makes_odd_dimension_names_usable(tmp_path: Path, dims: tuple[str, ...]) -> None:
    path = build_trace(tmp_path / "t", [("0/forward/m#0:out", (tensor(2, 2), {"dims": dims}))])
    trace = Trace(path)
    assert len(set(trace.read(trace.events()[0]).dims)) == 2
    assert trace.events()[0].dims == dims


def test_what_was_not_kept_is_said_to_be_missing(path: Path) -> None:
    trace = Trace(path)
    text = trace.find("0/rendering/sample[0].text")
    assert text.value == "dose 0"
    for fetch in (trace.array, trace.read):
        with pytest.raises(TraceError, match=r"keeps no payload .*event\.value"):
            fetch(text)


def test_bytes_are_counted(path: Path) -> None:
    trace = Trace(path)
    event = trace.find("0/loading/model.layers.0.q_proj.weight:param")
    columns = trace.bytes_read
    assert 0 < columns < 10_000
    trace.array(event)
    assert trace.bytes_read == columns + 64
    trace.events(0)
    assert trace.bytes_read == columns + 64
    assert trace.bytes_stored == sum(f.stat().st_size for f in path.glob("segments/0/*.zip"))


def open_files() -> int:
    return sum(1 for _ in Path("/dev/fd").iterdir())


def test_long_traces_hold_few_files_open(tmp_path: Path) -> None:
    steps = 3 * CACHED_STEPS
    path = build_trace(
        tmp_path / "t", [(f"{s}/forward/m#0:out", tensor(2, start=s)) for s in range(steps)]
    )
    before = open_files()
    with Trace(path) as trace:
        events = trace.events()
        assert [float(trace.array(event)[0]) for event in events] == list(range(steps))
        assert open_files() <= before + CACHED_STEPS
    assert open_files() == before


def test_index_digests_tell_steps_apart(path: Path, tmp_path: Path) -> None:
    trace = Trace(path)
    index = [trace.index(step) for step in trace.steps]
    assert len({i.root for i in index}) == 3
    assert [i.scalars for i in index] == [{f"{s}/trajectory/loss#0:out": 3.0 - s} for s in range(3)]
    assert list(index[0].states) == ["loading"]
    assert [i.events for i in index] == [len(trace.events(s)) for s in range(3)]
    same = [("0/forward/m#0:out", tensor(2)), ("1/forward/m#0:out", tensor(2))]
    twin = Trace(build_trace(tmp_path / "same", same))
    first, second = (twin.index(step) for step in (0, 1))
    assert first.root == second.root


# ---- the tree --------------------------------------------------------------------------------


def test_tree_mirrors_the_modules(path: Path) -> None:
    tree = Trace(path).to_datatree()
    assert {node.path for node in tree.leaves} == {
        "/model/layers/0/q_proj/weight",
        "/model/layers/1/q_proj",
        "/model/norm",
        "/model/head",
        "/sample[0]/text",
        "/loss",
    }
    out = tree["model/layers/1/q_proj"]["forward_out"]
    assert out.dims == ("step", "batch", "hidden_4")
    assert tree["model/layers/1/q_proj"]["forward_in"].dims == ("step", "batch", "hidden_3")
    np.testing.assert_array_equal(out.sel(step=2).values, tensor(2, 4, start=21))
    assert tree["loss"]["trajectory_out"].values.tolist() == [3.0, 2.0, 1.0]
    assert tree["sample[0]/text"]["rendering_out"].sel(step=1).item() == "dose 1"
    assert out.attrs["op"] == "Linear"


@pytest.mark.parametrize(
    "key",
    [
        (slice(None),),
        (1,),
        (-1, 0),
        (slice(1, None), slice(None), slice(None, None, 2)),
        (slice(0, 0),),
        ([2, 0],),
        (slice(None, None, -1), 1, 2),
        (..., 0),
        (0, slice(0, 0)),
    ],
    ids=str,
)
def test_tree_indexing_is_that_of_the_stacked_array(path: Path, key: tuple[object, ...]) -> None:
    lazy = Trace(path).to_datatree()["model/layers/0/q_proj/forward_out"]
    whole = np.stack([tensor(2, 4, start=10 * step) for step in range(3)])
    np.testing.assert_array_equal(lazy[key].values, whole[key])


def test_tree_has_a_dimension_for_calls(path: Path) -> None:
    norm = Trace(path).to_datatree()["model/norm/forward_out"]
    assert norm.shape == (3, 2, 3)
    assert norm.dims[:2] == ("step", "call_2")
    assert norm.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(norm[2, 1].values.astype(float), [201, 202, 203])
    np.testing.assert_array_equal(norm[:, 0, 1].values.astype(float), [1, 101, 201])


def test_tree_keeps_ragged_values_per_step(path: Path) -> None:
    head = Trace(path).to_datatree()["model/head"]
    assert sorted(head.data_vars) == [f"forward_out_step_{s}" for s in range(3)]
    for step in range(3):
        found = head[f"forward_out_step_{step}"]
        np.testing.assert_array_equal(found.values[0], tensor(step + 1, 2))
        assert found[found.dims[0]].values.tolist() == [step]


def test_tree_gives_rarer_values_a_step_axis_of_their_own(path: Path) -> None:
    weight = Trace(path).to_datatree()["model/layers/0/q_proj/weight/loading_param"]
    assert weight.sizes["step_0"] == 1
    np.testing.assert_array_equal(weight.sel(step_0=0).values, tensor(4, 4))


def test_tree_is_lazy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(path)
    reads: list[str] = []
    array = reader.Trace.array
    monkeypatch.setattr(
        reader.Trace, "array", lambda self, e: (reads.append(str(e.site)), array(self, e))[1]
    )
    tree = trace.to_datatree()
    repr(tree)
    assert reads == []
    tree["model/layers/0/q_proj/forward_out"].sel(step=1).load()
    assert reads == ["1/forward/model.layers.0.q_proj#0:out"]


@pytest.mark.parametrize(
    "names",
    [
        ("a", "a.b", "a.b.c"),
        ("a.forward_out", "a"),
        ("a/b", "a.b"),
        ("", "."),
        ("..", "a..b"),
        ("\ud800", "é", "\0"),
        ("x" * 500,),
    ],
)
def test_tree_takes_any_name(tmp_path: Path, names: tuple[str, ...]) -> None:
    values = [(f"0/forward/{name}#0:out", tensor(2, start=i)) for i, name in enumerate(names)]
    tree = Trace(build_trace(tmp_path / "t", values)).to_datatree()
    found = [
        float(variable[0, 0])
        for node in tree.subtree
        for variable in node.dataset.data_vars.values()
    ]
    assert sorted(found) == [float(i) for i in range(len(names))]


def test_tree_of_an_empty_trace(tmp_path: Path) -> None:
    tree = Trace(build_trace(tmp_path / "t", [])).to_datatree()
    assert not tree.children
    assert not tree.variables


# ---- the overview ----------------------------------------------------------------------------


def shown(trace: Trace) -> str:
    console = Console(width=100, no_color=True, file=io.StringIO())
    console.print(trace.summary())
    return console.file.getvalue()


def test_summary_tells_what_is_there(path: Path) -> None:
    text = shown(Trace(path))
    for expected in (
        "run.zarr",
        "pytorch",
        "finished",
        "train.py --lr 1",
        "a note",
        "3 steps",
        "loading",
    ):
        assert expected in text
    (row,) = [line for line in text.splitlines() if line.startswith("│    1 ")]
    assert [cell.strip() for cell in row.strip("│").split("│")][:5] == ["1", "1", "", "7", "1"]


def test_summary_of_a_run_that_was_cut_off(tmp_path: Path) -> None:
    values = [(f"{s}/trajectory/loss#0:out", 1.0) for s in range(0, 60, 2)]
    text = shown(Trace(build_trace(tmp_path / "t", values, status="recording")))
    assert "cut off" in text
    assert "..." in text
    assert len(text.splitlines()) < 22
