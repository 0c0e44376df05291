"""The planted faults: what is changed on one side, and the site that a verdict has to name."""

# Importing a module adds its cases, in the order of the ladder.
from benchmarks.faults.planted import rendering, loading, forward, training  # isort: skip
from benchmarks.faults.planted.common import REGISTRY

__all__ = ["REGISTRY", "forward", "loading", "rendering", "training"]
