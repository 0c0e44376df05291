"""What mlx-lm's data sets and its batch iterator leave in a trace."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

import tracediff
from tests.test_record_rendering import MESSAGES, make_tokenizer
from tracediff.trace import Trace


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 4), nn.Linear(4, 12)

    def __call__(self, inputs: mx.array) -> mx.array:
        return self.head(self.embed(inputs))


def train(tmp_path: Path) -> None:
    from mlx_lm.tuner.datasets import CacheDataset, ChatDataset, create_dataset
    from mlx_lm.tuner.trainer import TrainingArgs
    from mlx_lm.tuner.trainer import train as fine_tune

    np.random.seed(0)
    mx.random.seed(0)
    long = [*MESSAGES, {"role": "user", "content": "dose dose dose yes"}]
    rows = [{"messages": long}, {"messages": MESSAGES}, {"messages": MESSAGES[:1] + long[1:]}]
    rows[2]["messages"] = [*long, *MESSAGES]
    config = SimpleNamespace(mask_prompt=True)
    data = create_dataset([*rows, {"messages": MESSAGES[::-1]}], make_tokenizer(), config)
    assert isinstance(data, ChatDataset)
    model = Model()
    fine_tune(
        model,
        optim.SGD(learning_rate=0.1),
        CacheDataset(data),
        args=TrainingArgs(
            batch_size=2,
            iters=2,
            max_seq_length=16,
            steps_per_eval=100,
            adapter_file=str(tmp_path / "adapters.safetensors"),
        ),
    )


def rendered(trace: Trace) -> dict[str, Any]:
    return {
        str(e.site): e.value if e.value is not None else trace.array(e).tolist()
        for e in trace.events()
        if e.site.phase == "rendering"
    }


def test_records_labels_and_the_order_of_batches(tmp_path: Path) -> None:
    with tracediff.record(tmp_path / "run", stack="mlx"):
        train(tmp_path)
    found = rendered(Trace(tmp_path / "run"))
    first = min(s for s in found if s.endswith(".record"))
    sample = first.removesuffix(".record")
    assert json.loads(found[first])["messages"] == json.loads(found[f"{sample}.messages"])
    ids, labels = found[f"{sample}.ids"], found[f"{sample}.labels"]
    assert len(ids) == len(labels)
    trained = [i for i, label in enumerate(labels) if label != -100]
    assert trained
    assert all(labels[i] == ids[i] for i in trained)
    drawn = [value for site, value in found.items() if site.endswith("batch.indices")]
    assert sorted(drawn[0] + drawn[1]) == [0, 1, 2, 3]


def test_detaching_puts_the_default_batch_iterator_back(tmp_path: Path) -> None:
    from mlx_lm.tuner import trainer

    before = trainer.train.__defaults__, trainer.iterate_batches
    with tracediff.record(tmp_path / "run", stack="mlx"):
        assert trainer.iterate_batches is not before[1]
    assert (trainer.train.__defaults__, trainer.iterate_batches) == before
