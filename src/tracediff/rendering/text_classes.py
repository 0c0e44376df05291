"""Classes of difference between two texts, from the most particular to the most general."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from tracediff.rendering.files import Vocabulary

_Form = Literal["NFC", "NFD", "NFKC", "NFKD"]

_SHOWN: Final = 40
_COMPOSED: Final[tuple[_Form, ...]] = ("NFC", "NFKC")
_FORMS: Final[tuple[_Form, ...]] = ("NFC", "NFD", "NFKC", "NFKD")
_LONGEST_PROMPT: Final = 200
_MONTH: Final = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE: Final = re.compile(
    rf"\d{{4}}-\d{{2}}-\d{{2}}|\d{{1,2}}[/.]\d{{1,2}}[/.]\d{{2,4}}|\d{{1,2}} {_MONTH},? \d{{4}}"
    rf"|{_MONTH} \d{{1,2}},? \d{{4}}|\b\d{{2}}:\d{{2}}(?::\d{{2}})?\b",
    re.IGNORECASE,
)
_THINKING: Final = re.compile(
    r"\s*<(think|thinking|thought|reasoning)>.*?</\1>\s*|\s*</?(?:think|thinking|thought|reasoning)>\s*",
    re.DOTALL,
)
_TAGS: Final = re.compile(r"</?(?:think|thinking|thought|reasoning)>")
_HEADER: Final = re.compile(
    r"\s*(?:<[^<>\n]{1,30}>|\[[^\[\]\n]{1,30}\]|#{1,4} ?)*\s*"
    r"(?:<?\|?)(?:assistant|model|bot|gpt)\b[^\n]{0,20}\s*",
    re.IGNORECASE,
)
_SYSTEM: Final = re.compile(
    r"\W*(?:<\|?)?(?:system|developer|<<SYS>>)\b|.{0,40}<<SYS>>", re.I | re.S
)
_ROLE: Final = re.compile(r"<?\|?\b(system|developer|user|assistant|tool|model)\b(?:\|?>|\n|:)")
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_NUMBER: Final = re.compile(r"-?\d[\d.eE+-]*")
_SEPARATOR: Final = re.compile(r"[,:{}\[\]]\s*")


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two unequal texts, the first edit that leads from one to the other, and what is known.

    Attributes:
        index: First character at which they part.
        removed, added: What the first edit takes from the baseline and puts into the target.
        whole: Whether that edit is the only one.
        has_system: Whether the record has a system message of its own; None if not known.
    """

    baseline: str
    target: str
    index: int
    removed: str
    added: str
    whole: bool
    vocabulary: Vocabulary | None = None
    has_system: bool | None = None

    def same(self, normalise: Callable[[str], str]) -> bool:
        """Whether both texts are equal in a normal form."""
        return normalise(self.baseline) == normalise(self.target)

    @property
    def one_sided(self) -> str:
        """What one side has more than the other, if all that they differ by is one insertion."""
        return (
            (self.removed or self.added) if self.whole and not (self.removed and self.added) else ""
        )

    @property
    def longer(self) -> str:
        """The side that has more."""
        return "target" if len(self.target) > len(self.baseline) else "baseline"

    @property
    def shorter(self) -> str:
        """The side that has less."""
        return "baseline" if self.longer == "target" else "target"


@dataclass(frozen=True, slots=True)
class Class:
    """A named class, its sentence, and facts that bear it out."""

    name: str
    meaning: str
    detail: Mapping[str, Any] = field(default_factory=dict)


def classify_text(pair: TextPair) -> Class:
    """The first class that explains the whole difference, or else the bare kind of edit."""
    for find in (
        _json,
        _escapes,
        _white_space,
        _unicode,
        _date,
        _special_tokens,
        _generation_prompt,
        _thinking,
        _system,
        _cut,
    ):
        found = find(pair)
        if found:
            return found
    name = "inserted" if not pair.removed else "deleted" if not pair.added else "replaced"
    return Class(name, _what(pair))


def _escapes(pair: TextPair) -> Class | None:
    """A line break or a tab on one side, a backslash and a letter on the other."""
    if not pair.same(lambda text: text.replace("\\n", "\n").replace("\\t", "\t")):
        return None
    return Class(
        "escape sequences",
        f"one side took a backslash and a letter for a line break or a tab: {_what(pair)}",
    )


