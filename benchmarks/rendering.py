"""Renders, records and bisects a data set of the size of a real one, and measures it.

    python -m benchmarks.rendering --model DIR [--records 168574] [--batch 1]

Records of clinical questions and answers are drawn from templates and from the tokenizer's own
words, deterministic by seed. One run is bare, two are recorded; in the last, one record in the
middle is changed, and `bisect` has to name it. Each part is a process of its own, so that its peak
of memory is its own.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Final

REAL_SIZE: Final = 168_574
CHANGED: Final = "dose was changed here"

_QUESTIONS: Final = (
    "What is the usual dose of {drug} in {condition}?",
    "A {age}-year-old {person} with {condition} takes {drug}. {free} What should be monitored?",
    "Which value of {lab} is expected in {condition}? {free}",
    "{free} The {lab} is {number} {unit}. What is the next step?",
)
_ANSWERS: Final = (
    "Start with {number} mg of {drug} every {hours} hours. {free}",
    "The {lab} should stay between {low} and {number} {unit}. {free} {free}",
    "{free} In {condition}, {drug} is stopped when the {lab} exceeds {number} {unit}.",
)
_FILLS: Final[dict[str, Sequence[str]]] = {
    "drug": ["metformin", "lisinopril", "apixaban", "vancomycin", "amiodarone", "warfarin"],
    "condition": ["septic shock", "heart failure", "type 2 diabetes", "acute pancreatitis"],
    "lab": ["serum sodium", "lactate", "troponin I", "creatinine", "HbA₁c", "pCO₂"],
    "unit": ["mmol/L", "µg/kg/min", "mg·dL⁻¹", "ng/mL", "%"],
    "person": ["man", "woman"],
}
_WORDS: Final = 6000
"""Words that free text is drawn from, by Zipf's law over the rank in the vocabulary."""

_FREE: Final = (12, 34)


def records(words: Sequence[str], count: int, seed: int = 0) -> Iterator[list[dict[str, str]]]:
    """Conversations of one question and one answer, the same for the same arguments."""
    rng = random.Random(seed)
    weights = list(accumulate(1 / rank for rank in range(2, len(words) + 2)))

    def filled(template: str) -> str:
        fills = {name: rng.choice(values) for name, values in _FILLS.items()}
        numbers = {
            "age": rng.randint(18, 95),
            "number": round(rng.lognormvariate(2, 1), 1),
            "low": rng.randint(0, 9),
            "hours": rng.choice((6, 8, 12, 24)),
        }
        parts = template.split("{free}")
        made = [part.format(**fills, **numbers) for part in parts]
        free = [
            " ".join(rng.choices(words, cum_weights=weights, k=rng.randint(*_FREE))).capitalize()
            + "."
            for _ in parts[1:]
        ]
        return made[0] + "".join(a + b for a, b in zip(free, made[1:], strict=True))

    for _ in range(count):
        yield [
            {"role": "user", "content": filled(rng.choice(_QUESTIONS))},
            {"role": "assistant", "content": filled(rng.choice(_ANSWERS))},
        ]


def words_of(model: Path) -> list[str]:
    """The commonest whole words of a byte-level vocabulary: lower IDs were merged earlier."""
    vocab = json.loads((model / "tokenizer.json").read_bytes())["model"]["vocab"]
    found = [token[1:] for token in vocab if token[0] == "Ġ" and token[1:].isalpha()]
    ranked = sorted((word for word in found if len(word) > 1), key=lambda word: vocab[f"Ġ{word}"])
    return ranked[:_WORDS]


# ---- parts, one process each --------------------------------------------------------------------


