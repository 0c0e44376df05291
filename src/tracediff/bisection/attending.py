"""Finds the queries, keys, values and mask that an attention's output was computed from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.relation import Attempt, Inputs, Relation
from tracediff.compare.masks import is_mask_port
from tracediff.compare.places import evenly
from tracediff.events import Pair

Array = NDArray[Any]
Masks = tuple[Array, Array]

_RANK: Final = 2

_CHOICES: Final = 24
"""Ways to choose queries, keys and values that are tried at most."""

_PRODUCTS: Final = 1 << 23
"""Multiplications of one attention that are done at most; fewer queries are looked at then."""

_FEW: Final = 4
"""Queries that a choice is tried on before all of them."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """A pair as (batch, heads, sequence, head_dim) on both sides."""

    pair: Pair
    arrays: tuple[Array, Array]

    @property
    def count(self) -> int:
        return int(self.arrays[0].shape[1])

    @property
    def length(self) -> int:
        return int(self.arrays[0].shape[2])


_Choice = tuple[_Heads, _Heads, _Heads]


def relations(
    attempt: Attempt,
    sources: Sequence[tuple[Pair, tuple[Array, Array]]],
    recorded: tuple[Array | None, Array | None],
) -> Iterator[Relation]:
    """Attentions whose joined heads are the value: of the likeliest mask and scale first.

    Args:
        sources: What it may be computed from, latest first.
        recorded: The mask that each side was given, where it is known.
    """
    shape = attempt.values[0].shape
    sources = [source for source in sources if not is_mask_port(source[0].baseline.site.port)]
    size = _head_size(attempt, sources) if len(shape) == 3 else 0
    if not size or shape[-1] % size:
        return
    for choice in islice(_choices(attempt, sources, shape[-1] // size, size), _CHOICES):
        masks = list(_masks(attempt, recorded, choice[1].arrays[0].shape[2]))
        for step, scale in enumerate(_scales(attempt, size)):
            for further, mask in enumerate(masks):
                found = _tried(attempt, choice, scale, mask, _RANK + step + further)
                if found is not None:
                    yield found


# ---- trying --------------------------------------------------------------------------------------


def _tried(
    attempt: Attempt, choice: _Choice, scale: float, masks: Masks, rank: int
) -> Relation | None:
    """The relation on a few queries, and where it holds there on as many as can be afforded."""
    batch, length, width = attempt.values[0].shape
    counts: NDArray[np.bool_] = np.ones((batch, length), bool)
    if attempt.counts is not None:
        counts = np.asarray(np.broadcast_to(attempt.counts, attempt.values[0].shape)[..., 0])
    places = np.flatnonzero(counts.any(axis=0))
    affordable = max(_FEW, _PRODUCTS // (batch * width * choice[1].arrays[0].shape[2]))
    found = None
    for limit in (_FEW, affordable):
        rows = places[evenly(places.size, limit)]
        inputs = _inputs(choice, masks, rows, 0), _inputs(choice, masks, rows, 1)
        found = _on_rows(attempt, choice, scale, inputs, rank, rows, counts)
        if found is None:
            break
    return found


def _on_rows(
    attempt: Attempt,
    choice: _Choice,
    scale: float,
    inputs: Inputs,
    rank: int,
    rows: NDArray[np.intp],
    counts: NDArray[np.bool_],
) -> Relation | None:
    part = Attempt(
        attempt.pair,
        (attempt.values[0][:, rows], attempt.values[1][:, rows]),
        counts[:, rows, None],
        attempt.settings,
    )
    sources = {port: heads.pair for port, heads in zip(_PORTS, choice, strict=True)}
    return part.holds("attention", {"scale": scale}, sources, inputs, rank)


_PORTS: Final = ("in", "key", "value")


def _inputs(
    choice: _Choice, masks: Masks, rows: NDArray[np.intp], which: int
) -> Mapping[str, Array]:
    query, key, value = (heads.arrays[which] for heads in choice)
    return {"in": query[:, :, rows], "key": key, "value": value, "mask": masks[which][:, :, rows]}


# ---- queries, keys and values --------------------------------------------------------------------


def _head_size(attempt: Attempt, sources: Sequence[tuple[Pair, tuple[Array, Array]]]) -> int:
    """Width of a head: of values that are split into heads already, or by the configuration."""
    split = [arrays[0].shape[-1] for _, arrays in sources if arrays[0].ndim == 4]
    if split:
        return int(split[0])
    heads, _ = _head_counts(attempt)
    width = attempt.values[0].shape[-1]
    return int(_setting(attempt, "head_dim") or (width // heads if heads else 0))


def _head_counts(attempt: Attempt) -> tuple[int, int]:
    heads = _setting(attempt, "num_attention_heads") or _setting(attempt, "n_head") or 0
    return int(heads), int(_setting(attempt, "num_key_value_heads") or heads)


def _setting(attempt: Attempt, name: str) -> Any:
    """Of the configuration, from whichever side has it."""
    found = (settings.get(f"config.{name}") for settings in attempt.settings)
    return next((value for value in found if value is not None), None)


def _choices(
    attempt: Attempt,
    sources: Sequence[tuple[Pair, tuple[Array, Array]]],
    heads: int,
    size: int,
) -> Iterator[_Choice]:
    """Queries, keys and values: one matrix of all three, or three whose queries came first."""
    batch, length, _ = attempt.values[0].shape
    split = []
    for pair, arrays in sources:
        a, b = (_split(array, length, size) for array in arrays)
        if a is not None and b is not None and a.shape == b.shape and len(a) == batch:
            split.append(_Heads(pair, (a, b)))
    key_heads = _head_counts(attempt)[1] or heads
    for joined in split:
        if joined.count == heads + 2 * key_heads and joined.length == length:
            yield _taken_apart(joined, heads, key_heads)
    for key in split:
        for query in split:
            if query.count != heads or query.length != length or heads % key.count:
                continue
            if not _before(query, key):
                continue
            for value in split:
                alike = value.count == key.count and value.length == key.length
                if alike and value is not key and value is not query:
                    yield query, key, value


def _before(first: _Heads, second: _Heads) -> bool:
    return first.pair.baseline.order < second.pair.baseline.order


def _split(array: Array, length: int, size: int) -> Array | None:
    """As (batch, heads, sequence, head_dim), or None where it cannot be."""
    if array.ndim == 3 and array.shape[-1] % size == 0:
        batch, keys, width = array.shape
        return array.reshape(batch, keys, width // size, size).swapaxes(1, 2)
    if array.ndim != 4 or array.shape[-1] != size:
        return None
    return array if array.shape[2] == length else array.swapaxes(1, 2)


def _taken_apart(joined: _Heads, heads: int, key_heads: int) -> _Choice:
    cuts = (0, heads, heads + key_heads, heads + 2 * key_heads)
    query, key, value = (
        _Heads(joined.pair, (joined.arrays[0][:, start:stop], joined.arrays[1][:, start:stop]))
        for start, stop in pairwise(cuts)
    )
    return query, key, value


# ---- scale and mask ------------------------------------------------------------------------------


def _scales(attempt: Attempt, size: int) -> list[float]:
    """`1 / sqrt(head_dim)`, and what configurations put in its place."""
    found = [size**-0.5]
    for name, power in (("query_pre_attn_scalar", -0.5), ("attention_multiplier", 1.0)):
        value = _setting(attempt, name)
        if isinstance(value, int | float) and value > 0:
            found.append(float(value) ** power)
    if _setting(attempt, "scale_attn_weights") is False:
        found.append(1.0)
    return found


def _masks(
    attempt: Attempt, recorded: tuple[Array | None, Array | None], keys: int
) -> Iterator[Masks]:
    """What each query may see: by the mask that a side was given, else by the other side's, else
    what came before it, else everything."""
    queries = attempt.values[0].shape[1]
    a, b = (
        mask if mask is not None and mask.shape[-2:] == (queries, keys) else None
        for mask in recorded
    )
    given = a if a is not None else b
    if given is not None:
        yield a if a is not None else given, b if b is not None else given
        return
    distance = np.arange(queries)[:, None] + keys - queries - np.arange(keys)
    causal = (distance >= 0)[None, None]
    yield causal, causal
    window = _setting(attempt, "sliding_window")
    if isinstance(window, int) and 0 < window < keys:
        windowed = causal & (distance < window)
        yield windowed, windowed
    everything = np.ones_like(causal)
    yield everything, everything