def _white_space(pair: TextPair) -> Class | None:
    forms: tuple[tuple[str, str, Callable[[str], str]], ...] = (
        ("newline", "only line breaks differ", lambda text: re.sub(r"[\r\n]", "", text)),
        ("trailing whitespace", "only whitespace at the end differs", str.rstrip),
        ("whitespace", "only white space differs", lambda text: "".join(text.split())),
    )
    for name, meaning, normalise in forms:
        if pair.same(normalise):
            return Class(name, f"{meaning}: {_what(pair)}")
    return None


def _unicode(pair: TextPair) -> Class | None:
    for form in _COMPOSED:
        if pair.same(partial(unicodedata.normalize, form)):
            sides = {"baseline": _forms(pair.baseline), "target": _forms(pair.target)}
            told = ", ".join(
                f"the {side} is {' and '.join(f) or 'in none'}" for side, f in sides.items()
            )
            return Class(
                "unicode normalisation",
                f"both texts are the same after {form}: one side normalises, one does not ({told})",
                {"form": form, "forms": sides},
            )
    return None


def _forms(text: str) -> list[str]:
    return [form for form in _FORMS if unicodedata.is_normalized(form, text)]


def _json(pair: TextPair) -> Class | None:
    """Texts that are equal once each JSON value in them is written in one way."""
    a, b = _json_spans(pair.baseline), _json_spans(pair.target)
    if not a[1] or a[0] != b[0]:
        return None
    spans = [(x, y) for x, y in zip(a[1], b[1], strict=True) if x != y]
    how = []
    if any(_compact(json.loads(x)) != _compact(json.loads(y)) for x, y in spans):
        how.append("order of keys")
    if any(_separators(x) != _separators(y) for x, y in spans):
        how.append("separators")
    if any(sorted(_STRING.findall(x)) != sorted(_STRING.findall(y)) for x, y in spans):
        how.append("escapes")
    if any(_numbers(x) != _numbers(y) for x, y in spans):
        how.append("spelling of numbers")
    meaning = f"the same JSON value is written in two ways, which differ in: {', '.join(how)}"
    return Class("JSON serialisation", f"{meaning}; {_what(pair)}", {"ways": how})


def _json_spans(text: str) -> tuple[str, list[str]]:
    """The text with each JSON object or list in canonical form, and those spans as they were."""
    decoder = json.JSONDecoder()
    out, spans, start = [], [], 0
    for match in re.finditer(r"[{\[]\s*[\"{\[]", text):
        if match.start() < start:
            continue
        try:
            value, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        out += [text[start : match.start()], _compact(value, sort_keys=True)]
        spans.append(text[match.start() : end])
        start = end
    return "".join([*out, text[start:]]), spans


def _compact(value: Any, *, sort_keys: bool = False) -> str:
    return json.dumps(_plain_numbers(value), sort_keys=sort_keys)


def _plain_numbers(value: Any) -> Any:
    """A JSON value in which floats that are whole are integers: JavaScript knows only one kind."""
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _numbers(span: str) -> list[str]:
    return sorted(_NUMBER.findall(_STRING.sub('""', span)))


def _separators(span: str) -> set[str]:
    return set(_SEPARATOR.findall(_STRING.sub('""', span)))


def _date(pair: TextPair) -> Class | None:
    if not pair.same(lambda text: _DATE.sub("DATE", text)):
        return None
    dates = zip(_DATE.findall(pair.baseline), _DATE.findall(pair.target), strict=True)
    one, other = next((x, y) for x, y in dates if x != y)
    return Class(
        "date",
        f"only a date or time differs, {one!r} against {other!r}: the template reads a clock, "
        "or falls back to a date of its own",
    )


