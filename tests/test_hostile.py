"""A slice of `benchmarks/fuzz.py`: traces that someone made to hurt."""

from __future__ import annotations

import pytest

from benchmarks.fuzz import fuzz


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mutated_traces_end_in_a_verdict_or_one_sentence() -> None:
    endings, broken = fuzz(400)
    assert not broken
    # Both kinds of answer were met: mutants that read, and mutants that do not.
    assert any(ending.startswith("diverged") for ending in endings)
    assert any(ending.startswith("CorruptTraceError") for ending in endings)
