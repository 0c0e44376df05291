"""How a difference in rendering is told: sample, step, provenance, label mask, counts."""

from __future__ import annotations

from typing import Any

from tracediff.report import samples
from tracediff.verdict import Divergence

DETAIL: dict[str, Any] = {
    "sample": 2,
    "target_sample": 3,
    "step": "special tokens",
    "context_start": 4,
    "baseline_ids": [0, 5, 6],
    "target_ids": [0, 0, 5],
    "baseline_tokens": ["<s>", "Ġ\u200b", "<b>"],
    "target_tokens": ["<s>", "<s>", "Ġ\u200b"],
    "origins": {
        "baseline": ["special", "template", "message 0 (user)"],
        "target": ["special", "special", "template"],
    },
    "special": {"baseline": {"BOS": 1, "EOS": 0}, "target": {"BOS": 2, "EOS": 0}},
}


def divergence(kind: str, detail: dict[str, Any]) -> Divergence:
    return Divergence(
        stage="rendering", step=0, site="", path="", port="out", kind=kind, detail=detail
    )


def test_the_facts_in_words() -> None:
    assert dict(samples.facts(divergence("ids", DETAIL))) == {
        "sample": "2 (the target's 3), at its step special tokens",
        "counts": "BOS 1 against 2, EOS 0 against 0",
    }
    detail = {
        "provenance": {"baseline": "template", "target": "template"},
        "trained": {"baseline": 8, "target": 6},
    }
    assert dict(samples.facts(divergence("labels", detail))) == {
        "comes from": "template",
        "trained": "8 against 6 labels",
    }


def test_tokens_have_the_colour_of_their_origin_and_nothing_is_invisible() -> None:
    line = samples.as_text(divergence("ids", DETAIL), "baseline")
    assert line is not None
    assert line.plain == "from 4: 0⟨<s>⟩ 5⟨Ġ⟨U+200B⟩⟩ 6⟨<b>⟩"
    styled = {line.plain[span.start : span.end]: span.style for span in line.spans}
    assert styled["0⟨<s>⟩"] == "magenta"
    assert styled["5⟨Ġ⟨U+200B⟩⟩"] == "cyan"


def test_labels_that_are_not_trained_are_dim() -> None:
    line = samples.as_text(divergence("labels", {"baseline_ids": [-100, 5]}), "baseline")
    assert line is not None
    assert [line.plain[span.start : span.end] for span in line.spans if span.style == "dim"] == [
        "-100"
    ]
    assert samples.as_text(divergence("text", {}), "target") is None


def test_html_is_escaped_and_has_a_legend() -> None:
    page = "\n".join(samples.as_html(divergence("ids", DETAIL)))
    assert "6⟨&lt;b&gt;⟩" in page
    assert 'title="special">0⟨&lt;s&gt;⟩' in page
    assert page.count("<pre>") == 2
    assert ">template</span>" in page.splitlines()[-1]
