"""A difference in rendering: its sample and step, its tokens by provenance and by label mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.text import Text

from tracediff.rendering.provenance import IGNORED, SPECIAL, TEMPLATE
from tracediff.report.text import inert, visible
from tracediff.verdict import Divergence

SIDES: Final = ("baseline", "target")
SHOWN: Final = frozenset(
    {
        *("step", "sample", "target_sample", "provenance", "inputs", "special", "origins"),
        *("trained", "baseline_tokens", "target_tokens"),
    }
)
"""Keys of `Divergence.detail` that are told here."""

STYLES: Final = {"template": "cyan", "special": "magenta", "masked": "dim", "content": ""}
_COLOURS: Final = {"template": "#0a7ea4", "special": "#a0359b", "masked": "#999999"}


def facts(first: Divergence) -> Iterator[tuple[str, str]]:
    """Label and sentence of what is known of a difference in rendering."""
    detail = first.detail
    if "sample" in detail:
        other = detail.get("target_sample")
        named = f" (the target's {other})" if other not in (None, detail["sample"]) else ""
        yield "sample", f"{detail['sample']}{named}, at its step {detail.get('step', '')}"
    if isinstance(detail.get("provenance"), Mapping):
        yield "comes from", _against(detail["provenance"])
    counts = detail.get("special")
    if isinstance(counts, Mapping):
        told = (
            f"{name} {counts['baseline'][name]} against {counts['target'].get(name, 0)}"
            for name in counts["baseline"]
        )
        yield "counts", ", ".join(told)
    if isinstance(detail.get("trained"), Mapping):
        yield "trained", f"{_against(detail['trained'])} labels"


def tokens(first: Divergence, side: str) -> list[tuple[str, str]] | None:
    """The IDs around the difference as one side has them, each with what it is.

    Returns:
        Pairs of a token as it is shown and `template`, `special`, `content` or, of labels,
        `masked`; None where there are no IDs.
    """
    detail = first.detail
    ids = detail.get(f"{side}_ids")
    if not isinstance(ids, list):
        return None
    names = detail.get(f"{side}_tokens") or [""] * len(ids)
    origins = detail.get("origins", {}).get(side) or [""] * len(ids)
    return [
        (f"{identifier}⟨{visible(name)}⟩" if name else str(identifier), _kind(identifier, origin))
        for identifier, name, origin in zip(ids, names, origins, strict=False)
    ]


def as_text(first: Divergence, side: str) -> Text | None:
    """The tokens of one side in colours, for a terminal."""
    found = tokens(first, side)
    if found is None:
        return None
    line = Text(f"from {first.detail.get('context_start', 0)}:")
    for shown, kind in found:
        line.append(" ").append(inert(shown), STYLES[kind])
    return line


def as_html(first: Divergence) -> Iterator[str]:
    """The tokens of both sides in colours, with a legend."""
    lines = [(side, tokens(first, side)) for side in SIDES]
    kinds = {kind for _, found in lines for _, kind in found or ()}
    for side, found in lines:
        if found is not None:
            spans = " ".join(_span(shown, kind) for shown, kind in found)
            start = first.detail.get("context_start", 0)
            yield f"<pre>{side} from {start}: {spans}</pre>"
    if told := [kind for kind in _COLOURS if kind in kinds]:
        yield f"<p>{', '.join(_span(kind, kind) for kind in told)}</p>"


def _span(shown: str, kind: str) -> str:
    from html import escape

    text = escape(inert(shown))
    colour = _COLOURS.get(kind)
    return f'<span style="color:{colour}" title="{kind}">{text}</span>' if colour else text


def _kind(identifier: Any, origin: str) -> str:
    if identifier == IGNORED:
        return "masked"
    return origin if origin in (TEMPLATE, SPECIAL) else "content"


def _against(sides: Mapping[str, Any]) -> str:
    one, other = (inert(str(sides.get(side))) for side in SIDES)
    return one if one == other else f"{one} against {other}"
