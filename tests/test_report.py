"""Reports: what a reader needs is there, and nothing in a trace can act on the terminal."""

from __future__ import annotations

import io
import math
import re
import unicodedata
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from tests.verdicts import ATTENTION, DIVERGED, FIRST, LONG_SITE, TEXT, hostile_verdict
from tracediff.report.html import to_html
from tracediff.report.terminal import render
from tracediff.report.text import elide, inert, percent, text_diff, times
from tracediff.verdict import OUTCOMES, Verdict


def printed(verdict: Verdict, width: int = 80, **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, emoji=False, highlight=False, **options)
    console.print(render(verdict), crop=False)
    return out.getvalue()


def line_with(text: str, needle: str) -> str:
    (line,) = [line for line in text.splitlines() if needle in line]
    return line


# ---- the terminal report -----------------------------------------------------------------------


def test_the_first_line_is_the_verdict() -> None:
    first, second = printed(DIVERGED).splitlines()[:2]
    assert first.startswith("✗ DIVERGED")
    assert "model.rope_theta is 100000" in f"{first} {second}"


def test_each_stage_has_its_mark_its_word_and_its_counts() -> None:
    report = printed(DIVERGED)
    assert "≈ equivalent" in line_with(report, " environment ")
    assert "✓ identical" in line_with(report, " rendering ")
    assert "– not exercised" in line_with(report, " rng ")
    assert line_with(report, "? incomparable").startswith(" loss ")
    forward = line_with(report, " forward  ")
    assert re.search(r"✗ diverged +1,412 +300 +5/3 +0\.12", forward)
    assert "no generator was used" in " ".join(report.split())


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_outcomes_are_told_apart_without_colour(outcome: str) -> None:
    others = [printed(replace(DIVERGED, outcome=other)).splitlines()[0] for other in OUTCOMES]
    assert others.count(printed(replace(DIVERGED, outcome=outcome)).splitlines()[0]) == 1


def test_the_error_is_told_as_a_number_and_against_its_bound() -> None:
    report = " ".join(printed(DIVERGED).split())
    assert "0.12 relative (L2), 50,000 times the bound" in report
    assert "2.5e-06, from matmul K=512 float32" in report
    assert "1,234 ulp" in report
    assert "the target is wrong" in report


def test_the_pattern_its_estimates_its_meaning_and_the_settings_are_there() -> None:
    report = printed(DIVERGED)
    assert "value differs: scaled (factor 4)" in report
    assert FIRST.meaning in report
    assert "model.rope_theta  100000 | 10000" in report
    assert "train.py:41 | train_mlx.py:38" in report


def test_the_deviations_show_index_and_both_values() -> None:
    assert re.search(r"\[0, 7, 3\] +1\.5 +-2\.25 +-3\.8", printed(DIVERGED))


def test_the_neighbours_stand_in_execution_order_with_the_first_one_pointed_at() -> None:
    lines = printed(DIVERGED).splitlines()
    above, here, below = (
        next(i for i, line in enumerate(lines) if re.match(pattern, line))
        for pattern in (r"\W+≈ +0/forward/norm#0:out", r"\W+✗> +0/forward", r"\W+✗ +0/forward/mlp")
    )
    assert above + 1 == here == below - 1


def test_long_lists_are_cut_short_and_say_so() -> None:
    report = printed(DIVERGED)
    assert "Environment: 9 differences" in report
    assert "version.package4" in report
    assert "version.package5" not in report
    assert "… and 4 more" in report
    assert re.search(r"^ +19 loss", report, re.MULTILINE), "the last step is always shown"


def test_coverage_and_unmatched_and_warnings_are_told() -> None:
    report = " ".join(printed(DIVERGED).split())
    assert "98.7% of the events" in report
    assert "400 by name, 12 by alias" in report
    assert "5 only in the baseline: no module" in report
    assert "the target was cut off at step 3" in report


def test_the_next_command_can_be_copied_from_a_narrow_terminal() -> None:
    assert DIVERGED.next_command in printed(DIVERGED, width=40)


def test_a_text_divergence_shows_the_invisible() -> None:
    lines = printed(replace(DIVERGED, first=TEXT, neighbours=())).splitlines()
    baseline = next(line for line in lines if "daily.␊␊User" in line)
    target = next(line for line in lines if "daily.‸␊User" in line)
    assert "of⟨U+00A0⟩ibu" in baseline
    carets = lines[lines.index(baseline) + 1]
    assert carets[baseline.index("␊")] == "^"
    assert carets.count("^") == 1
    assert lines.index(baseline) < lines.index(target)


def test_lookalike_characters_are_named() -> None:
    detail = {"baseline_context": "5 \u00b5g", "target_context": "5 \u03bcg"}
    report = printed(replace(DIVERGED, first=replace(TEXT, detail=detail)))
    assert "U+00B5 MICRO SIGN against U+03BC GREEK SMALL LETTER MU" in report
    assert "µ⟨U+00B5⟩" in report
    assert "μ⟨U+03BC⟩" in report


