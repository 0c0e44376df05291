"""Rates with their intervals, as a table, as JSON and as Markdown."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.faults.reasons import REASONS
from benchmarks.faults.runner import Result, wilson
from tracediff.events import STAGES

_VERSIONS = ("torch", "transformers", "peft", "mlx", "mlx-lm", "numpy", "zarr")
SMALL_EFFECT = 1e-4


def summary(results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Counts, rates and intervals: of all cases, by stage, by dtype and by pair of stacks."""
    groups: dict[str, list[Result]] = {"all": list(results)}
    faults = [r for r in results if r.stage != "twin"]
    for stage in STAGES:
        groups[f"stage {stage}"] = [r for r in faults if r.stage == stage]
    for dtype in sorted({r.dtype for r in results}):
        groups[dtype] = [r for r in results if r.dtype == dtype]
    for pair in sorted({r.pair for r in results}):
        groups[f"pair {pair}"] = [r for r in results if r.pair == pair]
    small = {r.name for r in faults if r.real and r.detected and r.effect < SMALL_EFFECT}
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(seconds, 1),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, CPU",
        "versions": {name: version(name) for name in _VERSIONS},
        "groups": {name: _rates(group) for name, group in groups.items() if group},
        "small_effect_kinds": sorted(small),
        "not_real": [r.id for r in results if r.stage != "twin" and not r.real],
        "twins_not_genuine": [
            r.id for r in results if r.stage == "twin" and not r.real and not r.same
        ],
    }


def _rates(results: Sequence[Result]) -> dict[str, Any]:
    faults = [r for r in results if r.stage != "twin" and r.real]
    decidable = [r for r in faults if r.whom != "undecided"]
    twins = [r for r in results if r.stage == "twin"]

    def rate(group: Sequence[Result], right: Callable[[Result], bool]) -> dict[str, Any]:
        count = sum(map(right, group))
        low, high = wilson(count, len(group))
        return {"count": count, "of": len(group), "interval": [round(low, 3), round(high, 3)]}

    return {
        "detected": rate(faults, lambda r: r.detected),
        "located": rate(faults, lambda r: r.located),
        "blame_right": rate(faults, lambda r: r.blamed == "right"),
        "side_named": rate(decidable, lambda r: r.blamed == "right"),
        "blame_wrong": rate(faults, lambda r: r.blamed == "wrong"),
        "false_alarms": rate(twins, lambda r: r.outcome == "diverged"),
        "no_verdict": rate(twins, lambda r: r.outcome in ("incomparable", "error")),
    }


_COLUMNS = {
    "detected": "detected",
    "located": "located exactly",
    "blame_right": "blame as it should be",
    "side_named": "side named, of the decidable",
    "blame_wrong": "blame wrong",
    "false_alarms": "false alarms",
    "no_verdict": "twins without verdict",
}


def _cell(rate: dict[str, Any]) -> str:
    if not rate["of"]:
        return "-"
    low, high = rate["interval"]
    return f"{rate['count']}/{rate['of']} ({low:.0%}-{high:.0%})"


def _rows(facts: dict[str, Any]) -> list[list[str]]:
    rows = [["", *_COLUMNS.values()]]
    for name, rates in facts["groups"].items():
        rows.append([name, *(_cell(rates[column]) for column in _COLUMNS)])
    return rows


def table(results: Sequence[Result], facts: dict[str, Any]) -> str:
    """The rates in columns, then every case that went wrong."""
    rows = _rows(facts)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]
    lines.append("")
    for result in (r for r in results if r.why):
        lines.append(f"{result.id}: {result.why}")
        if result.expected:
            lines.append(f"    expected {result.expected}")
    lines += [f"{r.id}: nobody blamed" for r in results if _is_unblamed(r)]
    names = ("not_real", "twins_not_genuine", "small_effect_kinds")
    lines += [f"{name}: {', '.join(facts[name]) or '-'}" for name in names]
    lines.append(f"{len(results)} cases in {facts['seconds']} s")
    return "\n".join(lines)


def markdown(results: Sequence[Result], facts: dict[str, Any]) -> str:
    """The report that is kept in docs/accuracy.md."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    rows = ["| " + " | ".join(row) + " |" for row in _rows(facts)]
    rows.insert(1, "|" + " --- |" * (len(_COLUMNS) + 1))
    wrong = [r for r in results if r.why]
    lines = [
        "# Accuracy",
        "",
        "What `python -m benchmarks.faults` (or `make faults`) measured last; it writes this page.",
        "Planted faults and clean twins on tiny models with random weights: see "
        "`benchmarks/faults/planted/` and `twins.py`. Intervals are Wilson's, at 95%.",
        "",
        f"- Measured on {facts['date']}: {len(results)} cases in {facts['seconds']:.0f} s.",
        f"- {facts['machine']}, Python {facts['python']}, {versions}.",
        "- Pairs: `tt` PyTorch against PyTorch, `tm` PyTorch against MLX, `mt` the reverse, `mm` "
        "MLX against MLX.",
        "- A fault is located exactly if stage, step and site are the right ones.",
        "- Blame is as it should be if the side is named that departs from what it was itself "
        "given, or nobody where a fault only changes what is asked of a side "
        "(`benchmarks/faults/blames.py` says which, and why). Wrong is a side named that is not to "
        "blame.",
        f"- Faults found that move the loss by less than {SMALL_EFFECT:g} relative: "
        f"{len(facts['small_effect_kinds'])} kinds.",
        f"- Faults that changed nothing recorded, and are not counted: "
        f"{', '.join(facts['not_real']) or 'none'}.",
        "- Twins that came out bit-identical although they were meant to vary: "
        f"{', '.join(facts['twins_not_genuine']) or 'none'}.",
        "",
        *rows,
        "",
        "## What went wrong",
        "",
        *([_told(result) for result in wrong] or ["Nothing."]),
        "",
        "## Found, and nobody blamed",
        "",
        "Faults that could be told from what the side was itself given, and were not:",
        "",
        *([f"- `{r.id}` at `{r.first}`." for r in results if _is_unblamed(r)] or ["None."]),
    ]
    return "\n".join(lines) + "\n"


def _is_unblamed(result: Result) -> bool:
    return result.stage != "twin" and result.detected and result.blamed == "missed"


def _told(result: Result) -> str:
    expected = f" (expected {result.expected})" if result.expected else ""
    reason = REASONS.get(result.name, "not looked into yet")
    return f"- `{result.id}`: {result.why}{expected}. Likely why: {reason}."
