"""What a trace knows about one rendered sample, brought to bear on a difference in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.rendering_notes import inputs_of
from tracediff.errors import TraceError
from tracediff.events import Event, Pair
from tracediff.rendering import Difference, Vocabulary, differ_ids, differ_text
from tracediff.rendering.provenance import (
    content_spans,
    facts_of,
    origin_at,
    token_origins,
    tokens_of,
)
from tracediff.rendering.record_classes import classify_record, differing_leaf, lacks_tools
from tracediff.rendering.text_classes import Class
from tracediff.trace import Trace

_SAMPLE: Final = re.compile(r"^sample\[(\d+)\]\.(.+)$")
_TOKENIZER: Final = re.compile(r"^tokenizer(?:\[(\d+)\])?\.(.+)$")
_SIDES: Final = ("baseline", "target")
_SYSTEM: Final = ("system", "developer")
_JSON_STEPS: Final = ("record", "messages", "tools", "documents")


class Sample:
    """One side's events of the sample (or the batch) that an event belongs to."""

    def __init__(self, trace: Trace, event: Event) -> None:
        self._trace = trace
        self.event = event
        match = _SAMPLE.match(event.site.path)
        self.index = int(match[1]) if match else None
        self.step = match[2] if match else event.site.path

    def find(self, step: str) -> Event | None:
        """The event of another step of this sample, if it was recorded in the same step."""
        if self.index is None:
            return None
        try:
            return self._trace.find(replace(self.event.site, path=f"sample[{self.index}].{step}"))
        except TraceError:
            return None

    @cached_property
    def messages(self) -> str:
        event = self.find("messages")
        return str(event.value) if event else ""

    @property
    def has_system(self) -> bool | None:
        """Whether the messages have one of the system's; None where they were not seen."""
        try:
            found = json.loads(self.messages)
        except ValueError:
            return None
        return any(isinstance(m, dict) and m.get("role") in _SYSTEM for m in found)

    def origin(self, text: str, index: int) -> str | None:
        """Where a character comes from; None where the messages were not seen."""
        return origin_at(content_spans(text, self.messages), index) if self.messages else None

    def origins(self, facts: Mapping[str, Any], count: int) -> list[str] | None:
        text = self.find("text")
        if text is None or not self.messages:
            return None
        return token_origins(facts, count, content_spans(str(text.value), self.messages))


def vocabulary_of(traces: Iterable[Trace], step: int, number: int = 0) -> Vocabulary | None:
    """What the traces say of the tokenizer with this number: special IDs, tokens used so far.

    Where the two sides disagree on a special ID, the baseline's counts.
    """
    tokens: dict[int, str] = {}
    control: dict[int, str] = {}
    special: dict[str, int] = {}
    for trace in traces:
        for before in [s for s in trace.steps if s <= step]:
            rows = trace.samples(before)
            telling = (rows.event(int(row)) for row in rows.having("tokens"))
            for event in chain(trace.events(before, samples=False), telling):
                match = _TOKENIZER.match(event.site.path)
                if match and int(match[1] or 0) == number:
                    _take_setting(match[2], event.value, control, special)
                elif event.attributes.get("tokenizer", 0) == number:
                    tokens = tokens_of(event.attributes.get("tokens")) | tokens
    if not special and not control:
        return None
    return Vocabulary(tokens | control, frozenset(control) | frozenset(special.values()), **special)


def _take_setting(name: str, value: Any, control: dict[int, str], special: dict[str, int]) -> None:
    role = name.removesuffix("_token_id")
    if name == "control":
        control.update(tokens_of(value))
    elif role in ("bos", "eos", "pad") and isinstance(value, int):
        special.setdefault(role, value)


def differ_texts(traces: tuple[Trace, Trace], pair: Pair) -> Difference:
    """The first difference of two texts of a sample, with the sample, the step and provenance."""
    a, b = (Sample(t, e) for t, e in zip(traces, (pair.baseline, pair.target), strict=True))
    texts = str(a.event.value), str(b.event.value)
    vocabulary = vocabulary_of(traces, a.event.site.step)
    found = _named(a, texts, differ_text(*texts, vocabulary, a.has_system))
    detail = {**found.detail, **_place(a, b)}
    if a.step in ("template", "text"):
        index = detail["index"]
        origins = [side.origin(text, index) for side, text in zip((a, b), texts, strict=True)]
        if None not in origins:
            detail["provenance"] = dict(zip(_SIDES, origins, strict=True))
    given = inputs_of(pair)
    if given:
        detail["inputs"] = {name: dict(zip(_SIDES, (x, y), strict=True)) for name, x, y in given}
        detail["step"] = "template inputs" if a.step == "template" else detail["step"]
    return replace(found, detail=detail)


