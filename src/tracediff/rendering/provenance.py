"""Where the characters and the tokens of a rendered text come from: template or content."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

TEMPLATE: Final = "template"
SPECIAL: Final = "special"
"""A token that the tokenizer put in: it stands for no character of the text."""

IGNORED: Final = -100
"""The label that the loss leaves out, in torch and in everything modelled on it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` to `stop` of a text, which a message's content became.

    Attributes:
        origin: `message 2 (user)`: which message, counted from 0, and whose.
    """

    start: int
    stop: int
    origin: str


def content_spans(text: str, messages: str) -> list[Span]:
    """The parts of a template's text that are content of the messages, in order.

    Found by looking for each content after the one before it, so content that the template changes
    (strips, escapes) counts as the template's unless it is found stripped.

    Args:
        messages: The messages as JSON, as a trace has them.
    """
    spans: list[Span] = []
    for origin, content in _contents(messages):
        after = spans[-1].stop if spans else 0
        for form in (content, content.strip()):
            start = text.find(form, after) if form else -1
            if start >= 0:
                spans.append(Span(start, start + len(form), origin))
                break
    return spans


def origin_at(spans: Sequence[Span], index: int) -> str:
    """Where the character at `index` comes from."""
    return next((s.origin for s in spans if s.start <= index < s.stop), TEMPLATE)


def facts_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """How a row of IDs came about, from its attributes: a trace may hold anything there.

    Returns:
        `lengths`, `jumps`, `padded`, `special`, `truncated` and `pretokens` as recorders write
        them; a fact of another form is left out.
    """
    facts = {name: attributes[name] for name in ("lengths", "special") if name in attributes}
    facts = {name: value for name, value in facts.items() if _are_integers(value)}
    padded, jumps = attributes.get("padded"), attributes.get("jumps")
    if _are_integers(padded) and isinstance(padded, list) and len(padded) == 2:
        facts["padded"] = padded
    if isinstance(jumps, Mapping) and _are_integers(list(jumps.values())):
        facts["jumps"] = jumps
    for name, kind in (("truncated", int), ("pretokens", str)):
        if isinstance(attributes.get(name), kind):
            facts[name] = attributes[name]
    return facts


def tokens_of(value: Any) -> dict[int, str]:
    """Tokens by ID from a JSON object; entries of another form are left out."""
    pairs = value.items() if isinstance(value, Mapping) else ()
    return {int(i): token for i, token in pairs if str(i).isdecimal() and isinstance(token, str)}


def _are_integers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def token_spans(facts: Mapping[str, Any], count: int) -> list[tuple[int, int]] | None:
    """First and last character of each of `count` tokens, padding included; None if not recorded.

    Args:
        facts: Those that `facts_of` takes from the attributes of the IDs.
    """
    lengths = facts.get("lengths")
    if not isinstance(lengths, list):
        return None
    jumps = facts.get("jumps", {})
    before, after = facts.get("padded", (0, 0))
    spans, end = [(0, 0)] * before, 0
    for index, length in enumerate(lengths):
        start = end + jumps.get(str(index), 0)
        spans.append((start, start + length) if length or str(index) in jumps else (end, end))
        end = spans[-1][1]
    spans += [(end, end)] * after
    return spans if len(spans) == count else None


def token_origins(
    facts: Mapping[str, Any], count: int, text_spans: Sequence[Span]
) -> list[str] | None:
    """Where each token comes from: `template`, `message N (role)` or `special`."""
    spans = token_spans(facts, count)
    if spans is None:
        return None
    return [SPECIAL if start == stop else origin_at(text_spans, start) for start, stop in spans]


def _contents(messages: str) -> Iterator[tuple[str, str]]:
    try:
        found = json.loads(messages)
    except ValueError:
        return
    for index, message in enumerate(found if isinstance(found, list) else ()):
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield f"message {index} ({message.get('role', '?')})", text
