"""Classes of difference between batches and between records, worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tracediff.rendering import Vocabulary, differ_ids
from tracediff.rendering.provenance import (
    content_spans,
    facts_of,
    origin_at,
    token_origins,
    token_spans,
    tokens_of,
)
from tracediff.rendering.record_classes import classify_record, differing_leaf, lacks_tools

N = -100
VOCABULARY = Vocabulary({0: "<s>", 1: "</s>", 2: "<pad>"}, frozenset({0, 1, 2}), 0, 1, 2)
CAUSAL = np.tril(np.ones((5, 5), bool))
BLOCKS = CAUSAL.copy()
BLOCKS[2:, :2] = False


def named(a: Any, b: Any, what: str, counts: Any = None) -> tuple[str, str]:
    counts = None if counts is None else np.array(counts, bool)
    found = differ_ids(np.array(a), np.array(b), counts, VOCABULARY, what)
    assert found is not None
    return found.pattern, found.meaning


@pytest.mark.parametrize(
    ("a", "b", "what", "pattern", "meaning"),
    [
        ([[1, 2], [3, 4]], [[3, 4], [1, 2]], "input_ids", "order", "number 0 is number 1"),
        ([5, 6, 7], [7, 5, 6], "samples", "order", "the same samples"),
        ([[5, 6], [7, 8]], [[5, 6]], "input_ids", "batch size", "2 rows, the target's 1"),
        ([[5, 6]], [[5, 6, 2, 2]], "input_ids", "padded", "target's rows go on for 2 tokens"),
        ([[2, 5, 6]], [[5, 6]], "input_ids", "padded", "of padding on the left"),
        ([[5, 6, 7]], [[5, 6]], "input_ids", "truncated", "of content on the right"),
        ([[5, 6, 7]], [[8, 9]], "input_ids", "shape", "rows of 3 tokens against 2"),
        (
            [[0, 1, 2, 0, 1]],
            [[0, 1, 2, 3, 4]],
            "position_ids",
            "position IDs not reset",
            "the target resets the position IDs only for 1",
        ),
        (
            [[1, 1, 2, 2]],
            [[1, 1, 1, 1]],
            "attention_mask",
            "packing without a boundary",
            "the target lets the tokens of 2 packed documents",
        ),
        (
            [[CAUSAL]],
            [[BLOCKS]],
            "attention_mask",
            "packing without a boundary",
            "the baseline lets",
        ),
        ([[N, 5, 6, N, N]], [[N, 5, 6, 2, 2]], "labels", "mask past the end", "of padding"),
        ([[N, 5, N, N, N]], [[N, 5, 6, 7, N]], "labels", "mask past the end", "trains 2 labels"),
        ([[N, N, N, 6, 7]], [[4, 4, 5, 6, 7]], "labels", "prompt trained", "3 tokens before"),
        (
            [[N, 5, 1, N, 7, 1]],
            [[N, 5, 1, 6, 7, 1]],
            "labels",
            "packing without a boundary",
            "1 label(s)",
        ),
    ],
)
def test_batches(a: Any, b: Any, what: str, pattern: str, meaning: str) -> None:
    found = named(a, b, what)
    assert found[0] == pattern
    assert meaning in found[1]


def test_positions_of_a_padded_row_are_told_by_its_first_token() -> None:
    counts = [[False, False, True, True]]
    pattern, meaning = named([[0, 0, 0, 1]], [[0, 1, 2, 3]], "position_ids", counts)
    assert pattern == "positions count padding"
    assert "position 0 in the baseline and 2 in the target" in meaning


def test_equal_boundaries_are_no_packing_fault() -> None:
    mask = np.ones((5, 5), bool)
    assert named([[CAUSAL]], [[mask]], "attention_mask")[0] != "packing without a boundary"


@pytest.mark.parametrize(
    ("a", "b", "place", "pattern"),
    [
        ([{"content": "x"}], [{"content": [{"text": "x"}]}], "[0].content", "content parts"),
        ([{"content": "x"}], [{"content": [{"text": "y"}]}], "[0].content", None),
        ({"t": ["a", "b"]}, {"t": ["b", "a"]}, "t[0]", None),
        ({"t": ["a"]}, {"t": ["a", "b"]}, "t", None),
        ({"a": 1}, {"a": 1, "b": None, "c": 2}, "c", None),
        ({"a": 1}, {"a": True}, "a", None),
    ],
)
def test_records(a: Any, b: Any, place: str, pattern: str | None) -> None:
    leaf = differing_leaf(json.dumps(a), json.dumps(b))
    assert leaf is not None
    assert leaf[0] == place
    found = classify_record(leaf)
    assert (found.name if found else None) == pattern


def test_records_that_are_equal_or_no_json_have_no_leaf() -> None:
    assert differing_leaf('{"a": 1}', '{"a":1}') is None
    assert differing_leaf("no JSON", "{}") is None


def test_tools_that_one_text_does_not_tell_of() -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "lookup"}}, {"name": "f_x"}])
    found = lacks_tools(tools, "use lookup", "use nothing")
    assert found is not None
    assert "the target says nothing of the tools" in found.meaning
    assert lacks_tools(tools, "use lookup", "use f_x") is None


def test_provenance_of_characters_and_tokens() -> None:
    messages = json.dumps(
        [
            {"role": "user", "content": " hi "},
            {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
        ]
    )
    spans = content_spans("<user>hi<bot>hi", messages)  # the template strips the first content
    assert [(s.start, s.stop, s.origin) for s in spans] == [
        (6, 8, "message 0 (user)"),
        (13, 15, "message 1 (assistant)"),
    ]
    assert origin_at(spans, 7) == "message 0 (user)"
    assert origin_at(spans, 8) == "template"
    # BOS, "<user>", "hi", a character of two tokens, padding: the second token jumps back
    facts = {"lengths": [0, 6, 2, 1, 1], "jumps": {"4": -1}, "padded": [1, 0]}
    assert token_spans(facts, 6) == [(0, 0), (0, 0), (0, 6), (6, 8), (8, 9), (8, 9)]
    origins = token_origins(facts, 6, spans)
    assert origins == [
        *("special", "special", "template", "message 0 (user)", "template", "template")
    ]
    assert token_spans(facts, 5) is None
    assert token_spans({}, 5) is None


def test_attributes_of_another_form_are_left_out() -> None:
    right = {"lengths": [1, 2], "jumps": {"1": -1}, "padded": [0, 1], "special": [0]}
    assert facts_of({**right, "truncated": 3, "pretokens": "ab", "tokens": {}}) == {
        **right,
        "truncated": 3,
        "pretokens": "ab",
    }
    wrong = {"lengths": [1, "2"], "jumps": {"1": None}, "padded": [0], "special": 0}
    assert facts_of({**wrong, "truncated": "3", "pretokens": 5}) == {}
    assert tokens_of({"5": "a", "x": "b", "6": 7}) == {5: "a"}
    assert tokens_of([1]) == {}
