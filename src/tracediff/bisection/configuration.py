"""Whether a side's configuration is the one that lay next to the weights it loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from tracediff.bisection.weights import Files
from tracediff.compare import settings
from tracediff.events import Event
from tracediff.trace import Trace
from tracediff.verdict import Divergence

_PREFIX: Final = "config."

_ACTS_ON: Final = tuple(
    (re.compile(keys), re.compile(places, re.IGNORECASE))
    for keys, places in (
        (r"(rms_norm|layer_norm|norm)_(eps|epsilon)", r"norm|\bln_"),
        (r"(rope_\w+\.)?(rope_theta|partial_rotary_factor|factor)", r"rope|rotary|inv_freq"),
        (r"hidden_act|hidden_activation|activation_function", r"act|gelu|silu|mlp|down_proj"),
        (r"norm_topk_prob|num_experts_per_tok", r"mlp|gate|experts"),
        (r"(use_)?sliding_window", r"attn|attention|layers\.\d+( |$)"),
        (r"tie_word_embeddings", r"lm_head"),
        (r"num_hidden_layers|n_layer", r"layers\.|\bh\."),
        (r"attention_bias|mlp_bias", r"_proj"),
    )
)
"""Names of settings in a configuration, and the places that they bear on."""


def of_run(trace: Trace) -> dict[str, Any]:
    """The resolved configuration of a run's first model, flattened, by its name in the file."""
    return {
        event.site.path.removeprefix(_PREFIX): event.value
        for event in trace.events(trace.steps[0], samples=False)
        if event.site.phase == "environment" and event.site.path.startswith(_PREFIX)
    }


def departures(
    found: Divergence, traces: tuple[Trace, Trace]
) -> tuple[dict[str, tuple[Any, Any]], ...]:
    """For each side, the settings that bear on a place and are not the ones next to its weight
    files: name -> (the run's, the file's). Empty where no such file is known."""
    place = f"{found.path} {' '.join(found.op.values())}"
    result = []
    for trace in traces:
        differing = settings.differing(of_run(trace), dict(_flat(Files(trace).config)))
        result.append({name: pair for name, pair in differing.items() if _acts_on(name, place)})
    return tuple(result)


def _acts_on(name: str, place: str) -> bool:
    return any(keys.fullmatch(name) and places.search(place) for keys, places in _ACTS_ON)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        yield f"{prefix}{key}", value
        if key == "rope_theta" and prefix:
            yield key, value  # recorders give it under its plain name as well


def is_rotary_table(event: Event) -> bool:
    return event.site.path.endswith("inv_freq") and len(event.shape) == 1


def follows_rotary_base(trace: Trace, event: Event) -> bool | None:
    """Whether inverse frequencies are `base**(-2i/d)` (Su et al., "RoFormer", 2021, section 3.2.2)
    for the run's own base; None where the configuration asks for another rule, or values are gone.
    """
    config = of_run(trace)
    base, kind = config.get("rope_theta"), config.get("rope_parameters.rope_type", "default")
    partial = config.get("partial_rotary_factor") or 1.0
    if event.payload is None or not isinstance(base, int | float) or kind != "default":
        return None
    if config.get("rope_scaling") is not None or partial != 1.0:
        return None
    table = trace.array(event).astype(np.float64)
    right = float(base) ** (-np.arange(table.size) / table.size)
    # A power in float32 errs by its exponent times the logarithm's rounding, a few units at most.
    return bool(np.all(np.abs(table - right) <= settings.SETTING_TOLERANCE * right))
