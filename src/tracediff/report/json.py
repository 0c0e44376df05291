"""The objects that `--json` writes. Fields may be added, never changed.

JSON has no NaN and no infinity: such numbers are written as the strings `"NaN"`, `"Infinity"` and
`"-Infinity"`, which `float()` in Python and `Number()` in JavaScript read back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Final

from tracediff.report import spans
from tracediff.verdict import Divergence, StageResult, Verdict

FORMAT: Final = 1


def to_json(verdict: Verdict) -> dict[str, Any]:
    """The object of `tracediff bisect --json`, JSON types only."""
    first = verdict.first if verdict.outcome == "diverged" else None
    return dict(
        plain(
            {
                "format": FORMAT,
                "outcome": verdict.outcome,
                "reason": verdict.reason,
                **({} if verdict.rank is None else {"rank": verdict.rank}),
                "baseline": verdict.baseline,
                "target": verdict.target,
                "first": divergence(first) if first else None,
                "last_agreeing": verdict.last_agreeing,
                "stages": [_stage(stage) for stage in verdict.stages],
                "also": [divergence(other) for other in verdict.also],
                "coverage": verdict.coverage,
                "matched_by": verdict.matched_by,
                "unmatched": [asdict(group) for group in verdict.unmatched],
                "neighbours": [asdict(neighbour) for neighbour in verdict.neighbours],
                "environment": _settings(verdict.environment),
                "trajectory": [
                    {"step": step, "name": name, "baseline": baseline, "target": target}
                    for step, name, baseline, target in verdict.trajectory
                ],
                "replayed": asdict(verdict.replayed) if verdict.replayed else None,
                "warnings": verdict.warnings,
                "next_command": verdict.next_command,
                "cost": asdict(verdict.cost),
            }
        )
    )


def divergence(found: Divergence) -> dict[str, Any]:
    """One divergence, as under `first` and `also`."""
    bound = found.bound
    return {
        "stage": found.stage,
        "step": found.step,
        "site": found.site,
        "path": found.path,
        "port": found.port,
        "call": found.call,
        "order": found.order,
        "target_site": found.target_site or None,
        "op": found.op,
        "kind": found.kind,
        "pattern": found.pattern,
        "detail": found.detail,
        "meaning": found.meaning or None,
        "origin": found.origin,
        "blame": found.blame,
        "error": asdict(found.error),
        "bound": {"rel_l2": bound.rel_l2, "from": bound.derivation} if bound else None,
        "where": found.where,
        "shapes": found.shapes,
        "deviations": [asdict(deviation) for deviation in found.deviations],
        "settings": _settings(found.settings),
        "span": spans.as_json(found.span) if found.span else None,
    }


def _stage(result: StageResult) -> dict[str, Any]:
    baseline, target = result.unmatched
    return asdict(result) | {"unmatched": {"baseline": baseline, "target": target}}


def _settings(rows: Iterable[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    return [{"name": name, "baseline": a, "target": b} for name, a, b in rows]


def plain(value: Any) -> Any:
    """A value made of JSON types only.

    Tuples become lists, NumPy scalars Python numbers, bytes hexadecimal text, records objects,
    and whatever else there is its `str`.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def _finite(value: float) -> float | str:
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def dumps(value: Any) -> str:
    """Valid JSON text of any value that `plain` takes, with a final line break."""
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"
