"""The comparison of rendering routes as lines for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from rich.console import Group
from rich.text import Text

from tracediff.rendering.checking import Check, Finding, Tally
from tracediff.report.text import inert, visible

FORMAT: Final = 1
TRACE: Final = "trace"
"""Name of the route that stands for a recorded run."""

_CONTEXT: Final = 60
_MARKS: Final = {"agree": "✓", "differ": "✗", "incomparable": "?"}
_STYLES: Final = {"agree": "green", "differ": "red", "incomparable": "yellow"}


def to_json(check: Check) -> dict[str, Any]:
    """The comparison as one object; fields may be added, never changed."""
    return {
        "format": FORMAT,
        "outcome": check.outcome,
        "reason": reason(check),
        "records": check.records,
        "compared": {"text": check.compared, "ids": check.rows_compared},
        "differing": {"count": check.differing, "first": check.first},
        "routes": [{"name": name, **asdict(tally)} for name, tally in check.routes.items()],
        "shared": [{"routes": list(pair), "parts": parts} for pair, parts in check.shares.items()],
        "findings": [asdict(finding) for finding in check.findings.values()],
        "turns": [asdict(turns) for turns in check.turns.values()],
    }


def reason(check: Check) -> str:
    """The outcome in one sentence."""
    routes = f"{len(check.routes)} routes"
    if check.outcome == "incomparable":
        return f"nothing was compared: no record of {check.records} was rendered by two routes"
    if check.outcome == "differ":
        classes = ", ".join(dict.fromkeys(f.pattern for f in check.findings.values()))
        return f"{check.differing} of {check.records} records differ between {routes}: {classes}"
    ids = f" and token IDs of {check.rows_compared}" if check.rows_compared else ""
    return f"{routes} agree on the text of {check.compared}{ids} records"


def to_text(check: Check) -> Group:
    """The comparison for a terminal."""
    head = Text(f"{_MARKS[check.outcome]} {reason(check)}", style=_STYLES[check.outcome])
    return Group(head, *_routes(check), *_findings(check), *_turns(check), *_shares(check))


def _routes(check: Check) -> Iterator[Text]:
    yield Text()
    for name, tally in check.routes.items():
        yield Text(f"  {inert(name)}: {_tally(tally)}")


def _tally(tally: Tally) -> str:
    facts = [f"{tally.texts} texts"]
    facts += [f"{tally.rows} rows of IDs", f"{tally.tokens} tokens"] if tally.rows else ["no IDs"]
    facts += [f"{tally.bos} BOS"] if tally.bos is not None else []
    facts += [f"{tally.eos} EOS"] if tally.eos is not None else []
    facts += [f"{tally.refused} refused"] if tally.refused else []
    return ", ".join(facts)


def _findings(check: Check) -> Iterator[Text]:
    for finding in check.findings.values():
        yield Text()
        what = f"{finding.step}: {finding.pattern}" if finding.step != "refused" else "refused"
        yield Text(f"{inert(finding.route)} departs in {finding.count} record(s), {what}", "bold")
        named = f" ({inert(finding.identity)})" if finding.identity else ""
        yield Text(f"  {inert(finding.meaning)}")
        yield Text(f"  first in record {finding.record}{named}{_where(finding)}")
        yield from _context(finding)
        if len(finding.agreeing) > 1:
            agreeing = ", ".join(map(inert, finding.agreeing))
            yield Text(f"  on it these agree with each other: {agreeing}", "dim")


def _where(finding: Finding) -> str:
    """The line of the file, or that of a recorded run: its step and sample."""
    if finding.route.startswith(f"{TRACE}:"):
        return f", {finding.line}/rendering/sample[{finding.record}].{finding.step}"
    return f", line {finding.line}"


def _context(finding: Finding) -> Iterator[Text]:
    """Both sides around the first difference; what is not seen in print is spelled out."""
    detail = finding.detail
    for side, route in (("baseline", finding.reference), ("target", finding.route)):
        name = inert(route.partition(":")[0])
        if finding.step in ("text", "template"):
            shown = visible(_clip(detail, f"{side}_context"))
            yield Text(f"    {name:<6} at character {detail['index']}: …{shown}…")
        elif finding.step == "ids":
            tokens = detail.get(f"{side}_tokens") or ()
            pairs = zip(detail[f"{side}_ids"], tokens, strict=False)
            shown = " ".join(f"{i}⟨{visible(t)}⟩" for i, t in pairs) or str(detail[f"{side}_ids"])
            yield Text(f"    {name:<6} at ID {detail['index']}: … {shown} …")


def _clip(detail: Mapping[str, Any], name: str) -> str:
    """The part of a context that is about the first difference."""
    place = detail["index"] - detail["context_start"]
    start = max(0, place - _CONTEXT // 2)
    return str(detail[name])[start : start + _CONTEXT]


def _turns(check: Check) -> Iterator[Text]:
    for note in check.turns.values():
        yield Text()
        yield Text(
            f"note: on {inert(note.route)} the prefix property is broken in {note.count} "
            f"record(s): in record {note.record} the text of {note.turn} turns departs from that "
            f"of the turns before at character {note.index}; the template rewrites history"
        )


def _shares(check: Check) -> Iterator[Text]:
    """Parts that several routes share, each with those routes."""
    users: dict[tuple[str, str], list[str]] = {}
    for name, tally in check.routes.items():
        for part, value in tally.parts.items():
            users.setdefault((part, value), []).append(name)
    yield Text()
    yield Text("What routes share they cannot check:", "dim")
    for (part, value), names in users.items():
        if len(names) > 1:
            of = "all" if len(names) == len(check.routes) else ", ".join(map(inert, names))
            yield Text(f"  {inert(part)}, {inert(value)}: {of}", "dim")
