"""What the planted faults of all stages share."""

from __future__ import annotations

from benchmarks.faults.case import Registry
from benchmarks.faults.job import Lora
from benchmarks.faults.plants import put

REGISTRY = Registry()
fault = REGISTRY.fault

LORA = put("lora", Lora())
DROPOUT = put("lora", Lora(dropout=0.2))

L1 = "model.layers.1"
