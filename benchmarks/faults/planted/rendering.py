"""Faults of the batches: text, token IDs, labels, masks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.faults.job import IGNORED, TEMPLATE, Batch
from benchmarks.faults.planted.common import fault
from benchmarks.faults.plants import (
    add,
    both,
    put,
)

OWN_LABELS = put("own_labels", True)


def _every_batch(edit: Callable[[Batch], None]) -> Callable[[list[Batch]], None]:
    def change(batches: list[Batch]) -> None:
        for batch in batches:
            edit(batch)

    return change


def _mask_of_ones(batch: Batch) -> None:
    batch["attention_mask"][:] = 1


def _left_padded(batch: Batch) -> None:
    for name, array in batch.items():
        lengths = batch["attention_mask"].sum(1) if name != "attention_mask" else array.sum(1)
        for row, length in zip(array, lengths, strict=True):
            row[:] = np.roll(row, len(row) - int(length))


def _shifted_labels(batch: Batch) -> None:
    batch["labels"][:, :-1] = batch["labels"][:, 1:].copy()
    batch["labels"][:, -1] = IGNORED


def _pads_trained(batch: Batch) -> None:
    batch["labels"][batch["attention_mask"] == 0] = 0


def _swapped(batches: list[Batch]) -> None:
    batches[0], batches[1] = batches[1], batches[0]


def _row_twice(batches: list[Batch]) -> None:
    for array in batches[1].values():
        array[1] = array[0]


fault(
    "bos added twice",
    "rendering/sample[0].ids:out",
    put("rendering.add_special_tokens", True),
    pairs="tt tm mm",
    source="A01",
)
fault(
    "template without end of turn",
    "rendering/sample[0].template:out",
    put("rendering.template", TEMPLATE.replace(" <end>", "")),
    source="A04",
)
fault(
    "template drops the system message",
    "rendering/sample[0].template:out",
    put("rendering.template", TEMPLATE.replace("in messages", "in messages[1:]")),
    source="A06",
)
fault(
    "trailing space trimmed",
    "rendering/sample[0].text:out",
    add("rendering.changed", str.rstrip),
    source="A03",
)
fault(
    "last token of a sample lost",
    "rendering/batch.input_ids:out",
    add("rendering.encoded", lambda ids, index: ids[:-1] if index == 1 else ids),
)
fault(
    "one token replaced, third batch",
    "rendering/batch.input_ids:out",
    both(
        put("steps", 3),
        add("rendering.encoded", lambda ids, i: [*ids[:-3], 9, *ids[-2:]] if i == 5 else ids),
    ),
    common=put("steps", 3),
    step=2,
)
fault(
    "truncated too short",
    "rendering/batch.input_ids:out rendering/batch.labels:out",
    put("rendering.max_length", 10),
)
fault(
    "labels shifted twice",
    "rendering/batch.labels:out",
    add("rendering.collated", _every_batch(_shifted_labels)),
    common=OWN_LABELS,
    source="A",
)
fault(
    "prompt trained as well",
    "rendering/batch.labels:out",
    put("rendering.train_on_prompt", True),
    common=OWN_LABELS,
)
fault(
    "padding trained",
    "rendering/batch.labels:out",
    add("rendering.collated", _every_batch(_pads_trained)),
    common=OWN_LABELS,
)
fault(
    "prompt trained as well, labels seen by the loss only",
    {"tt": "loss/loss.cross_entropy:labels", "tm": "loss/loss:out rendering/batch.labels:out"},
    put("rendering.train_on_prompt", True),
)
fault(
    "padding attended to",
    "rendering/batch.attention_mask:out",
    add("rendering.collated", _every_batch(_mask_of_ones)),
    pairs="tt",
)
fault(
    "padded on the left",
    "rendering/batch.input_ids:out rendering/batch.attention_mask:out",
    add("rendering.collated", _every_batch(_left_padded)),
)
fault(
    "batches in another order",
    "rendering/batch.input_ids:out rendering/batch.inputs:out",
    add("rendering.collated", _swapped),
    pairs="tt tm mm",
    source="D14",
)
fault(
    "one sample twice in a batch",
    "rendering/batch.input_ids:out",
    add("rendering.collated", _row_twice),
    step=1,
)
