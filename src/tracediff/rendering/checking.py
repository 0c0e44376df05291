"""Renders records through several routes and compares what they make of each, exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

import numpy as np

from tracediff.rendering.differ import differ_ids, differ_text
from tracediff.rendering.files import Vocabulary
from tracediff.rendering.records import Record
from tracediff.rendering.routes import Named, Rendered, Route, shared

_KEPT: Final = 1000
"""Indices of differing records that are kept: memory must not grow with the data set."""

Outcome = Rendered | str
"""What a route makes of a record, or the sentence with which it refuses it."""


@dataclass(slots=True)
class Finding:
    """Records that differ in one way between one reference route and one other route.

    Attributes:
        step: The first step at which they part: `text`, `ids`, or `refused` (by one of them); of a
            recorded run `template` where already the template's text departs.
        agreeing: The routes that agree with the reference on the first such record.
        record, line, identity: The first record with it.
        detail: The first difference itself: index, both contexts, facts of the class.
    """

    reference: str
    route: str
    step: str
    pattern: str
    meaning: str
    detail: Mapping[str, Any]
    record: int
    line: int
    identity: str | None
    agreeing: tuple[str, ...]
    count: int = 0


@dataclass(slots=True)
class Tally:
    """What one route made of all records.

    Attributes:
        bos, eos: How many of those special tokens stand in all rows; None where there is no such.
    """

    parts: Mapping[str, str]
    texts: int = 0
    rows: int = 0
    refused: int = 0
    tokens: int = 0
    bos: int | None = None
    eos: int | None = None


@dataclass(slots=True)
class Turns:
    """Records whose first k turns do not begin the rendering of all turns, by route."""

    route: str
    count: int
    record: int
    turn: int
    index: int


@dataclass(slots=True)
class Check:
    """The comparison of all routes over all records.

    Attributes:
        compared: Records of which at least two routes made a text.
        rows_compared: Records of which at least two routes made IDs of one text.
        differing: Records on which some routes differ; `first` has the indices of the first ones.
        shares: For each two routes, the parts that both use and therefore cannot check.
    """

    routes: dict[str, Tally]
    shares: dict[tuple[str, str], list[str]]
    records: int = 0
    compared: int = 0
    rows_compared: int = 0
    differing: int = 0
    first: list[int] = field(default_factory=list)
    findings: dict[tuple[str, ...], Finding] = field(default_factory=dict)
    turns: dict[str, Turns] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """`agree`, `differ`, or `incomparable` where no record was rendered by two routes."""
        if self.differing:
            return "differ"
        return "agree" if self.compared else "incomparable"

    @property
    def exit_code(self) -> int:
        """0 where all routes agree, 1 where they differ, 125 where nothing could be compared."""
        return {"agree": 0, "differ": 1, "incomparable": 125}[self.outcome]


class Checker:
    """Compares routes record by record; holds one record at a time.

    Args:
        routes: At least two open routes. Each record's reference is the first route, or the first
            that rendered it.
        turns: Whether to check also that each route's rendering of the first turns of a
            conversation begins its rendering of all of them.
    """

    def __init__(self, routes: Sequence[Named], *, turns: bool = False) -> None:
        self._routes = routes
        self._turns = turns
        pairs = combinations(routes, 2)
        self.check = Check(
            {named.name: _tally(named.route) for named in routes},
            {(a.name, b.name): shared(a.route, b.route) for a, b in pairs},
        )
        self._vocabulary = next(
            (named.route.vocabulary for named in routes if named.route.vocabulary), None
        )

    def add(self, record: Record) -> None:
        """Renders one record through every route and compares what comes out."""
        outcomes = {named.name: _outcome(named.route, record) for named in self._routes}
        check = self.check
        check.records += 1
        for named in self._routes:
            self._count(named, outcomes[named.name])
            if self._turns and isinstance(outcomes[named.name], Rendered):
                self._check_turns(named, record)
        texts = {name: out for name, out in outcomes.items() if isinstance(out, Rendered)}
        check.compared += len(texts) > 1
        if self._compare(record, outcomes, texts):
            check.differing += 1
            if len(check.first) < _KEPT:
                check.first.append(record.index)

    def _count(self, named: Named, outcome: Outcome) -> None:
        tally = self.check.routes[named.name]
        if not isinstance(outcome, Rendered):
            tally.refused += 1
            return
        tally.texts += 1
        if outcome.ids is None:
            return
        tally.rows += 1
        tally.tokens += len(outcome.ids)
        vocabulary = named.route.vocabulary
        if vocabulary and tally.bos is not None:
            tally.bos += outcome.ids.count(vocabulary.bos or 0)
        if vocabulary and tally.eos is not None:
            tally.eos += outcome.ids.count(vocabulary.eos or 0)

    def _compare(
        self, record: Record, outcomes: Mapping[str, Outcome], texts: Mapping[str, Rendered]
    ) -> bool:
        """Compares texts with the first text, and IDs among the routes whose text is the same."""
        if not texts:
            return False
        reference, first = next(iter(texts.items()))
        agreeing = tuple(name for name, out in texts.items() if out.text == first.text)
        differs = False
        for name, outcome in outcomes.items():
            if isinstance(outcome, str):
                detail = {"refusal": outcome}
                found = ("refused", _reason(outcome), f"{name} refuses: {outcome}", detail)
            elif outcome.text != first.text:
                text = differ_text(first.text, outcome.text, self._vocabulary, record.has_system)
                step = "text" if outcome.template in (None, first.text) else "template"
                found = (step, text.pattern, text.meaning, dict(text.detail))
            else:
                continue
            differs = True
            self._note(record, reference, name, agreeing, found)
        return self._compare_ids(record, texts) or differs

    def _compare_ids(self, record: Record, texts: Mapping[str, Rendered]) -> bool:
        groups: dict[str, list[str]] = {}
        for name, rendered in texts.items():
            if rendered.ids is not None:
                groups.setdefault(rendered.text, []).append(name)
        differs = False
        self.check.rows_compared += any(len(group) > 1 for group in groups.values())
        for reference, *others in groups.values():
            first = texts[reference].ids or ()
            agreeing = tuple(n for n in (reference, *others) if texts[n].ids == first)
            for name in others:
                ids = texts[name].ids or ()
                if ids == first:
                    continue
                differs = True
                self._note(record, reference, name, agreeing, self._ids_found(first, ids))
        return differs

    def _ids_found(
        self, first: Sequence[int], other: Sequence[int]
    ) -> tuple[str, str, str, dict[str, Any]]:
        found = differ_ids(
            np.array(first, np.int64), np.array(other, np.int64), None, self._vocabulary
        )
        assert found is not None  # the rows are unequal
        detail = dict(found.detail)
        if self._vocabulary:
            token = self._vocabulary.token
            for side in ("baseline", "target"):
                detail[f"{side}_tokens"] = [token(i) for i in detail[f"{side}_ids"]]
        return "ids", found.pattern, found.meaning, detail

    def _note(
        self,
        record: Record,
        reference: str,
        route: str,
        agreeing: tuple[str, ...],
        found: tuple[str, str, str, Mapping[str, Any]],
    ) -> None:
        step, pattern, meaning, detail = found
        finding = self.check.findings.setdefault(
            (reference, route, step, pattern),
            Finding(
                reference=reference,
                route=route,
                step=step,
                pattern=pattern,
                meaning=meaning,
                detail=detail,
                record=record.index,
                line=record.line,
                identity=record.identity,
                agreeing=agreeing,
            ),
        )
        finding.count += 1

    def _check_turns(self, named: Named, record: Record) -> None:
        """Notes the first turn at which a longer rendering does not begin with the shorter one."""
        broken = broken_prefix(_growing(named.route, record))
        if broken is None:
            return
        turn, index = broken
        note = Turns(named.name, 0, record.index, turn, index)
        self.check.turns.setdefault(named.name, note).count += 1


def check(routes: Sequence[Named], records: Iterable[Record], *, turns: bool = False) -> Check:
    """Renders all records through all routes, compares them, and closes the routes."""
    with ExitStack() as stack:
        for named in routes:
            stack.callback(named.route.close)
        checker = Checker(routes, turns=turns)
        for record in records:
            checker.add(record)
    return checker.check


def broken_prefix(growing: Iterable[Sequence[Any]]) -> tuple[int, int] | None:
    """The first of growing renderings that does not begin with the one before it.

    Args:
        growing: Texts or rows of IDs of the first 1, 2, ... turns of one conversation.

    Returns:
        Number of turns of the longer one, and the index at which it departs; None if all hold.
    """
    before: Sequence[Any] | None = None
    for turns, whole in enumerate(growing, 1):
        if before is not None and whole[: len(before)] != before:
            pairs = zip(before, whole, strict=False)
            index = next((i for i, (x, y) in enumerate(pairs) if x != y), len(whole))
            return turns, index
        before = whole
    return None


def _growing(route: Route, record: Record) -> Iterable[str]:
    """Texts of the first turns; those that end in an answer or a question, without a prompt."""
    for turns in range(1, len(record.messages) + 1):
        part = Record(
            record.index,
            record.line,
            record.messages[:turns],
            record.tools,
            record.variables,
            identity=record.identity,
        )
        outcome = _outcome(route, part)
        if isinstance(outcome, Rendered):  # many templates refuse a conversation of one turn
            yield outcome.text


def _tally(route: Route) -> Tally:
    known: Vocabulary | None = route.vocabulary
    return Tally(
        route.parts,
        bos=0 if known and known.bos is not None else None,
        eos=0 if known and known.eos is not None else None,
    )


def _outcome(route: Route, record: Record) -> Outcome:
    try:
        return route.render(record)
    except Exception as error:  # a foreign engine may raise anything about one record
        told = " ".join(str(error).split()) or type(error).__name__
        return f"{type(error).__name__}: {told}"[:300]


def _reason(refusal: str) -> str:
    """The kind of a refusal, so that refusals for different reasons are counted apart."""
    return f"refused ({refusal.partition(':')[0]})"


def counts_of_patterns(result: Check) -> Counter[str]:
    """How many findings there are of each class, over all routes and records."""
    return sum((Counter({f.pattern: f.count}) for f in result.findings.values()), Counter())