def _named(side: Sample, texts: tuple[str, str], found: Difference) -> Difference:
    """The difference by the class that only the step or the rest of the sample can show."""
    if side.step in _JSON_STEPS and (leaf := differing_leaf(*texts)):
        place, x, y = leaf
        named = classify_record(leaf)
        if named is None and isinstance(x, str) and isinstance(y, str):
            inner = differ_text(x, y)
            named = Class(inner.pattern, f"{place}: {inner.meaning}", {"place": place})
        if named:
            return Difference(named.name, named.meaning, {**found.detail, **named.detail})
    tools = side.find("tools")
    if tools is not None and side.step == "template":
        lacking = lacks_tools(str(tools.value), *texts)
        if lacking:
            return replace(found, pattern=lacking.name, meaning=lacking.meaning)
    return found


def differ_rows(
    traces: tuple[Trace, Trace],
    pair: Pair,
    values: tuple[NDArray[Any], NDArray[Any]],
    counts: NDArray[np.bool_] | None,
) -> Difference | None:
    """The first difference of IDs, labels or a mask, as `differ_texts` has it for texts."""
    a, b = (Sample(t, e) for t, e in zip(traces, (pair.baseline, pair.target), strict=True))
    number = a.event.attributes.get("tokenizer", 0)
    vocabulary = vocabulary_of(traces, a.event.site.step, number)
    found = differ_ids(*values, counts, vocabulary, a.step.rpartition(".")[2])
    if found is None:
        return None
    detail = {**found.detail, **_place(a, b)}
    if a.step == "ids":
        detail |= _how_rows_part(a, b, values)
        if detail["step"] == "normalized":
            inner = differ_text(_normalized(a), _normalized(b))
            found = replace(found, pattern=inner.pattern, meaning=inner.meaning)
            shown = ("baseline_context", "target_context", "context_start")
            detail |= {name: inner.detail[name] for name in shown}
    if "origins" in detail and "baseline_ids" in detail:
        start, ids = detail["context_start"], detail["baseline_ids"]
        reach = max(len(ids), len(detail["target_ids"]))
        detail["origins"] = {
            side: origins[start : start + reach] for side, origins in detail["origins"].items()
        }
    if vocabulary is not None and "baseline_ids" in detail and a.event.kind == "ids":
        for side in _SIDES:
            detail[f"{side}_tokens"] = [vocabulary.token(i) for i in detail[f"{side}_ids"]]
        if values[0].ndim == 1:
            detail["special"] = {
                side: _special_counts(row, vocabulary)
                for side, row in zip(_SIDES, values, strict=True)
            }
    return replace(found, detail=detail)


def _place(a: Sample, b: Sample) -> dict[str, Any]:
    """Which sample it is on each side, and which step of its rendering."""
    if a.index is None:
        return {"step": a.step}
    return {"sample": a.index, "target_sample": b.index, "step": a.step}


def _how_rows_part(a: Sample, b: Sample, rows: tuple[NDArray[Any], NDArray[Any]]) -> dict[str, Any]:
    """At which of the tokenizer's own steps two rows of IDs part, and where the tokens come from.

    The tokenizer normalises, cuts into words, merges to tokens, puts special tokens in, truncates
    and pads; the trace keeps what each of these did, and the first that differs is named.
    """
    facts = [facts_of(side.event.attributes) for side in (a, b)]
    detail: dict[str, Any] = {}
    origins = [
        side.origins(fact, len(row)) for side, fact, row in zip((a, b), facts, rows, strict=True)
    ]
    if None not in origins:
        detail["origins"] = dict(zip(_SIDES, origins, strict=True))
    if any("lengths" not in fact for fact in facts):
        return detail
    normalized = [_normalized(side) for side in (a, b)]
    if normalized[0] != normalized[1]:
        return detail | {"step": "normalized"}
    bare = [_bare(row.tolist(), fact) for row, fact in zip(rows, facts, strict=True)]
    inner = [_without_special(row, fact) for row, fact in zip(bare, facts, strict=True)]
    if inner[0] != inner[1]:
        cut = [fact.get("truncated", 0) for fact in facts]
        cuts_differ = facts[0].get("pretokens") != facts[1].get("pretokens")
        if cut[0] != cut[1] or (cut[0] and cuts_differ):
            return detail | {"step": "truncation", "truncated": dict(zip(_SIDES, cut, strict=True))}
        if cuts_differ:
            return detail | {"step": "pretokens"}
        return detail
    return detail | {"step": "special tokens" if bare[0] != bare[1] else "padding"}


def _normalized(side: Sample) -> str:
    event = side.find("normalized") or side.find("text")
    return str(event.value) if event else ""


def _bare(row: list[int], facts: Mapping[str, Any]) -> list[int]:
    """A row without its padding."""
    before, after = facts.get("padded", (0, 0))
    return row[before : len(row) - after]


def _without_special(row: list[int], facts: Mapping[str, Any]) -> list[int]:
    before = facts.get("padded", (0, 0))[0]
    special = {place - before for place in facts.get("special", ())}
    return [identifier for place, identifier in enumerate(row) if place not in special]


def _special_counts(row: NDArray[Any], vocabulary: Vocabulary) -> dict[str, int]:
    """How often BOS and EOS stand in a row."""
    roles = {"BOS": vocabulary.bos, "EOS": vocabulary.eos}
    return {
        name: int((row == identifier).sum())
        for name, identifier in roles.items()
        if identifier is not None
    }
