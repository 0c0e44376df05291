"""Every rendering row of the fault catalogue, planted: named with step, sample, position, class.

Each row is recorded twice in this process through the recorder, once right and once with the fault.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import tracediff
from tracediff.rendering import step
from tracediff.verdict import Divergence, Verdict

Job = Callable[[], Any]
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


@pytest.fixture
def compare(tmp_path: Path) -> Callable[[Job, Job], Verdict]:
    def run(right: Job, faulty: Job) -> Verdict:
        for name, job in (("right", right), ("faulty", faulty)):
            with tracediff.record(tmp_path / name, stack="pytorch", overwrite=True):
                job()
        return tracediff.bisect(tmp_path / "right", tmp_path / "faulty")

    return run


Compare = Callable[[Job, Job], Verdict]


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


# ---- template -> text -> ids ------------------------------------------------------------------


def test_a01_bos_from_the_template_and_again_from_the_tokenizer(compare: Compare) -> None:
    tokenizer = words("{{ bos_token }} " + PLAIN)
    verdict = compare(
        lambda: tokenizer.apply_chat_template([USER]),
        lambda: tokenizer(tokenizer.apply_chat_template([USER], tokenize=False)),
    )
    found = first(verdict, "sample[0].ids", "BOS twice", "special tokens", 1)
    assert found.detail["added"] == [0]
    assert found.detail["special"]["target"]["BOS"] == 2


def test_a02_no_bos_in_the_template_and_none_in_one_call(compare: Compare) -> None:
    tokenizer = words()
    verdict = compare(
        lambda: tokenizer(tokenizer.apply_chat_template([USER], tokenize=False)),
        lambda: tokenizer.apply_chat_template([USER]),
    )
    found = first(verdict, "sample[0].ids", "BOS missing", "special tokens", 0)
    assert {side: c["BOS"] for side, c in found.detail["special"].items()} == {
        "baseline": 1,
        "target": 0,
    }


def test_a03_the_last_line_break_of_the_prompt(compare: Compare) -> None:
    tokenizer = words("{% for m in messages %}{{ m.content }}{% endfor %} assistant{{ '\\n\\n' }}")

    def job(cut: int) -> None:
        text = tokenizer.apply_chat_template([USER], tokenize=False)
        tokenizer(text[: len(text) - cut])

    newline = bpe(merges=(("Ċ", "Ċ"),))
    newline.chat_template = tokenizer.chat_template
    tokenizer = newline
    verdict = compare(lambda: job(0), lambda: job(1))
    first(verdict, "sample[0].text", "newline", "text", len("dose ? assistant\n"))


def test_a04_turns_that_are_not_closed(compare: Compare) -> None:
    closing = "{% for m in messages %}{{ m.role }} {{ m.content }} {{ eos_token }}{% endfor %}"
    messages = [USER, MODEL, TURN]
    verdict = compare(
        lambda: words(closing).apply_chat_template(messages),
        lambda: words(PLAIN).apply_chat_template(messages),
    )
    found = first(
        verdict, "sample[0].template", "EOS missing", "template inputs", len("user dose ? ")
    )
    assert found.detail["eos"] == {"baseline": 3, "target": 0}
    assert "template" in found.detail["inputs"]


def test_a04_only_bos_is_a_class_of_its_own(compare: Compare) -> None:
    verdict = compare(
        lambda: words("{{ bos_token }}" + PLAIN).apply_chat_template([USER]),
        lambda: words(PLAIN).apply_chat_template([USER]),
    )
    first(verdict, "sample[0].template", "BOS missing", "template inputs", 0)


TOOL = {
    "type": "function",
    "function": {"name": "lookup", "description": "a < b & c's é", "parameters": {"b": 1, "a": {}}},
}
WITH_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + PLAIN


def test_a05_tojson_of_another_engine(compare: Compare) -> None:
    def stock() -> None:
        template = jinja2.Environment().from_string(WITH_TOOLS)
        words()(template.render(messages=[USER], tools=[TOOL]))

    verdict = compare(
        lambda: words()(
            words(WITH_TOOLS).apply_chat_template([USER], tools=[TOOL], tokenize=False)
        ),
        stock,
    )
    found = verdict.first
    assert found is not None
    assert (found.path, found.pattern) == ("sample[0].template", "JSON serialisation")
    assert found.detail["ways"] == ["order of keys", "escapes"]


def test_a06_a_fallback_template_without_tools(compare: Compare) -> None:
    def fallback() -> None:
        warnings.warn("unknown filter: the fallback template is used", stacklevel=1)
        words(PLAIN).apply_chat_template([USER], tools=[TOOL])

    verdict = compare(lambda: words(WITH_TOOLS).apply_chat_template([USER], tools=[TOOL]), fallback)
    found = first(verdict, "sample[0].template", "tools missing", "template inputs", 0)
    assert "lookup" in found.meaning
    assert any(
        "warning" in group.reason or "setting" in group.reason for group in verdict.unmatched
    )


def test_a07_content_as_parts(compare: Compare) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "dose ?"}]}]
    template = "{% for m in messages %}{{ m.content if m.content is string else 'a' }}{% endfor %}"
    verdict = compare(
        lambda: words(template).apply_chat_template([USER]),
        lambda: words(template).apply_chat_template(parts),
    )
    found = first(verdict, "sample[0].messages", "content parts", "messages", None)
    assert found.detail["place"] == "[0].content"


def test_a07_parts_that_become_the_same_text_are_a_note(compare: Compare) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "dose ?"}]}]
    template = (
        "{% for m in messages %}"
        "{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    )
    verdict = compare(
        lambda: words(template).apply_chat_template([USER]),
        lambda: words(template).apply_chat_template(parts),
    )
    assert verdict.outcome == "equivalent"
    assert any("sample[0].messages differs, with no effect" in w for w in verdict.warnings)


def test_a08_the_clock(compare: Compare) -> None:
    def dated(default: str, **variables: str) -> None:
        tokenizer = bpe()
        tokenizer.chat_template = "today {{ date_string or " + default + " }} " + PLAIN
        tokenizer.apply_chat_template([USER], **variables)

    verdict = compare(lambda: dated("strftime_now('%d %b %Y')"), lambda: dated("'26 Jul 2024'"))
    found = first(verdict, "sample[0].template", "date", "template inputs", None)
    assert "clock" in found.detail["inputs"]
    days = ("1 May 2026", "2 May 2026")
    verdict = compare(*(lambda day=day: dated("''", date_string=day) for day in days))
    found = first(verdict, "sample[0].template", "date", "template inputs", len("today "))
    told = found.detail["inputs"]
    assert told == {"date_string": {"baseline": days[0], "target": days[1]}}


KEEPS_LAST = (
    "{% for m in messages %}{{ m.role }} {{ m.content if loop.last else "
    "m.content.split('</think>')[-1] }} {% endfor %}"
)
KEEPS_ALL = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
THOUGHT = {"role": "assistant", "content": "<think>why ?</think>five mg"}


def test_a09_thinking_that_is_removed_from_history(compare: Compare) -> None:
    def turns(template: str) -> None:
        for count in (2, 3):
            words(template).apply_chat_template([USER, THOUGHT, TURN][:count])

    found = first(
        compare(lambda: turns(KEEPS_ALL), lambda: turns(KEEPS_LAST)),
        "sample[1].template",
        "thinking block",
        "template inputs",
        len("user dose ? assistant "),
    )
    assert found.detail["blocks"] == {"baseline": 1, "target": 0}
    same = compare(lambda: turns(KEEPS_LAST), lambda: turns(KEEPS_LAST))
    assert same.outcome == "identical"
    assert any("prefix" in warning for warning in same.warnings)  # by design: a note


def test_a10_a_completion_put_back_as_history(compare: Compare) -> None:
    history = [USER, {"role": "assistant", "content": "why ?</think>five mg"}]
    prompt = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant <think>"
    again = (
        "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' and "
        "'<think>' not in m.content %}<think></think>{% endif %}{{ m.content }} {% endfor %}"
    )
    render = jinja2.Environment().from_string
    texts = (
        render(prompt).render(messages=[USER]) + "why ?</think>five mg ",
        render(again).render(messages=history),
    )

    def tell(text: str) -> None:
        step("messages", history)
        step("template", text)

    verdict = compare(lambda: tell(texts[0]), lambda: tell(texts[1]))
    first(
        verdict,
        "sample[0].template",
        "thinking block",
        "template",
        len("user dose ? assistant <think>"),
    )


def test_a11_the_generation_prompt(compare: Compare) -> None:
    template = PLAIN + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    verdict = compare(
        lambda: words(template).apply_chat_template([USER], add_generation_prompt=True),
        lambda: words(template).apply_chat_template([USER]),
    )
    found = first(
        verdict, "sample[0].template", "generation prompt", "template inputs", len("user dose ? ")
    )
    assert found.detail["inputs"] == {"add_generation_prompt": {"baseline": True, "target": False}}


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


# ---- text -> ids ------------------------------------------------------------------------------


def metaspace(scheme: str) -> PreTrainedTokenizerFast:
    vocab = {"<s>": 0, "▁a": 1, "▁b": 2, "a": 3, "b": 4, "▁": 5}
    backend = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def test_a22_a_space_after_a_special_token(compare: Compare) -> None:
    verdict = compare(lambda: metaspace("always")("a<s>b"), lambda: metaspace("first")("a<s>b"))
    found = verdict.first
    assert found is not None
    assert (found.path, found.pattern, found.detail["index"]) == (
        "sample[0].ids",
        "prefix space",
        2,
    )
    assert any(name == "tokenizer.pre_tokenizer" for name, _, _ in found.settings)


CASES = pre_tokenizers.Split(Regex("[a-z]+|[A-Z][a-z]*|[^A-Za-z]+"), "isolated")
LETTERS = pre_tokenizers.Split(Regex("[A-Za-z]+|[^A-Za-z]+"), "isolated")
EBAY = (("e", "B"), ("a", "y"))


def test_a23_another_split_pattern(compare: Compare) -> None:
    verdict = compare(lambda: bpe(CASES, EBAY)("on eBay"), lambda: bpe(LETTERS, EBAY)("on eBay"))
    first(verdict, "sample[0].ids", "split pattern", "pretokens", 3)


def test_a23_texts_that_both_patterns_split_alike_are_silent(compare: Compare) -> None:
    verdict = compare(lambda: bpe(CASES, EBAY)("on sale"), lambda: bpe(LETTERS, EBAY)("on sale"))
    assert verdict.outcome == "identical"


def test_a24_digits_and_punctuation_are_split_first(compare: Compare) -> None:
    splits = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.Punctuation()])
    merges = (("1", "2"), ("12", "3"))
    verdict = compare(lambda: bpe(splits, merges)("a123,b"), lambda: bpe(None, merges)("a123,b"))
    first(verdict, "sample[0].ids", "split pattern", "pretokens", 1)


def normalising(normalizer: Any) -> PreTrainedTokenizerFast:
    tokenizer = words(bos=False)
    tokenizer._tokenizer.normalizer = normalizer
    return tokenizer


@pytest.mark.parametrize("text", ["e\u0301", "a ½"])
def test_a25_a_normaliser_that_one_side_lacks(compare: Compare, text: str) -> None:
    form = normalizers.NFC() if text[0] == "e" else normalizers.NFKC()
    right, faulty = normalising(form), normalising(None)
    verdict = compare(lambda: right(text), lambda: faulty(text))
    if text[0] == "e":
        first(verdict, "sample[0].ids", "unicode normalisation", "normalized", 0)
    else:  # both are unknown words: nothing comes of it
        assert verdict.outcome in ("identical", "equivalent")


def test_a26_an_escape_that_was_not_read(compare: Compare) -> None:
    def chat(text: str) -> None:
        words().apply_chat_template([{"role": "user", "content": text}])

    verdict = compare(lambda: chat("a\nb"), lambda: chat("a\\nb"))
    found = verdict.first
    assert found is not None
    assert (found.path, found.pattern) == ("sample[0].messages", "escape sequences")


def test_a28_a_token_across_the_join(compare: Compare) -> None:
    tokenizer = bpe(pre_tokenizers.Split(Regex("[\\s\\S]+"), "isolated"), ((":", "Ġ"), (":Ġ", "C")))
    context, option = ":", " C"

    def job(whole: bool) -> None:
        ids = tokenizer(context + option)["input_ids"]
        alone = len(tokenizer(context)["input_ids"])
        step("continuation", ids[0 if whole else alone :])

    verdict = compare(lambda: job(True), lambda: job(False))
    found = verdict.first
    assert found is not None
    assert found.detail["step"] == "continuation"
    assert found.detail["lengths"] == [1, 0]


def test_a29_a_setting_that_an_older_runtime_does_not_read(compare: Compare) -> None:
    verdict = compare(lambda: metaspace("always")("b a"), lambda: metaspace("never")("b a"))
    found = verdict.first
    assert found is not None
    assert (found.path, found.pattern, found.detail["index"]) == (
        "sample[0].ids",
        "prefix space",
        0,
    )
    assert any(name == "tokenizer.pre_tokenizer" for name, _, _ in found.settings)


def test_the_json_of_a_verdict_has_step_sample_position_and_class(compare: Compare) -> None:
    from tracediff.report.json import to_json

    tokenizer = words("{{ bos_token }} " + PLAIN)
    verdict = compare(
        lambda: tokenizer.apply_chat_template([USER]),
        lambda: tokenizer(tokenizer.apply_chat_template([USER], tokenize=False)),
    )
    told = json.loads(json.dumps(to_json(verdict)))["first"]
    assert told["pattern"] == "BOS twice"
    assert (told["detail"]["sample"], told["detail"]["step"]) == (0, "special tokens")
    assert told["detail"]["index"] == 1
    assert told["detail"]["origins"]["target"][:3] == ["special", "template", "template"]
    assert np.asarray(told["detail"]["target_ids"])[:2].tolist() == [0, 0]