def load(model: Path) -> Any:
    """The tokenizer of a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def render(
    tokenizer: Any, words: Sequence[str], count: int, batch: int, changed: int | None
) -> int:
    """What a script does before a fine-tune; returns the number of tokens."""
    tokens, done = 0, 0
    source = records(words, count)
    while chunk := list(islice(source, batch)):
        if changed is not None and done <= changed < done + len(chunk):
            chunk[changed - done][1]["content"] += f" The {CHANGED}."
        given = chunk if batch > 1 else chunk[0]
        ids = tokenizer.apply_chat_template(given, return_dict=False)
        tokens += sum(map(len, ids)) if batch > 1 else len(ids)
        done += len(chunk)
    return tokens


def _part(name: str, args: argparse.Namespace) -> dict[str, Any]:
    if name == "bisect":
        return _bisect(args.folder)
    if name == "bare":
        import torch  # noqa: F401  (as in the recorded script)

        tokenizer, words = load(args.model), words_of(args.model)
        began, cpu = time.perf_counter(), time.process_time()
        tokens = render(tokenizer, words, args.records, args.batch, None)
    else:
        import tracediff

        changed = args.records // 2 if name == "changed" else None
        with tracediff.record(args.folder / f"{name}.zarr", stack="pytorch"):
            tokenizer, words = load(args.model), words_of(args.model)
            began, cpu = time.perf_counter(), time.process_time()
            tokens = render(tokenizer, words, args.records, args.batch, changed)
    return {**_spent(began, cpu), "tokens": tokens}


def _spent(began: float, cpu: float) -> dict[str, float]:
    """Seconds since then, by the clock and of the processor: a busy machine stretches the first."""
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}


def _bisect(folder: Path) -> dict[str, Any]:
    import tracediff

    began, cpu = time.perf_counter(), time.process_time()
    verdict = tracediff.bisect(folder / "recorded.zarr", folder / "changed.zarr")
    spent = _spent(began, cpu)
    first = verdict.first
    return {
        **spent,
        "outcome": verdict.outcome,
        "site": first.site if first else None,
        "index": first.detail.get("index") if first else None,
        "removed": first.detail.get("removed") if first else None,
        "added": first.detail.get("added") if first else None,
    }


# ---- the whole ----------------------------------------------------------------------------------


def measure(model: Path, count: int, batch: int = 1) -> dict[str, Any]:
    """Runs all parts.

    Returns:
        Seconds, records per processor second and peak memory (bytes) of each part, tokens, bytes
        of the trace, and what `bisect` found.
    """
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("bare", "recorded", "changed", "bisect"):
            command = [sys.executable, "-m", "benchmarks.rendering", "--part", name]
            command += ["--model", str(model), "--records", str(count), "--batch", str(batch)]
            done = subprocess.run(
                [*command, "--folder", folder], check=True, stdout=subprocess.PIPE, text=True
            )
            parts[name] = json.loads(done.stdout.splitlines()[-1])
        trace = Path(folder) / "recorded.zarr"
        size = sum(file.stat().st_size for file in trace.rglob("*") if file.is_file())
    for part in parts.values():
        part["records_per_second"] = count / part["cpu_seconds"]
    return {"records": count, "batch": batch, "trace_bytes": size, **parts}


def table(found: dict[str, Any]) -> str:
    """The figures as a table in Markdown."""
    tokens = found["recorded"]["tokens"]
    lines = [
        "| part | seconds | processor seconds | records per processor second | peak memory |",
        "|---|---|---|---|---|",
    ]
    for name in ("bare", "recorded", "changed", "bisect"):
        part = found[name]
        lines.append(
            f"| {name} | {part['seconds']:.1f} | {part['cpu_seconds']:.1f} | "
            f"{part['records_per_second']:,.0f} | {part['peak'] / 2**20:.0f} MiB |"
        )
    lines += [
        "",
        f"{found['records']:,} records, {tokens:,} tokens, trace of {found['trace_bytes']:,} "
        f"bytes, {found['trace_bytes'] / tokens:.2f} a token. First divergence: "
        f"{found['bisect']['site']}, index {found['bisect']['index']}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder with tokenizer files")
    parser.add_argument("--records", type=int, default=REAL_SIZE)
    parser.add_argument("--batch", type=int, default=1, help="conversations per template call")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        found = _part(args.part, args)
        found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(found))
        return
    result = measure(args.model, args.records, args.batch)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(table(result))


if __name__ == "__main__":
    main()
