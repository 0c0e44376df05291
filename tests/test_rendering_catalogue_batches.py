"""Rows of the fault catalogue between token IDs and batches, planted: named with step, sample,
position and class.

Each is recorded twice in this process through the recorder, once right and once with the fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.rendering_jobs import Compare, Job, N, bpe, comparing, first, train, words
from tracediff.rendering import step


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    return comparing(tmp_path)


# ---- ids -> labels ----------------------------------------------------------------------------


def test_a12_pad_equals_eos(compare: Compare) -> None:
    tokenizer = words(bos=False, pad_token="</s>")
    rows = [tokenizer(text) for text in ("a b </s>", "a b c d </s>")]

    def right(features: Any) -> Any:
        batch = tokenizer.pad([dict(f) for f in features], return_tensors="pt")
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, N)
        return batch

    faulty = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    verdict = compare(
        lambda: train(right([tokenizer("a b </s>"), tokenizer("a b c d </s>")])),
        lambda: train(faulty([tokenizer("a b </s>"), tokenizer("a b c d </s>")])),
    )
    assert rows[0]["input_ids"][-1] == 1
    found = first(verdict, "batch.labels", "pad equals EOS", "batch.labels", 2)
    assert found.detail["row"] == 0
    assert found.detail["trained"] == {"baseline": 8, "target": 6}


def collated(rows: list[tuple[list[int], list[int]]]) -> Job:
    """Trains on rows of IDs and labels of one length, through a collator."""
    features = [{"input_ids": ids, "labels": labels} for ids, labels in rows]

    def job() -> None:
        from transformers import default_data_collator  # as a script imports it

        tokenizer = words(bos=False)
        for ids, _ in rows:
            tokenizer(" ".join(tokenizer.convert_ids_to_tokens(ids)))
        train(default_data_collator([dict(f) for f in features]))

    return job


def test_a13_the_eos_of_a_truncated_sample_is_masked(compare: Compare) -> None:
    short, long = ([4, 12, 13, 1], [N, N, 13, 1]), ([12, 13, 14, 1], [12, 13, 14, 1])
    verdict = compare(collated([short, long]), collated([short, (long[0], [12, 13, 14, N])]))
    first(verdict, "sample[1].labels", "mask off by one", "labels", 3)


def test_a13_the_first_answer_token_is_not_trained(compare: Compare) -> None:
    ids = [4, 12, 13, 1]
    verdict = compare(collated([(ids, [N, 12, 13, 1])]), collated([(ids, [N, N, 13, 1])]))
    first(verdict, "sample[0].labels", "mask off by one", "labels", 1)


def test_a14_the_answer_marker_is_not_found(compare: Compare) -> None:
    tokenizer = bpe(merges=(("#", "#"), ("Ġ", "##")))
    ids = tokenizer("x ##A: y")["input_ids"]

    def labels(marker: list[int]) -> list[int]:
        found = [i for i in range(len(ids)) if ids[i : i + len(marker)] == marker]
        start = found[0] + len(marker) if found else len(ids)
        return [N] * start + ids[start:]

    def job(marker: str) -> None:
        tokenizer("x ##A: y")
        step("labels", labels(tokenizer.convert_tokens_to_ids(tokenizer.tokenize(marker))))

    verdict = compare(lambda: job(" ##A:"), lambda: job("##A:"))
    found = verdict.first
    assert found is not None
    assert (found.path.rpartition(".")[2], found.pattern) == ("labels", "no trained tokens")
    assert found.detail["trained"] == {"baseline": 2, "target": 0}


def test_a16_a_mask_cut_at_the_wrong_end(compare: Compare) -> None:
    mask = [0, 0, 1, 0]
    verdict = compare(lambda: step("mask", mask[1:]), lambda: step("mask", mask[:-1]))
    found = first(verdict, "sample[0].mask", "shifted", "mask", 1)
    assert found.detail["offset"] == 1


def test_a17_labels_shifted_by_the_collator_and_again_by_the_loss(compare: Compare) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    shifted = torch.cat([ids[:, 1:], torch.tensor([[N]])], dim=1)
    verdict = compare(
        lambda: train({"input_ids": ids, "labels": ids}),
        lambda: train({"input_ids": ids, "labels": shifted}),
    )
    first(verdict, "batch.labels", "label shift twice", "batch.labels", 0)


def test_a18_truncation_leaves_nothing_to_train(compare: Compare) -> None:
    ids, labels = [4, 12, 13, 14, 15, 1], [N, N, N, 14, 15, 1]

    def job(side: str) -> Job:
        kept = slice(3, None) if side == "left" else slice(3)
        return collated([(ids[kept], labels[kept]), (ids[:3], ids[:3])])

    verdict = compare(collated([(ids[:3], [N, 12, 13])]), collated([(ids[:3], [N, N, N])]))
    found = first(verdict, "sample[0].labels", "no trained tokens", "labels", 1)
    assert found.detail["trained"] == {"baseline": 2, "target": 0}
    same = compare(job("right"), job("right"))
    assert same.outcome == "identical"
    assert any("no label of row 0 is trained" in warning for warning in same.warnings)


# ---- batch ------------------------------------------------------------------------------------

PADDED = torch.tensor([[2, 2, 2, 5, 6, 7, 8]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
FROM_MASK = torch.tensor([[0, 0, 0, 0, 1, 2, 3]])
COUNTING = torch.arange(7)[None]


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config).eval()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


def padded(model: nn.Module, positions: torch.Tensor) -> None:
    labels = PADDED.masked_fill(MASK == 0, N)
    labels[:, 3] = N  # what a padded position predicts is no result
    batch = {"input_ids": PADDED, "attention_mask": MASK, "position_ids": positions}
    train({**batch, "labels": labels}, model)


def test_a19_positions_that_count_the_padding(compare: Compare) -> None:
    verdict = compare(lambda: padded(gpt2(), FROM_MASK), lambda: padded(gpt2(), COUNTING))
    found = first(verdict, "batch.position_ids", "positions count padding", "batch.position_ids", 3)
    assert found.detail["starts"] == {"baseline": 0, "target": 3}


def test_a19_is_harmless_where_positions_are_relative(compare: Compare) -> None:
    verdict = compare(lambda: padded(llama(), FROM_MASK), lambda: padded(llama(), COUNTING))
    assert verdict.outcome == "equivalent", verdict.reason
    assert any("position_ids" in warning for warning in verdict.warnings)


DOCUMENTS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11, 1]}]


def test_a20_positions_of_a_pack_are_not_reset(compare: Compare) -> None:
    def job(reset: bool) -> None:
        batch = DataCollatorWithFlattening(return_tensors="pt")(DOCUMENTS)
        if not reset:
            batch["position_ids"] = torch.arange(8)[None]
        train(batch, llama())

    found = first(
        compare(lambda: job(True), lambda: job(False)),
        "batch.position_ids",
        "position IDs not reset",
        "batch.position_ids",
        3,
    )
    assert found.detail["documents"] == {"baseline": 2, "target": 1}


def test_a20_a_pack_whose_documents_see_each_other(compare: Compare) -> None:
    causal = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    blocks = causal.clone()
    blocks[:, :, 3:, :3] = False
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 1]])

    def job(mask: torch.Tensor) -> None:
        train({"input_ids": ids, "attention_mask": mask, "labels": ids}, llama())

    verdict = compare(lambda: job(blocks), lambda: job(causal))
    found = first(
        verdict,
        "batch.attention_mask",
        "packing without a boundary",
        "batch.attention_mask",
        None,
    )
    assert found.detail["documents"] == 2


def test_a21_another_weighting_of_packed_samples_is_no_rendering_fault(compare: Compare) -> None:
    logits = torch.linspace(-1, 1, 9 * 5).reshape(9, 5)
    labels = torch.arange(9) % 5

    class Weighted(nn.Module):
        def __init__(self, by_sample: bool) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.by_sample = by_sample

        def forward(self, input_ids: Any) -> Any:
            loss = nn.functional.cross_entropy(logits * self.scale, input_ids[0], reduction="none")
            parts = (loss[:7], loss[7:]) if self.by_sample else (loss,)
            return torch.stack([part.mean() for part in parts]).mean()

    verdict = compare(
        lambda: train({"input_ids": labels[None]}, Weighted(True)),
        lambda: train({"input_ids": labels[None]}, Weighted(False)),
    )
    assert verdict.first is not None
    assert verdict.first.stage not in ("rendering", "loading")
