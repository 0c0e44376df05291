"""What the collector of cyclic garbage and the recorders walk over while tests run.

Each recorder looks for garbage, and at all objects for those made before it was attached. With
every framework imported that would be most of the time of a test that records, so what the test
files have imported is left out.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


def pytest_collection() -> None:
    gc.disable()  # what is imported stays


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def imports_out_of_sight() -> None:
    """In each file anew, as frameworks import parts of themselves when they are first needed."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def imports_in_sight() -> Iterator[None]:
    """For a test of what a recorder makes of the objects of libraries."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()