def _special_tokens(pair: TextPair) -> Class | None:
    vocabulary = pair.vocabulary
    bos = vocabulary.spelling(vocabulary.bos) if vocabulary else None
    eos = vocabulary.spelling(vocabulary.eos) if vocabulary else None
    if bos:
        counts = [_leading(text, bos) for text in (pair.baseline, pair.target)]
        if counts[0] != counts[1] and pair.same(
            lambda text: text[_leading(text, bos) * len(bos) :]
        ):
            return bos_class(counts[0], counts[1], bos)
    if eos and pair.same(lambda text: text.replace(eos, "")):
        counts = [text.count(eos) for text in (pair.baseline, pair.target)]
        return eos_class(counts[0], counts[1], eos)
    return None


def bos_class(baseline: int, target: int, token: str) -> Class:
    """The class of two rows that differ only by how many BOS they begin with."""
    counts = {"bos": {"baseline": baseline, "target": target}}
    if max(baseline, target) > 1:
        meaning = f"{token!r} begins the baseline {baseline} times and the target {target} times"
        return Class("BOS twice", f"{meaning}: template and tokenizer both add it", counts)
    side = "baseline" if baseline < target else "target"
    return Class("BOS missing", f"the {side} does not begin with {token!r}", counts)


def eos_class(baseline: int, target: int, token: str) -> Class:
    """The class of two rows that differ only by where EOS stands."""
    counts = {"eos": {"baseline": baseline, "target": target}}
    if baseline == target:
        return Class("EOS elsewhere", f"{token!r} stands at another place", counts)
    side = "baseline" if baseline < target else "target"
    few, many = sorted((baseline, target))
    return Class("EOS missing", f"the {side} has {few} of the other's {many} {token!r}", counts)


def _leading(text: str, token: str) -> int:
    count = 0
    while text.startswith(token, count * len(token)):
        count += 1
    return count


def _generation_prompt(pair: TextPair) -> Class | None:
    rest = pair.one_sided
    at_end = pair.index == min(len(pair.baseline), len(pair.target))
    if not rest or not at_end or len(rest) > _LONGEST_PROMPT:
        return None
    if not _HEADER.match(rest):
        return None
    meaning = f"the {pair.shorter} lacks the header of the answer to come, {rest[:_SHOWN]!r}"
    return Class("generation prompt", meaning)


def _thinking(pair: TextPair) -> Class | None:
    if pair.same(lambda text: _TAGS.sub("", text)):
        return Class("thinking block", f"only the tags of thinking blocks differ: {_what(pair)}")
    if not pair.same(lambda text: "".join(_THINKING.sub("", text).split())):
        return None
    counts = [len(_THINKING.findall(text)) for text in (pair.baseline, pair.target)]
    meaning = f"only thinking blocks differ: {counts[0]} in the baseline, {counts[1]} in the target"
    if counts[0] == counts[1]:
        meaning = f"only what thinking blocks hold differs: {_what(pair)}"
    blocks = {"baseline": counts[0], "target": counts[1]}
    return Class("thinking block", meaning, {"blocks": blocks})


def _system(pair: TextPair) -> Class | None:
    if pair.has_system:
        return None
    if pair.one_sided and _SYSTEM.match(pair.one_sided):
        meaning = f"the {pair.longer} has a system turn that the {pair.shorter} does not have"
        return Class("system default", f"{meaning}: {pair.one_sided[:_SHOWN]!r}")
    roles = _ROLE.findall(pair.baseline[: pair.index])
    if pair.whole and pair.has_system is False and roles and roles[-1] in ("system", "developer"):
        return Class("system default", f"the template's own system text differs: {_what(pair)}")
    return None


def _cut(pair: TextPair) -> Class | None:
    a, b = pair.baseline, pair.target
    short, long = sorted((a, b), key=len)
    if long.startswith(short):
        end = long[len(short) :][:_SHOWN]
        meaning = f"the {pair.longer} goes on where the other ends: {end!r}"
        return Class("truncated", meaning, {"side": "right"})
    if long.endswith(short) and short:
        meaning = f"the {pair.shorter} lacks the first {len(long) - len(short)} characters"
        return Class("truncated", meaning, {"side": "left"})
    return None


def _what(pair: TextPair) -> str:
    if not pair.added:
        return f"the target lacks {pair.removed[:_SHOWN]!r}"
    if not pair.removed:
        return f"the target has {pair.added[:_SHOWN]!r} more"
    return f"{pair.removed[:_SHOWN]!r} against {pair.added[:_SHOWN]!r}"
