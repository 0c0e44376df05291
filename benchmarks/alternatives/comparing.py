"""Each tool's comparison of two records: what it costs and what it names."""

from __future__ import annotations

import csv
import json
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

Comparison = Callable[[Path, Path], tuple[float, str]]

HASHES: Final = """
import json, sys
a, b = (json.load(open(f"{folder}/hashes.json")) for folder in sys.argv[1:])
if [name for name, _ in a] != [name for name, _ in b]:
    print(f"nothing: the operations are not the same ({len(a)} and {len(b)})")
else:
    print("first", next((x[0] for x, y in zip(a, b) if x[1] != y[1]), "none"))
"""
VALUES: Final = """
import sys, numpy, torch
a, b = (torch.load(f"{folder}/values.pt") for folder in sys.argv[1:])
for rtol in (1e-7, 1e-5, 1e-3):
    wrong = []
    for name in a:
        try:
            numpy.testing.assert_allclose(a[name].numpy(), b[name].numpy(), rtol=rtol, atol=rtol)
        except AssertionError:
            wrong.append(name)
    found = wrong[0] if wrong else "none"
    print(f"rtol {rtol:g}: first {found}, {len(wrong)} of {len(a)}", end="; ")
"""
SUMMARIES: Final = """
import glob, json, sys, safetensors.numpy as st, os, numpy
first = {}
for side, folder in enumerate(sys.argv[1:]):
    pattern = f"{folder}/**/*outputs*.safetensors"
    files = sorted(glob.glob(pattern, recursive=True), key=os.path.getmtime)
    for file in files:
        name = os.path.basename(file)
        first.setdefault(name, [None, None])[side] = st.load_file(file)
wrong = [
    name for name, (a, b) in first.items()
    if a and b and any(not numpy.allclose(a[k], b[k], rtol=1e-5, atol=1e-5) for k in a)
]
print(f"rtol 1e-05: first {wrong[0] if wrong else 'none'}, {len(wrong)} of {len(first)}")
"""


TORCHLENS: Final = """
import sys, torchlens as lens
a, b = (lens.load(f"{folder}/trace.tlspec") for folder in sys.argv[1:])
first = lens.debug.first_divergence(a, b)
print("first_divergence:", first and f"{first['op']} {first['status']}", end="; ")
bundle = lens.bundle({"a": a, "b": b}, baseline="a")
for on in ("out", "grad"):
    deltas = [(k, v["b"]) for k, v in bundle.norm_delta(on=on).items() if "b" in v]
    for limit in (1e-7, 1e-5, 1e-3) if deltas else ():
        wrong = [k for k, delta in deltas if delta > limit]
        place = a[wrong[0]].module if wrong else ""
        found = f"{wrong[0]} in {place}" if wrong else "none"
        print(f"{on} {limit:g}: first {found}, {len(wrong)} of {len(deltas)}", end="; ")
"""


def compare_by(program: str) -> Comparison:
    return lambda a, b: _timed([sys.executable, "-c", program, str(a), str(b)])


def tracediff(a: Path, b: Path) -> tuple[float, str]:
    command = [sys.executable, "-m", "tracediff", "bisect", str(a / "run.zarr"), "--json", "-"]
    seconds, out = _timed([*command, str(b / "run.zarr")])
    first = json.loads(out)["first"] or {}
    wanted = ("site", "pattern", "detail", "blame")
    return seconds, ", ".join(f"{key} {first.get(key)}" for key in wanted)


def msprobe(a: Path, b: Path) -> tuple[float, str]:
    """Its command; what it names is the first row of its table that does not pass."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "msprobe.msprobe", "compare", "-o", out]
        seconds, _ = _timed([*command, "-gp", str(a / "step0"), "-tp", str(b / "step0")])
        with max(Path(out).glob("*.csv")).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    results = Counter(row["Result"] for row in rows)
    wrong = next((row for row in rows if row["Result"] != "pass"), None)
    first = f"{wrong['NPU Name']}: {wrong['Err_message']}" if wrong else "none"
    counts = ", ".join(f"{number} {result}" for result, number in results.items())
    return seconds, f"first {first}; {counts}"


def _timed(command: list[str]) -> tuple[float, str]:
    """Processor seconds of a fresh process, the least of three, and what it prints."""
    least, out = float("inf"), ""
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        least = min(least, sum(after[:2]) - sum(before[:2]))
    return least, out.strip()
