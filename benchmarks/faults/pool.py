"""All cases, and a part of them run in one process; several processes may share them."""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path

from benchmarks.faults import planted, twins
from benchmarks.faults.case import Case
from benchmarks.faults.runner import Bench, Result


def all_cases() -> list[Case]:
    return [*planted.REGISTRY.cases, *twins.REGISTRY.cases]


def run_cases(ids: list[str]) -> list[Result]:
    """Runs cases by their ids, one after the other, in this process."""
    chosen = {case.id: case for case in all_cases()}
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for index, identifier in enumerate(ids):
            try:
                results.append(bench.run(chosen[identifier]))
            except Exception:
                print(f"{identifier} cannot be run:\n{traceback.format_exc()}", file=sys.stderr)
                continue
            mark = results[-1].why or "ok"
            print(f"[{index + 1}/{len(ids)}] {identifier}: {mark}", file=sys.stderr, flush=True)
    return results
