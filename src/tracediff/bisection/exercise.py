"""Checks that these runs cannot make: inputs on which a well-known fault would leave no trace.

A clean verdict says nothing about a fault that the input hides, so each is told by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tracediff.align import canonical
from tracediff.events import Event
from tracediff.trace import Trace
from tracediff.trace.summary import FINGERPRINT_FIELDS

_COUNT = FINGERPRINT_FIELDS.index("count")
_ZERO = FINGERPRINT_FIELDS.index("zero")
_IGNORED = -100


def not_exercised(trace: Trace, events: Sequence[Event]) -> tuple[str, ...]:
    """What the first step of a run cannot show, one sentence each."""
    settings = {e.site.path: e.value for e in events if e.site.phase == "environment"}
    return (
        *_adapters(events, settings, trace.run.stack),
        *_attention(events, settings),
        *_batches(trace, events),
    )


def _adapters(events: Sequence[Event], settings: dict[str, Any], stack: str) -> Iterator[str]:
    second = [
        event
        for event in events
        if event.site.phase == "loading"
        and event.fingerprint
        and canonical(stack, event.site.path).endswith(".lora_B")
    ]
    if second and all(e.fingerprint[_ZERO] == e.fingerprint[_COUNT] for e in second):
        yield "adapter scale in the first forward pass: every lora_B is zero"
    owners = {event.site.path.rpartition(".lora_")[0] for event in second}
    if owners and {settings.get(f"{owner}.scale") for owner in owners} == {1.0}:
        yield "adapter scale: alpha equals the rank, so a missing division does not show"


def _attention(events: Sequence[Event], settings: dict[str, Any]) -> Iterator[str]:
    heads = settings.get("config.num_attention_heads")
    shared = settings.get("config.num_key_value_heads")
    if heads and shared and (shared == 1 or shared == heads):
        yield "order of key-value heads: " + (
            "there is one" if shared == 1 else "each query head has its own"
        )
    window = settings.get("config.sliding_window")
    longest = max(
        (e.shape[1] for e in events if e.site.path.startswith("batch.") and len(e.shape) == 2),
        default=0,
    )
    if isinstance(window, int) and longest and longest <= window:
        yield f"sliding window of {window}: the longest sequence has {longest} tokens"


def _batches(trace: Trace, events: Sequence[Event]) -> Iterator[str]:
    labels = [e for e in events if e.site.path == "batch.labels" and e.payload]
    counts = [int(np.count_nonzero(trace.array(event) != _IGNORED)) for event in labels]
    if len(counts) > 1 and len(set(counts)) == 1:
        yield "loss normalisation over micro-batches: all have the same number of trained tokens"
