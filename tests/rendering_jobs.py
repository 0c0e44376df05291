"""Jobs that render, and two recordings of them compared: what the tests of the catalogue share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
)

import tracediff
from tracediff.verdict import Divergence, Verdict

Job = Callable[[], Any]
Compare = Callable[[Job, Job], Verdict]
N = -100
USER, MODEL, TURN = (
    {"role": "user", "content": "dose ?"},
    {"role": "assistant", "content": "five mg"},
    {"role": "user", "content": "why ?"},
)
PLAIN = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


def words(template: str = PLAIN, *, bos: bool = True, **special: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer; `bos` has its post-processor put `<s>` in front."""
    vocab = ["<s>", "</s>", "<pad>", "[UNK]", "user", "assistant", "system", "dose", "?"]
    vocab += ["five", "mg", "why", "a", "b", "c", "d", "é"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocab)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, **(names | special)
    )


def bpe(splitter: Any = None, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE of all printable ASCII characters and a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {c: i for i, c in enumerate(letters, 2)}
    for one, other in merges:
        vocab[one + other] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, list(merges)))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter is None)
    backend.pre_tokenizer = (
        pre_tokenizers.Sequence([splitter, byte_level]) if splitter else byte_level
    )
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


class Tiny(nn.Module):
    """A model that takes what a collator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 4)
        self.head = nn.Linear(4, 32)

    def forward(self, input_ids: Any, labels: Any = None, **others: Any) -> Any:
        logits = self.head(self.embed(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(batch: Any, model: nn.Module | None = None) -> None:
    torch.manual_seed(0)
    model = model or Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(**batch)
    (output if isinstance(output, torch.Tensor) else output.loss).backward()
    optimizer.step()


def comparing(tmp_path: Path) -> Compare:
    """Records two jobs and bisects them."""

    def run(right: Job, faulty: Job) -> Verdict:
        for name, job in (("right", right), ("faulty", faulty)):
            with tracediff.record(tmp_path / name, stack="pytorch", overwrite=True):
                job()
        return tracediff.bisect(tmp_path / "right", tmp_path / "faulty")

    return run


def first(verdict: Verdict, path: str, pattern: str, step: str, index: int | None) -> Divergence:
    """The first divergence, which must be of rendering and have this place and class."""
    found = verdict.first
    assert found is not None, verdict.reason
    assert (found.stage, found.path, found.pattern) == ("rendering", path, pattern), verdict.reason
    assert found.detail["step"] == step
    if index is not None:
        assert found.detail["index"] == index
    if path.startswith("sample["):
        assert path.startswith(f"sample[{found.detail['sample']}].")
    return found
