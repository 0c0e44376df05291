"""Makes strings and numbers from traces safe and short enough to print."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

_INERT_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})
_ELLIPSIS: Final = "…"


def inert(value: Any) -> str:
    """A value as one line of text in which no character acts on the terminal.

    Control characters become their pictures (`␊`, `␛`), other invisible ones (bidirectional
    overrides, zero-width joiners, lone surrogates) their code point: `⟨U+202E⟩`.
    """
    return "".join(map(_inert_character, value if isinstance(value, str) else _plain(value)))


def visible(text: str) -> str:
    """Like `inert`, and also shows unusual spaces by their code point."""
    return "".join(map(_visible_character, text))


def _plain(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _inert_character(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(character) in _INERT_CATEGORIES:
        return code_point(character)
    return character


def _visible_character(character: str) -> str:
    if character != " " and unicodedata.category(character) == "Zs":
        return code_point(character)
    return _inert_character(character)


def _spelled_character(character: str) -> str:
    """A character that differs: those beyond ASCII also by code point, since many look alike."""
    shown = _visible_character(character)
    return shown if character.isascii() or shown.startswith("⟨") else shown + code_point(character)


@dataclass(frozen=True, slots=True)
class Harmless:
    """A renderable of another part, whose text is made inert as it is drawn."""

    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.inner, options):
            lines = segment.text.split("\n")
            yield Segment("\n".join(map(inert, lines)), segment.style, segment.control)


def code_point(character: str) -> str:
    return f"⟨U+{ord(character):04X}⟩"


def describe(character: str) -> str:
    """Code point and Unicode name of a character: `U+00A0 NO-BREAK SPACE`."""
    name = unicodedata.name(character, "") or f"control {_inert_character(character)}"
    return f"U+{ord(character):04X} {name}"


def elide(text: str, width: int) -> str:
    """At most `width` terminal cells of `text`, keeping both ends: sites differ at their ends."""
    if cell_len(text) <= width:
        return text
    if width <= 1:
        return _ELLIPSIS[:width]
    tail = _take(reversed(text), (width - 1) * 2 // 3)[::-1]
    head = _take(iter(text), width - 1 - cell_len(tail))
    return head + _ELLIPSIS + tail


def _take(characters: Iterator[str], width: int) -> str:
    taken, used = [], 0
    for character in characters:
        used += cell_len(character)
        if used > width:
            break
        taken.append(character)
    return "".join(taken)


def number(value: float | int | None) -> str:
    """A figure with as many digits as help a reader: `0`, `31`, `0.125`, `1.3e-07`, `inf`."""
    if value is None:
        return "-"
    if isinstance(value, bool | int):
        return str(value)
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return f"{value:.7g}"


def figure(value: float) -> str:
    """An error figure: two significant digits."""
    return f"{value:.2g}" if math.isfinite(value) else number(value)


def percent(fraction: float) -> str:
    """A share with one decimal that reads 0% or 100% only where it is exactly that."""
    if fraction in (0, 1):
        return f"{fraction:.0%}"
    return f"{min(max(fraction, 0.001), 0.999):.1%}"


def times(error: float, bound: float) -> str:
    """How many times the bound an error is, in words."""
    if not math.isfinite(error):
        return "not a finite number"
    if bound <= 0:
        return "no difference is allowed here" if error else "exactly equal"
    ratio = error / bound
    if ratio <= 1:
        return f"{ratio:.0%} of the bound" if ratio >= 0.005 else "far below the bound"
    return f"{ratio:,.0f} times the bound" if ratio >= 10 else f"{ratio:.1f} times the bound"


def count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def text_diff(baseline: str, target: str, width: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """Two texts around their first difference, made visible, each with its line of carets.

    Returns:
        (text, carets) of the baseline and of the target, none wider than `width` cells.
    """
    first = next(
        (i for i, (a, b) in enumerate(zip(baseline, target, strict=False)) if a != b),
        min(len(baseline), len(target)),
    )
    start = first
    before = width // 3
    # Characters that become code points take more room, those that combine with others none.
    while start and before > 0 and first - start < width:
        start -= 1
        before -= cell_len(_visible_character(baseline[start]))
    window = slice(start, first + width)
    opcodes = SequenceMatcher(None, baseline[window], target[window], autojunk=False).get_opcodes()
    return (
        _marked(baseline[window], [(op, i, j) for op, i, j, _, _ in opcodes], start > 0, width),
        _marked(target[window], [(op, i, j) for op, _, _, i, j in opcodes], start > 0, width),
    )


def _marked(text: str, runs: list[tuple[str, int, int]], cut: bool, width: int) -> tuple[str, str]:
    line, carets = (_ELLIPSIS, " ") if cut else ("", "")
    for op, start, stop in runs:
        show: Callable[[str], str] = _visible_character if op == "equal" else _spelled_character
        if op != "equal" and start == stop:  # the other side has more characters here
            line, carets = line + "‸", carets + "^"
        for character in text[start:stop]:
            shown = show(character)
            if cell_len(line) + cell_len(shown) > width - 1:
                return line + _ELLIPSIS, carets
            line += shown
            carets += (" " if op == "equal" else "^") * cell_len(shown)
    return line, carets.rstrip()
