"""Rows of the fault catalogue between a template and token IDs, planted: named with step, sample,
position and class.

Each is recorded twice in this process through the recorder, once right and once with the fault.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
)

from tests.rendering_jobs import MODEL, PLAIN, TURN, USER, Compare, bpe, comparing, first, words
from tracediff.rendering import step


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    return comparing(tmp_path)


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
