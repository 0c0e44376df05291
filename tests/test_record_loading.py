"""What data loaders, collators, `datasets.map`, trl, Jinja and plain code leave in a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorForLanguageModeling

import tracediff
from tests.test_record_rendering import MESSAGES, TEMPLATE, TEXT, make_tokenizer
from tracediff.errors import UsageError
from tracediff.rendering import step
from tracediff.trace import Trace

TEXTS = ["dose 5", "no yes", "dose", "5 5 5 no", "yes"]
Job = Callable[[], Any]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 4), nn.Linear(4, 12)

    def forward(self, input_ids: Any, labels: Any) -> Any:
        logits = self.head(self.embed(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Lazy(Dataset[Any]):
    """Tokenizes when an item is asked for: in a worker process, if there is one."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> Any:
        return self.tokenizer(TEXTS[index])


def train(workers: int, persistent: bool = False) -> list[float]:
    torch.manual_seed(0)
    data, model = Lazy(), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collate = DataCollatorForLanguageModeling(data.tokenizer, mlm=False)
    loader = DataLoader(
        *(data, 2, True),
        num_workers=workers,
        collate_fn=collate,
        persistent_workers=persistent,
    )
    losses = []
    for _ in range(2):
        for batch in loader:
            loss = model(batch["input_ids"], batch["labels"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return losses


def record(path: Path, job: Job) -> Trace:
    with tracediff.record(path, stack="pytorch", overwrite=True):
        job()
    return Trace(path)


def rendered(trace: Trace) -> list[tuple[str, Any]]:
    """Path and value of all rendering events, in order."""
    return [
        (e.site.path, e.value if e.value is not None else trace.array(e).tolist())
        for e in trace.events()
        if e.site.phase == "rendering"
    ]


def test_worker_processes_leave_the_same_trace_as_none(tmp_path: Path) -> None:
    alone = record(tmp_path / "alone", lambda: train(0))
    workers = record(tmp_path / "workers", lambda: train(2))
    assert rendered(workers) == rendered(alone)
    assert workers.run.notes == ()
    found = rendered(alone)
    assert ("sample[0].text", "dose 5") in found
    drawn = [index for path, value in found if path == "batch.indices" for index in value]
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == [0, 1, 2, 3, 4]
    assert dict(found)["sample[0].ids"] == [2, 5, 6]
    assert tracediff.bisect(tmp_path / "alone", tmp_path / "workers").outcome == "identical"


def test_workers_that_live_on_leave_the_same_trace_each_time(tmp_path: Path) -> None:
    runs = [rendered(record(tmp_path / str(i), lambda: train(2, True))) for i in (0, 1)]
    assert runs[0] == runs[1]
    assert [path for path, _ in runs[0]].count("sample[9].text") == 1


def test_loading_is_the_same_with_and_without_a_recorder(tmp_path: Path) -> None:
    bare = train(2)
    recorded: list[list[float]] = []
    record(tmp_path / "run", lambda: recorded.append(train(2)))
    assert recorded == [bare]


def test_workers_that_were_not_forked_are_told(tmp_path: Path) -> None:
    def job() -> None:
        loader = DataLoader(
            torch.arange(4).reshape(2, 2).tolist(),  # type: ignore[arg-type]
            num_workers=1,
            multiprocessing_context="spawn",
            collate_fn=torch.tensor,
        )
        list(loader)

    trace = record(tmp_path / "run", job)
    assert any("not forked" in note for note in trace.run.notes)


def test_labels_of_features_are_of_the_sample_with_those_ids(tmp_path: Path) -> None:
    def job() -> None:
        tokenizer = make_tokenizer()
        features = [{**tokenizer(text), "labels": [-100, 5]} for text in ("dose", "no")]
        features[1]["labels"] = [-100, 8]
        loader = DataLoader(features, 2, sampler=[1, 0], collate_fn=_tensors)  # type: ignore[arg-type]
        for batch in loader:
            Model()(batch["input_ids"], batch["labels"])

    found = dict(rendered(record(tmp_path / "run", job)))
    assert found["sample[0].labels"] == [-100, 5]
    assert found["sample[1].labels"] == [-100, 8]
    assert found["batch.indices"] == [1, 0]
    assert found["batch.input_ids"] == [[2, 8], [2, 5]]


def _tensors(features: Any) -> Any:
    return {name: torch.tensor([f[name] for f in features]) for name in ("input_ids", "labels")}


# ---- datasets and trl -------------------------------------------------------------------------


def tokenize(example: Any) -> Any:
    tokenizer = make_tokenizer()
    text = tokenizer.apply_chat_template(example["messages"], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return {"input_ids": ids, "labels": [-100, *ids[1:]]}


@pytest.mark.parametrize("processes", [None, 2])
def test_map_records_each_record_and_its_labels(tmp_path: Path, processes: int | None) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"id": i, "messages": MESSAGES[: 1 + i % 2]} for i in range(3)]

    def job() -> None:
        datasets.disable_progress_bars()
        made = datasets.Dataset.from_list(rows).map(tokenize, num_proc=processes)
        assert made[1]["labels"][0] == -100

    trace = record(tmp_path / "run", job)
    found = rendered(trace)
    assert [path for path, _ in found if path.startswith("sample[1].")] == [
        f"sample[1].{name}" for name in ("record", "messages", "template", "text", "ids", "labels")
    ]
    assert json.loads(dict(found)["sample[1].record"])["id"] == 1
    assert dict(found)["sample[1].text"] == TEXT
    assert dict(found)["sample[2].text"] == "<user> dose 5 µg\n"
    assert trace.run.notes == ()


def test_a_map_from_the_cache_is_told(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"messages": MESSAGES}]).to_parquet(tmp_path / "rows.parquet")
    load = datasets.Dataset.from_parquet
    source, cache = str(tmp_path / "rows.parquet"), str(tmp_path / "cache")
    load(source, cache_dir=cache).map(tokenize)
    trace = record(tmp_path / "run", lambda: load(source, cache_dir=cache).map(tokenize))
    assert rendered(trace) == []
    assert any("from a cache" in note for note in trace.run.notes)


