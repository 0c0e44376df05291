"""Which process of several this one is: launchers say it in the environment."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tracediff.errors import TraceError, UsageError
from tracediff.trace.manifest import is_locked

_VARIABLES: Final = (
    ("RANK", "WORLD_SIZE"),  # torchrun, accelerate, deepspeed
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun, mlx.launch --backend mpi
    ("MLX_RANK", "MLX_WORLD_SIZE"),  # mlx.launch, which tells the size with some backends only
)

PATIENCE: Final = 120.0
"""Seconds that a rank waits for rank 0 to begin."""

_PAUSE: Final = 0.05


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The rank of this process, 0 where it is alone.

    Raises:
        UsageError: The environment holds numbers that make no sense.
    """
    for name, size in _VARIABLES:
        rank, world = environment.get(name, ""), environment.get(size, "")
        if not rank or (name == "RANK" and not world):
            continue
        if not rank.isdecimal() or (world and not world.isdecimal()):
            raise UsageError(f"{name} is {rank!r} and {size} is {world!r}: they are to be numbers")
        if world and int(rank) >= int(world):
            raise UsageError(f"{name} is {rank} and {size} is {world}: there is no such rank")
        return int(rank)
    return 0


def await_rank_zero(path: Path, rank: int, patience: float | None = None) -> None:
    """Waits until rank 0 records into a trace.

    Raises:
        TraceError: It did not begin in time.
    """
    until = time.monotonic() + (PATIENCE if patience is None else patience)
    while not is_locked(path):
        if time.monotonic() > until:
            raise TraceError(
                f"rank {rank} found no recording of rank 0 at {path}: start both together, with "
                "one path that all of them reach"
            )
        time.sleep(_PAUSE)
