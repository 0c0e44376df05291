"""In which order files of tests run, what they are spared, and what those of commands share.

The longest files come first, so that no process has one left when the others are done.

Each recorder looks for garbage, and at all objects for those made before it was attached. With
every framework imported that would be most of the time of a test that records, so what the test
files have imported is left out.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import Cli, build, runner

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: no GPU is needed then

LONGEST = (
    "test_postmortem.py",
    "test_example.py",
    "test_selfcheck.py",
    "test_fault_benchmark.py",
    "test_render_oracle.py",
    "test_stage_substitution.py",
    "test_deepening.py",
    "test_replay.py",
    "test_shards.py",
    "test_rendering_catalogue.py",
    "test_course.py",
    "test_package.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


# ---- what is imported ----------------------------------------------------------------------------


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


# ---- commands ----------------------------------------------------------------------------------


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return build(tmp_path / "baseline.zarr")


@pytest.fixture
def same(tmp_path: Path) -> Path:
    return build(tmp_path / "same.zarr")


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    return build(tmp_path / "drifted.zarr", scale=1.5)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    return runner(capfd)
