"""The class of a difference between two texts, rows of IDs or arrays of labels, by hand."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracediff.rendering import Difference, Vocabulary, differ_ids, differ_text

TOKENS = {
    0: "<s>",
    1: "</s>",
    2: "<pad>",
    3: "Ġa",
    4: "a",
    5: "b",
    6: "ab",
    7: "<",
    8: "/s>",
    9: "c",
}
VOCABULARY = Vocabulary(TOKENS, frozenset({0, 1, 2}), bos=0, eos=1, pad=2)
PAD_IS_EOS = Vocabulary(TOKENS, frozenset({0, 1, 2}), bos=0, eos=1, pad=1)


def ids(baseline: Any, target: Any, vocabulary: Vocabulary | None = VOCABULARY) -> Difference:
    found = differ_ids(np.array(baseline), np.array(target), None, vocabulary)
    assert found is not None
    assert found.meaning
    return found


@pytest.mark.parametrize(
    ("baseline", "target", "pattern", "meaning"),
    [
        ("<s>a", "<s><s>a", "BOS twice", "1 times and the target 2 times"),
        ("<s>a", "a", "BOS missing", "the target does not begin with '<s>'"),
        ("a</s>b</s>", "a</s>b", "EOS missing", "the target has 1 of the other's 2"),
        ("a</s>b", "ab</s>", "EOS elsewhere", "at another place"),
        ("a\n", "a\n<|im_start|>assistant\n", "generation prompt", "the baseline lacks the header"),
        ("x[INST] a [/INST]", "x[INST] a [/INST] ASSISTANT:", "generation prompt", "ASSISTANT:"),
        ("<user>a", "<system>Be kind.<user>a", "system default", "the target has a system turn"),
        ("a b", "a b\n", "newline", "has '\\n' more"),
        ("a\r\nb", "a\nb", "newline", "lacks '\\r'"),
        ("a b", "a b  ", "trailing whitespace", "has '  ' more"),
        ("é", "e\u0301", "unicode normalisation", "the target is NFD and NFKD"),
        ("ﬁ", "fi", "unicode normalisation", "after NFKC"),
        ("on 2024-07-26.", "on 2026-11-29.", "date", "'2024-07-26' against '2026-11-29'"),
        ("a<think>r</think>b", "ab", "thinking block", "1 in the baseline, 0 in the target"),
        ("a<think>r</think>b", "a<think>s</think>b", "thinking block", "'r' against 's'"),
        ("a long answer", "answer", "truncated", "lacks the first 7 characters"),
        ("5 mg", "5 ng", "replaced", "'m' against 'n'"),
    ],
)
def test_texts(baseline: str, target: str, pattern: str, meaning: str) -> None:
    found = differ_text(baseline, target, VOCABULARY)
    assert found.pattern == pattern
    assert meaning in found.meaning


@pytest.mark.parametrize(
    ("target", "ways"),
    [
        ('{"a": "é & <", "b": [1.0]}', ["order of keys"]),
        ('{"b":[1.0],"a":"é & <"}', ["separators"]),
        ('{"b": [1.0], "a": "\\u00e9 & <"}', ["escapes"]),
        ('{"b": [1.0], "a": "é \\u0026 \\u003c"}', ["escapes"]),
        ('{"b": [1], "a": "é & <"}', ["spelling of numbers"]),
        (
            '{"a":"\\u00e9 & <","b":[1]}',
            ["order of keys", "separators", "escapes", "spelling of numbers"],
        ),
    ],
)
def test_json_says_what_differs(target: str, ways: list[str]) -> None:
    """Fault A05 of the catalogue: tool schemas through another `tojson`."""
    baseline = '{"b": [1.0], "a": "é & <"}'
    found = differ_text(f"tools:\n{baseline}\nend", f"tools:\n{target}\nend")
    assert (found.pattern, found.detail["ways"]) == ("JSON serialisation", ways)


def test_json_with_another_value_is_another_class() -> None:
    assert differ_text('x {"a": 1} y', 'x {"a": 2} y').pattern == "replaced"


@pytest.mark.parametrize(
    ("baseline", "target", "pattern", "meaning"),
    [
        ([0, 4, 5], [0, 0, 4, 5], "BOS twice", "both add it"),
        ([0, 4, 5], [4, 5], "BOS missing", "the target does not"),
        ([4, 1, 5, 1], [4, 5, 1], "EOS missing", "1 of the other's 2"),
        ([4, 1, 5], [4, 7, 8, 5], "content becomes a control token", "in the baseline only"),
        ([4, 7, 8, 5], [4, 1, 5], "content becomes a control token", "in the target only"),
        ([0, 4, 5], [0, 3, 5], "prefix space", "'a' against ' a'"),
        ([9, 4, 5], [9, 6], "split pattern", "'ab' is cut"),
        ([4, 5, 9, 4, 5], [4, 5], "truncated", "lacks 3 IDs at the right end"),
        ([4, 5, 9, 3, 5], [3, 5], "truncated", "lacks 3 IDs at the left end"),
        ([9, 5, 4, 3, 6, 7], [4, 3, 6, 7, 8, 8], "truncation side", "cut on the left"),
        ([9, 4, 5], [9, 3, 5], "replaced", "at index 1"),
    ],
)
def test_rows_of_ids(baseline: Any, target: Any, pattern: str, meaning: str) -> None:
    found = ids(baseline, target)
    assert found.pattern == pattern
    assert meaning in found.meaning


def test_a_space_that_is_missing_inside_a_text_is_no_prefix_space() -> None:
    assert ids([9, 3, 5], [9, 4, 5]).pattern == "replaced"


N = -100


@pytest.mark.parametrize(
    ("baseline", "target", "pattern", "meaning"),
    [
        ([[N, 5, 6, 1]], [[N, N, 6, 1]], "mask off by one", "the first of the other's"),
        ([[N, 5, 6, 9]], [[N, 5, 6, N]], "mask off by one", "the last of the other's"),
        ([[N, N, 5, 6]], [[N, 4, 5, 6]], "mask off by one", "the baseline trains one token fewer"),
        ([[N, N, 5, 6, 9]], [[N, 5, 6, 9, N]], "label shift twice", "moved by -1"),
        ([[N, 5, 6], [N, 5, 6]], [[N, 5, 6], [N, N, N]], "no trained tokens", "of row 1"),
    ],
)
def test_labels(baseline: Any, target: Any, pattern: str, meaning: str) -> None:
    found = ids(baseline, target)
    assert found.pattern == pattern
    assert meaning in found.meaning
    trained = [sum(x != N for row in side for x in row) for side in (baseline, target)]
    assert list(found.detail["trained"].values()) == trained


def test_pad_that_is_eos_is_told_by_the_special_ids() -> None:
    """Fault A12 of the catalogue, with its numbers; the same labels are a mask where pad is not."""
    right, faulty = [5, 6, 1, N, N], [5, 6, N, N, N]
    assert ids(right, faulty, PAD_IS_EOS).pattern == "pad equals EOS"
    assert ids(right, faulty, VOCABULARY).pattern == "mask off by one"
    assert ids([right, right], [faulty, faulty], None).pattern == "pad equals EOS"


def test_one_masked_row_is_no_padding_where_another_row_trains_the_same_id() -> None:
    """Fault A13: only the truncated sample loses its EOS."""
    baseline, target = [[N, 5, 1], [5, 6, 1]], [[N, 5, 1], [5, 6, N]]
    found = ids(baseline, target, PAD_IS_EOS)
    assert (found.pattern, found.detail["row"]) == ("mask off by one", 1)


def test_labels_without_a_mask_are_rows_like_others() -> None:
    found = ids([[4, 5, 6]], [[5, 6, 7]], None)
    assert (found.pattern, found.detail["offset"]) == ("shifted", -1)


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_two_texts_have_a_class_and_the_index_where_they_part(a: str, b: str) -> None:
    if a == b:
        return
    found = differ_text(a, b, VOCABULARY)
    index = found.detail["index"]
    assert a[:index] == b[:index]
    assert a[index : index + 1] != b[index : index + 1]
    if found.pattern == "unicode normalisation":
        assert unicodedata.normalize("NFKC", a) == unicodedata.normalize("NFKC", b)


@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(0, 9), max_size=12))
def test_any_two_rows_have_a_class_and_the_index_where_they_part(a: Any, b: Any) -> None:
    found = differ_ids(np.array(a, int), np.array(b, int), None, VOCABULARY)
    assert (found is None) == (a == b)
    if found:
        index = found.detail["index"]
        assert a[:index] == b[:index]
        assert a[index : index + 1] != b[index : index + 1]