def test_a_batched_map_records_each_record(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": TEXTS[:3]})

    def job() -> None:
        tokenizer = make_tokenizer()
        data.map(lambda batch: tokenizer(batch["text"]), batched=True, new_fingerprint="again")

    found = dict(rendered(record(tmp_path / "run", job)))
    assert [json.loads(found[f"sample[{i}].record"])["text"] for i in range(3)] == TEXTS[:3]
    assert found["sample[1].ids"] == [2, 8, 9]


@pytest.mark.slow
def test_trl_fine_tunes_with_the_whole_chain_in_the_trace(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from transformers import LlamaConfig, LlamaForCausalLM

    def job() -> None:
        tokenizer = make_tokenizer()
        tokenizer.eos_token = "no"
        tokenizer.chat_template = TEMPLATE
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
        data = datasets.Dataset.from_list([{"messages": MESSAGES}] * 2)
        options = trl.SFTConfig(
            output_dir=str(tmp_path / "out"),
            max_steps=1,
            report_to="none",
            per_device_train_batch_size=2,
            bf16=False,
            use_cpu=True,
        )
        trl.SFTTrainer(
            LlamaForCausalLM(config), options, train_dataset=data, processing_class=tokenizer
        ).train()

    found = dict(rendered(record(tmp_path / "run", job)))
    for name in ("record", "messages", "template", "ids"):
        assert f"sample[0].{name}" in found
    assert {"batch.indices", "batch.samples", "batch.input_ids", "batch.labels"} <= set(found)


# ---- Jinja and plain code ---------------------------------------------------------------------


def test_jinja_used_directly(tmp_path: Path) -> None:
    def job() -> None:
        environment = jinja2.Environment()
        chat = environment.from_string(TEMPLATE).render(
            messages=MESSAGES, add_generation_prompt=True, tools=[{"name": "f"}]
        )
        make_tokenizer()(chat)
        jinja2.Template("Q: {{ question }}").render(question="dose?")

    trace = record(tmp_path / "run", job)
    found = dict(rendered(trace))
    assert json.loads(found["sample[0].messages"]) == MESSAGES
    assert json.loads(found["sample[0].tools"]) == [{"name": "f"}]
    assert found["sample[0].template"] == found["sample[0].text"]
    assert json.loads(found["sample[1].record"]) == {"question": "dose?"}
    assert found["sample[1].template"] == "Q: dose?"
    inputs = trace.find("0/rendering/sample[0].template").attributes
    assert inputs["add_generation_prompt"] is True
    assert len(inputs["template"]) == 12


def test_plain_code_tells_of_its_steps(tmp_path: Path) -> None:
    def job() -> None:
        for key in ("a", "b"):
            step("record", {"id": key}, sample=key)
        for key in ("a", "b"):
            step("template", f"dose {key}", sample=key, max_length=4)
        make_tokenizer()("dose a")
        step("labels", torch.tensor([1, -100]), sample="b")
        step("mask", np.array([True, False]), sample="b")
        step("cleaned", "x")
        step("ids", [])

    trace = record(tmp_path / "run", job)
    found = dict(rendered(trace))
    assert json.loads(found["sample[0].record"]) == {"id": "a"}
    assert found["sample[0].ids"] == [2, 5, 0]
    assert found["sample[1].labels"] == [1, -100]
    assert found["sample[1].mask"] == [1, 0]
    assert (found["sample[2].cleaned"], found["sample[2].ids"]) == ("x", [])
    template = trace.find("0/rendering/sample[1].template")
    assert template.attributes == {"max_length": 4}
    labels = trace.find("0/rendering/sample[1].labels")
    assert (labels.kind, labels.dims) == ("labels", ("sequence",))


def test_a_step_means_nothing_where_nothing_is_recorded() -> None:
    step("text", "nobody listens", sample=1)


def test_a_step_needs_a_name_that_a_path_can_hold(tmp_path: Path) -> None:
    with (
        tracediff.record(tmp_path / "run", stack="pytorch"),
        pytest.raises(UsageError, match="no name of a step"),
    ):
        step("a.b/c", "text")
