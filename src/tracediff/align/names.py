"""Names: what the stacks call the same thing, and a user's own rules (`--map rules.toml`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from tracediff.errors import RulesError

_SIDES: Final = ("baseline", "target", "both")

_ALIASES: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "pytorch": (
        (r"^base_model\.model\.", ""),  # peft's two wrappers around the model
        (r"(^|\.)_orig_mod(?=\.|$)", ""),  # torch.compile
        (r"^module\.", ""),  # DistributedDataParallel
        (r"\.lora_([AB])\.[^.]+\.weight$", r".lora_\1"),
        (r"\.lora_embedding_([AB])\.[^.]+$", r".lora_\1"),
        (r"\.modules_to_save\.[^.]+(?=\.|$)", ""),
    ),
    "mlx": (
        (r"\.(linear|embedding)(?=\.|$)", ".base_layer"),  # inside LoRALinear, LoRAEmbedding
        (r"\.lora_a$", ".lora_A"),
        (r"\.lora_b$", ".lora_B"),
        (r"^(batch|eval_batch)\.inputs$", r"\1.input_ids"),
        (r"^(batch|eval_batch)\.targets$", r"\1.labels"),
        (r"\.switch_mlp\.(gate|up|down)_proj\.weight$", r".experts.\1_proj"),  # of all experts
    ),
}
"""Per stack: pattern and replacement, applied in order, onto a vocabulary of their own.

Names that are equal as they stand are paired before any of these is tried.
"""

_TRANSPOSED: Final[Mapping[str, re.Pattern[str]]] = {
    "mlx": re.compile(r"\.lora_[AB]$"),  # (in, r) and (r, out), where peft has (r, in), (out, r)
}

STORED_IN_OUT: Final = ("in", "out")
"""Dimensions of a matrix that a recorder knows to be stored the other way round than (out, in)."""


@dataclass(frozen=True, slots=True)
class Rename:
    side: str
    pattern: re.Pattern[str]
    replace: str


@dataclass(frozen=True, slots=True)
class Rules:
    """A user's rules. See docs/alignment.md for the file's form.

    Attributes:
        renames: Applied to the paths of a side, in order, before anything is matched.
        transposed: Baseline paths whose target holds the transpose.
        ignored: Paths that are left out on both sides, with the reason to report.
    """

    renames: tuple[Rename, ...] = ()
    transposed: tuple[re.Pattern[str], ...] = ()
    ignored: tuple[tuple[re.Pattern[str], str], ...] = ()

    def rename(self, side: str, path: str) -> str:
        for rule in self.renames:
            if rule.side in (side, "both"):
                path = rule.pattern.sub(rule.replace, path)
        return path

    def ignore_reason(self, path: str) -> str | None:
        return next((why for pattern, why in self.ignored if pattern.search(path)), None)

    def is_transposed(self, baseline_path: str) -> bool:
        return any(pattern.search(baseline_path) for pattern in self.transposed)


def load_rules(path: Path) -> Rules:
    """Reads a rules file.

    Raises:
        RulesError: It is missing, no TOML, or has an entry of another form.
    """
    import tomllib

    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RulesError(f"cannot read rules file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RulesError(f"rules file {path} is no TOML: {error}") from None
    unknown = set(data) - {"rename", "transposed", "ignore"}
    if unknown:
        raise RulesError(
            f"rules file {path} has {', '.join(sorted(unknown))}: expected tables named rename, "
            "transposed or ignore"
        )
    renames = []
    for entry in _entries(data, "rename", path):
        side = entry.get("side", "both")
        if side not in _SIDES:
            raise RulesError(f"rules file {path}: side {side!r} is none of {', '.join(_SIDES)}")
        renames.append(Rename(side, _pattern(entry, path), _text(entry, "replace", path)))
    return Rules(
        renames=tuple(renames),
        transposed=tuple(_pattern(entry, path) for entry in _entries(data, "transposed", path)),
        ignored=tuple(
            (_pattern(entry, path), str(entry.get("reason", "ignored by a rule")))
            for entry in _entries(data, "ignore", path)
        ),
    )


@lru_cache(1 << 14)
def canonical(stack: str, path: str) -> str:
    """The name of a path in the vocabulary that all stacks share."""
    for pattern, replacement in _ALIASES.get(stack, ()):
        path = re.sub(pattern, replacement, path)
    return path


def layout(baseline_stack: str, target_stack: str, canonical_path: str) -> str:
    """`transposed` where the stacks store a parameter of this name the other way round."""
    sides = (baseline_stack, target_stack)
    flips = sum(
        stack in _TRANSPOSED and bool(_TRANSPOSED[stack].search(canonical_path)) for stack in sides
    )
    return "transposed" if flips == 1 else "same"


def parent(path: str) -> str:
    """`a.b.c` -> `a.b`; "" for a name without dots."""
    return path.rpartition(".")[0]


def _entries(data: Mapping[str, Any], name: str, path: Path) -> list[Mapping[str, Any]]:
    entries = data.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RulesError(f"rules file {path}: {name} must be an array of tables, [[{name}]]")
    return entries


def _pattern(entry: Mapping[str, Any], path: Path) -> re.Pattern[str]:
    text = _text(entry, "pattern", path)
    try:
        return re.compile(text)
    except re.error as error:
        raise RulesError(f"rules file {path}: pattern {text!r} is invalid: {error}") from None


def _text(entry: Mapping[str, Any], key: str, path: Path) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise RulesError(f"rules file {path}: {key} must be a string, found {value!r}")
    return value
