"""What is known of a value is right, whether it was taken for new or not, and the same in C."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel_values import layouts, needs_c, values
from tracediff import kernels
from tracediff.events import Event, Run
from tracediff.kernels import STATISTICS, unpacked
from tracediff.policy import Policy
from tracediff.summaries import LARGEST_SCRATCH, Summaries, Summary, still
from tracediff.tape import Tape
from tracediff.trace import Trace, TraceWriter
from tracediff.trace.dtypes import DTYPES
from tracediff.trace.summary import digest, fingerprint, sketch

VALUES = [np.full(size, value, np.float32) for value in (0.0, 1.5) for size in (1, 5_000, 40_000)]
TAKEN = st.tuples(st.sampled_from(range(len(VALUES))), st.booleans())


@given(brief=st.booleans(), steps=st.lists(st.lists(TAKEN, max_size=5), max_size=4))
def test_values_that_come_again_in_any_order(
    brief: bool, steps: list[list[tuple[int, bool]]]
) -> None:
    summaries = Summaries(brief)
    for step in steps:
        for place, sketched in step:
            value = VALUES[place]
            found = summaries.of(value, sketched)
            assert found.digest == digest(value)
            assert found.dtype == "float32"
            known = fingerprint(value, brief=brief)
            np.testing.assert_array_equal(unpacked(found.statistics), known)
            if sketched:
                assert found.sketch is not None
                np.testing.assert_array_equal(found.sketch, sketch(value))
        summaries.advance()


def test_sketches_that_are_kept_are_not_written_over() -> None:
    summaries = Summaries(brief=True)
    arrays = np.random.default_rng(0).standard_normal((150, 300), np.float32)
    found = []
    for array in arrays:
        found.append(summaries.of(array, True))
        if len(found) % 40 == 0:
            summaries.advance()
    for array, known in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(known.sketch, sketch(array))


def test_a_value_is_known_again_by_its_sample() -> None:
    value = VALUES[-1]
    other = value + np.float32(1)
    found = Summaries(brief=True, sampled=True).of(value, False)
    assert still(found, value) is found
    assert still(found, value.reshape(2, -1)) is found
    assert still(found, other) is None
    assert still(Summaries(brief=True).of(value, False), value) is None


@needs_c
@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_the_c_code_finds_the_same(name: str, brief: bool) -> None:
    plain = [values(name, size) for size in (0, 7, 61, 5_000, 70_000)]
    arrays = [*plain, *layouts(values(name, 2 * 3 * 40 * 70).reshape(2, 3, 40, 70))]
    native, other = (summaries(engine, brief) for engine in ("native", "numpy"))
    for _ in range(2):
        for array in arrays:
            for sketched in (True, False):
                found, expected = native.of(array, sketched), other.of(array, sketched)
                assert type(found) is Summary
                assert found[:2] == expected[:2] == (digest(array), array.dtype.name)
                assert found.sample == expected.sample
                known = unpacked(found.statistics), unpacked(expected.statistics)
                np.testing.assert_allclose(*known, rtol=1e-12)
                if sketched:
                    np.testing.assert_array_equal(found.sketch, expected.sketch)
        native.advance()
        other.advance()


@needs_c
def test_an_array_too_large_for_a_copy_that_is_kept() -> None:
    large = np.ones((2, (LARGEST_SCRATCH >> 3) + 1), np.float32).T
    large[7, 1] = 3
    found = summaries("native", brief=True).of(large, False)
    sample = large.reshape(-1)[:: large.size // 8 | 1]
    assert (found.digest, found.sample) == (digest(large), sample.tobytes())
    assert unpacked(found.statistics)[STATISTICS.index("max")] == 3


def summaries(engine: str, brief: bool) -> Summaries:
    with kernels.using(engine):
        return Summaries(brief, sampled=True)


EMITTED = st.tuples(
    st.sampled_from(["loading", "forward", "backward", "optimizer", "rendering"]),
    st.sampled_from(["in", "out", "param", "update"]),
    st.sampled_from(range(len(VALUES) + 1)),
    st.booleans(),
)
"""Stage, port, place of the value (beyond the last one a text), and whether it is told to be the
latest event of that value again."""


@needs_c
@given(
    level=st.sampled_from(["digest", "module", "op-digest"]),
    steps=st.lists(st.lists(EMITTED, max_size=6), max_size=4),
)
def test_events_are_the_same_where_c_code_keeps_them(
    level: str, steps: list[list[tuple[str, str, int, bool]]]
) -> None:
    native, other = (recorded(engine, level, steps) for engine in ("native", "numpy"))
    assert len(native) == sum(map(len, steps))
    for found, expected in zip(native, other, strict=True):
        assert replace(found, fingerprint=(), sketch=None) == replace(
            expected, fingerprint=(), sketch=None
        )
        np.testing.assert_allclose(found.fingerprint, expected.fingerprint, rtol=1e-12)
        assert (found.sketch is None) == (expected.sketch is None)
        if found.sketch is not None:
            np.testing.assert_array_equal(found.sketch, expected.sketch)


@pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_c), "numpy"])
def test_a_view_is_not_hashed_again_unless_it_is_seen_to_have_changed(
    tmp_path: Path, engine: str
) -> None:
    value = np.arange(40_000, dtype=np.float32)
    run = Run(stack="pytorch", level="op-digest")
    with kernels.using(engine), Tape(TraceWriter(tmp_path / "t", run), Policy("op-digest")) as tape:
        made = tape.emit("forward", "a", "out", value)
        value[1] = 7  # of which there is no sample
        tape.emit("forward", "b", "in", value, twin=made)
        value[0] = 7
        tape.emit("forward", "c", "in", value, twin=made)
    first, same, changed = Trace(tmp_path / "t").events()
    assert same.digest == first.digest == digest(np.arange(40_000, dtype=np.float32))
    assert changed.digest == digest(value)


def recorded(engine: str, level: str, steps: list[list[tuple[str, str, int, bool]]]) -> list[Event]:
    """What a tape writes of the same events on an engine."""
    with TemporaryDirectory() as folder, kernels.using(engine):
        with Tape(
            TraceWriter(Path(folder) / "t", Run(stack="pytorch", level=level)), Policy(level)
        ) as tape:
            for step in steps:
                latest: dict[int, int] = {}
                for call, (phase, port, place, again) in enumerate(step):
                    value = VALUES[place].reshape(-1, 1).T if place < len(VALUES) else "text"
                    twin = latest.get(place) if again and place < len(VALUES) else None
                    latest[place] = tape.emit(phase, "a", port, value, call=call, twin=twin)
                tape.advance()
        trace = Trace(Path(folder) / "t")
        return [event for step in trace.steps for event in trace.events(step)]
