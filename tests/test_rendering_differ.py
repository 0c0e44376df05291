"""The first difference of two texts or rows of IDs, its class and its sentence."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest

from tracediff.rendering import differ_ids, differ_text


@pytest.mark.parametrize(
    ("baseline", "target", "pattern", "index"),
    [
        ("user\nHello\n\n", "user\nHello\n", "newline", 11),
        ("<|im_start|>assistant\nYes", "<|im_start|>assistantYes", "newline", 21),
        ("a b", "a  b", "whitespace", 2),
        ("dose: 5 mg ", "dose: 5 mg", "trailing whitespace", 10),
        ("é", unicodedata.normalize("NFD", "é"), "unicode normalisation", 0),
        ("½ tablet", "1⁄2 tablet", "unicode normalisation", 0),
        ("answer</s>", "answer", "truncated", 6),
        ("five mg", "four mg", "replaced", 1),
        ("abcd", "abXcd", "inserted", 2),
    ],
)
def test_texts(baseline: str, target: str, pattern: str, index: int) -> None:
    found = differ_text(baseline, target)
    assert (found.pattern, found.detail["index"]) == (pattern, index)
    assert found.meaning


def test_an_extra_id_at_the_start_is_an_insertion_and_not_a_row_of_differences() -> None:
    found = differ_ids(np.array([5, 6, 7, 8]), np.array([0, 5, 6, 7, 8]))
    assert found is not None
    assert (found.pattern, found.detail["index"], found.detail["added"]) == ("inserted", 0, [0])


def test_a_shifted_row_is_named_with_its_row() -> None:
    baseline = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    target = np.array([[1, 2, 3, 4], [6, 7, 8, 9]])
    found = differ_ids(baseline, target)
    assert found is not None
    assert (found.pattern, found.detail["row"], found.detail["offset"]) == ("shifted", 1, -1)


def test_padding_does_not_count() -> None:
    baseline, target = np.array([[1, 2, 0]]), np.array([[1, 2, 9]])
    assert differ_ids(baseline, target, np.array([[True, True, False]])) is None
    assert differ_ids(baseline, target) is not None
