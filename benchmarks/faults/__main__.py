"""`python -m benchmarks.faults`: runs the benchmark, prints a table and writes JSON."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.faults.pool import all_cases, run_cases
from benchmarks.faults.runner import as_json
from benchmarks.faults.score import markdown, summary, table


def main() -> int:
    """Exit code 0 whatever the rates: they are a measurement, not a test."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="run only the cases whose id matches one")
    parser.add_argument("--json", type=Path, help="where the results are written")
    parser.add_argument("--markdown", type=Path, help="where the report is written")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    options = parser.parse_args()
    cases = all_cases()
    if options.patterns:
        cases = [c for c in cases if any(fnmatchcase(c.id, p) for p in options.patterns)]
    if options.list:
        print("\n".join(case.id for case in cases))
        return 0
    started = time.perf_counter()
    parts = [cases[i :: options.jobs] for i in range(options.jobs)]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        found = [
            r
            for part in pool.map(run_cases, [[c.id for c in part] for part in parts])
            for r in part
        ]
    place = {case.id: index for index, case in enumerate(cases)}
    results = sorted(found, key=lambda result: place[result.id])
    facts = summary(results, time.perf_counter() - started)
    print(table(results, facts))
    if options.json:
        document = {"summary": facts, "cases": [as_json(result) for result in results]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(markdown(results, facts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
