"""What is known of a value is right, whether it was taken for a new one or not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracediff.kernels import unpacked
from tracediff.summaries import Summaries, still
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
        found.append(summaries.of(array, sketched=True))
        if len(found) % 40 == 0:
            summaries.advance()
    for array, known in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(known.sketch, sketch(array))


def test_a_sample_is_taken_when_it_is_first_asked_for() -> None:
    """A value that an update made is known without one when a module is given it."""
    summaries, value = Summaries(brief=True, sampled=True), VALUES[-1]
    other = value + np.float32(1)
    made = summaries.of(value, False, sampled=False)
    assert still(made, value) is None
    summaries.advance()
    given = summaries.of(value, False)
    assert still(given, value) is given
    assert still(given, value.reshape(2, -1)) is given
    assert still(given, other) is None
    assert summaries.of(value, False, sampled=False) is given
