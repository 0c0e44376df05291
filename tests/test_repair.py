"""`tracediff repair`: what is sound is kept bit for bit, what is not is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.damage import flip, offset_of, segment
from tracediff.cli import main
from tracediff.errors import NotATraceError, TraceExistsError
from tracediff.events import Run, Site
from tracediff.testing import build_event, build_trace
from tracediff.trace import Trace, TraceWriter, repair, verify
from tracediff.trace.names import payload_key, payload_site


def value(step: int, place: int) -> np.ndarray[Any, Any]:
    return np.arange(40.0) + 100 * step + place


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three steps with a text, samples, three tensors and a loss each."""

    def values() -> Iterator[tuple[str, Any]]:
        for step in range(3):
            yield f"{step}/rendering/prompt.text", f"dose {step}"
            yield f"{step}/rendering/sample[0].text", f"How much on day {step}?"
            yield from ((f"{step}/forward/m{i}#0:out", value(step, i)) for i in range(3))
            yield f"{step}/trajectory/loss#0:out", 0.5 * step

    return build_trace(tmp_path / "t.zarr", values())


def contents(path: Path) -> dict[str, Any]:
    """Every event's value by site."""
    with Trace(path) as trace:
        return {
            str(event.site): trace.array(event).tolist() if event.payload else event.value
            for event in trace.events()
        }


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_sound_trace_is_copied_byte_by_byte(path: Path, tmp_path: Path) -> None:
    result = repair(path, tmp_path / "new.zarr")
    assert result.whole
    assert result.copied == 3
    assert files(tmp_path / "new.zarr") == files(path)


def test_a_damaged_payload_costs_that_value_only(path: Path, tmp_path: Path) -> None:
    before = contents(path)
    flip(segment(path), offset_of(segment(path), "tensors/forward/m1#0/out/c/0") + 3)
    damaged = files(path)
    result = repair(path, new := tmp_path / "new.zarr")
    assert result.rebuilt == {"segments/0/00000001.zip": ["value of 1/forward/m1#0:out"]}
    assert result.copied == 2
    assert verify(new).sound
    after = contents(new)
    assert after.pop("1/forward/m1#0:out") is None
    del before["1/forward/m1#0:out"]
    assert after == before
    assert files(path) == damaged, "the damaged trace was touched"


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_a_cut_segment_gives_the_values_before_the_cut(
    path: Path, tmp_path: Path, keep: float
) -> None:
    file = segment(path)
    file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])
    result = repair(path, new := tmp_path / "new.zarr")
    assert list(result.rebuilt) == ["segments/0/00000001.zip"]
    assert verify(new).sound
    found = {site: kept for site, kept in contents(new).items() if site.startswith("1/")}
    assert found == {f"1/forward/m{i}#0:out": value(1, i).tolist() for i in range(3)}


def test_a_step_that_was_never_committed_is_salvaged(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.zarr", Run(stack="mlx"))
    orders = count()
    values = {
        f"0/forward/layers.{i}.x/y#1:grad_out": np.arange(10_000.0) + i for i in range(3)
    }  # smaller ones wait for others before they are written
    for site, array in values.items():
        writer.add(build_event(site, array, next(orders)), array)
    shutil.copytree(tmp_path / "t.zarr", killed := tmp_path / "killed.zarr")  # as a kill leaves it
    writer.finish()
    assert verify(killed).unfinished == ["segments/0/.00000000.zip.tmp"]
    result = repair(killed, new := tmp_path / "new.zarr")
    assert result.whole, "no committed step was lost"
    assert result.salvaged == {"segments/0/.00000000.zip.tmp": 3}
    assert contents(new) == {site: array.tolist() for site, array in values.items()}
    with Trace(new) as trace:
        assert trace.run.status == "failed"
        assert trace.run.stack == "mlx"
        assert trace.run.notes == ("repaired: 1 steps salvaged before its commit",)


def test_a_lost_manifest_needs_the_stack(path: Path, tmp_path: Path) -> None:
    (path / "zarr.json").unlink()
    with pytest.raises(NotATraceError, match="give --stack"):
        repair(path, tmp_path / "new.zarr")
    assert not (tmp_path / "new.zarr").exists()
    result = repair(path, new := tmp_path / "new.zarr", stack="pytorch")
    assert result.copied == 3
    with Trace(new) as trace:
        assert trace.steps == [0, 1, 2]
        assert trace.run.stack == "pytorch"


def test_what_is_there_is_never_overwritten(path: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceExistsError):
        repair(path, path)
    (other := tmp_path / "other").mkdir()
    (other / "mine.txt").write_text("x")
    with pytest.raises(TraceExistsError):
        repair(path, other)
    assert (other / "mine.txt").read_text() == "x"


def test_the_command_says_what_was_lost(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["repair", str(path), "-o", str(tmp_path / "a")]) == 0
    flip(segment(path), offset_of(segment(path), "tensors/forward/m1#0/out/c/0"))
    capsys.readouterr()
    assert main(["repair", str(path), "-o", str(tmp_path / "b"), "--json", "-"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["whole"] is False
    assert told["rebuilt"] == {"segments/0/00000001.zip": ["value of 1/forward/m1#0:out"]}
    assert main(["repair", str(tmp_path / "none"), "-o", str(tmp_path / "c")]) == 2


@given(
    st.sampled_from(["forward", "rng", "rendering", "loss"]),
    st.text(max_size=20),
    st.integers(0, 99),
    st.text(min_size=1, max_size=8),
)
def test_a_site_is_read_back_from_its_key(phase: str, path: str, call: int, port: str) -> None:
    site = Site(7, phase, path, call, port)
    assert payload_site(payload_key(site), 7) == site
