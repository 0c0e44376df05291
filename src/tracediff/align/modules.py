"""Pairs modules by the order of their calls where their names do not match.

Works top-down: children of matched parents are aligned as sequences. A child stands for its family
(norm, linear, attention ...) and the shape of its output, so a module that only one stack has is
skipped rather than paired with its neighbour.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

from tracediff.align.names import parent
from tracediff.events import ROOT, Event

_FAMILIES: Final = (
    ("norm", r"norm"),
    ("linear", r"linear|conv1d|dense|lm_?head"),
    ("embedding", r"embedding"),
    ("dropout", r"dropout|identity"),
    ("rope", r"rope|rotary"),
    ("attention", r"attention|attn"),
    ("mlp", r"mlp|feedforward|ffn|moe"),
    ("activation", r"silu|gelu|relu|activation|sigmoid|tanh|softmax"),
    ("block", r"block|layer$"),
    ("model", r"model|decoder|encoder|causallm"),
)


@dataclass(frozen=True, slots=True)
class _Module:
    path: str
    family: str
    shape: tuple[int, ...]


def map_by_order(
    baseline: Sequence[Event], target: Sequence[Event], known: Mapping[str, str]
) -> dict[str, str]:
    """Finds modules that are the same in both runs but for their names.

    Args:
        baseline, target: Events of one step, in order.
        known: Target paths that are matched already, to their baseline paths.

    Returns:
        Further target paths, each to its baseline path.
    """
    children_a, children_b = _children(baseline), _children(target)
    mapping = dict(known)
    found: dict[str, str] = {}
    queue = [("", "")] + [(a, b) for b, a in known.items()]
    while queue:
        parent_a, parent_b = queue.pop()
        taken = set(mapping.values())
        rest_a = [m for m in children_a.get(parent_a, ()) if m.path not in taken]
        rest_b = [m for m in children_b.get(parent_b, ()) if m.path not in mapping]
        for module_a, module_b in _align(rest_a, rest_b):
            mapping[module_b.path] = found[module_b.path] = module_a.path
            queue.append((module_a.path, module_b.path))
    return found


def _align(a: Sequence[_Module], b: Sequence[_Module]) -> list[tuple[_Module, _Module]]:
    tokens_a, tokens_b = ([(m.family, m.shape) for m in side] for side in (a, b))
    matcher = SequenceMatcher(None, tokens_a, tokens_b, autojunk=False)
    return [
        (a[block.a + i], b[block.b + i])
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    ]


def _children(events: Sequence[Event]) -> dict[str, list[_Module]]:
    """Module path -> its children in the order of their first call; "" holds the outermost."""
    modules: dict[str, _Module] = {}
    for event in events:
        site = event.site
        if site.phase == "forward" and site.port == "out" and site.path not in modules:
            modules[site.path] = _Module(site.path, _family(event.op), event.shape)
    children: dict[str, list[_Module]] = defaultdict(list)
    for path, module in modules.items():
        owner = parent(path)
        while owner and owner not in modules:
            owner = parent(owner)
        if path != ROOT:
            children[owner or (ROOT if ROOT in modules else "")].append(module)
    return children


def _family(op: str) -> str:
    lowered = op.lower()
    return next((name for name, pattern in _FAMILIES if re.search(pattern, lowered)), lowered)