def test_ids_are_listed() -> None:
    detail = {"index": 3, "baseline_ids": [1, 198, 198], "target_ids": [1, 198, 5]}
    report = printed(replace(DIVERGED, first=replace(TEXT, kind="ids", detail=detail)))
    assert "from 0: 1 198 198" in report
    assert "from 0: 1 198 5" in report


def test_a_clean_verdict_names_what_agreed_last() -> None:
    clean = replace(DIVERGED, outcome="equivalent", first=None, neighbours=(), reason="They agree.")
    report = printed(clean)
    assert report.startswith("≈ EQUIVALENT")
    assert "First divergence" not in report
    assert "0/forward/model.layers.0.input_layernorm#0:out" in report


def test_the_smallest_verdict_prints() -> None:
    bare = Verdict(outcome="incomparable", reason="No events.", baseline="a", target="b")
    assert printed(bare).startswith("? INCOMPARABLE  No events.")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_keep_within_the_width(width: int) -> None:
    first = replace(FIRST, site=LONG_SITE, target_site=LONG_SITE + "x", path="p" * 300)
    neighbour = replace(DIVERGED.neighbours[0], site=LONG_SITE, op="Operation" * 9)
    verdict = replace(
        DIVERGED,
        first=first,
        also=(first,),
        neighbours=(neighbour,),
        environment=(("setting" * 40, "a" * 90, "b" * 90),),
        warnings=("word " * 60,),
        next_command="",
    )
    report = printed(verdict, width)
    assert max(map(cell_len, report.splitlines())) <= width
    assert ".q_proj#0:out" in report, "the end of a long site tells sites apart"


def test_ascii_terminals_get_ascii_marks() -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"  # type: ignore[assignment]

    out = Ascii()
    Console(file=out, width=80, markup=False).print(render(DIVERGED))
    assert out.getvalue().startswith("X DIVERGED")


# ---- hostile names -----------------------------------------------------------------------------


def test_names_from_a_trace_do_not_act_on_the_terminal() -> None:
    report = printed(hostile_verdict(), width=300)
    acting = {c for c in report if unicodedata.category(c) in {"Cc", "Cf", "Cs"}} - {"\n"}
    assert acting == set()
    assert "[bold red]x[/]␛[2J␇␍␊" in report, "markup is shown, not obeyed"


def test_names_from_a_trace_are_escaped_in_html() -> None:
    page = to_html(hostile_verdict())
    seen: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            seen.append(tag)

    Reader().feed(page)
    assert "script" not in seen
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page
    page.encode("utf-8")  # no lone surrogate is left


def test_the_html_report_needs_nothing_else() -> None:
    page = to_html(DIVERGED)
    assert not re.search(r"""(src|href|url)\s*[=(]|@import|https?:""", page)
    for needle in ("diverged", ATTENTION, "50,000 times the bound", "model.rope_theta", "98.7%"):
        assert needle in page


@given(st.text())
def test_inert_text_is_one_printable_line(text: str) -> None:
    shown = inert(text)
    assert len(shown.splitlines()) <= 1
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@given(st.text(), st.integers(0, 40))
def test_elided_text_fits_and_is_left_alone_where_it_does(text: str, width: int) -> None:
    shown = elide(text, width)
    assert cell_len(shown) <= max(width, 0)
    if cell_len(text) <= width:
        assert shown == text


@given(st.text(), st.text(), st.text(), st.text())
@example("0" * 20 + "\u0300" * 43, "", "0", "")  # which take no room
@example("\u0300" * 500, "a", "b", "")
def test_a_context_diff_fits_and_points_at_a_difference(
    head: str, baseline: str, target: str, tail: str
) -> None:
    sides = text_diff(head + baseline + tail, head + target + tail, 60)
    assert all(cell_len(line) <= 60 for side in sides for line in side)
    differs = baseline + tail != target + tail
    assert any("^" in carets for _, carets in sides) == differs


@pytest.mark.parametrize(
    ("error", "bound", "words"),
    [
        (0.5, 1.0, "50% of the bound"),
        (2.5, 1.0, "2.5 times the bound"),
        (5e4, 1.0, "50,000 times the bound"),
        (1e-9, 1.0, "far below the bound"),
        (0.0, 0.0, "exactly equal"),
        (1e-9, 0.0, "no difference is allowed here"),
        (math.inf, 1.0, "not a finite number"),
        (math.nan, 1.0, "not a finite number"),
    ],
)
def test_times_the_bound(error: float, bound: float, words: str) -> None:
    assert times(error, bound) == words


def test_a_share_is_whole_only_where_it_is_whole() -> None:
    shares = [percent(share) for share in (0.0, 1e-9, 0.5, 0.99999, 1.0)]
    assert shares == ["0%", "0.1%", "50.0%", "99.9%", "100%"]
