"""What the IDs of a tokenizer depend on, and how a row of IDs came about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tracediff.recorders.rendering_chain import PLAIN
from tracediff.trace.summary import digest, digest_value

_SETTINGS: Final = (
    "padding_side",
    "truncation_side",
    "model_max_length",
    "add_bos_token",
    "add_eos_token",
    "clean_up_tokenization_spaces",
    "split_special_tokens",
    "vocab_size",
)
_PARTS: Final = ("normalizer", "pre_tokenizer", "post_processor")


def tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """What the text and the IDs of a tokenizer depend on, apart from its vocabulary.

    `control` maps the IDs of added tokens to their spelling; `normalizer`, `pre_tokenizer` and
    `post_processor` are what `tokenizer.json` says of them.
    """
    settings: dict[str, Any] = {"class": type(tokenizer).__name__}
    template = getattr(tokenizer, "chat_template", None)
    settings["chat_template"] = digest_value(template).hex() if template else None
    special = tokenizer.special_tokens_map
    for name in ("bos", "eos", "pad", "unk"):
        token = special.get(f"{name}_token")
        known = isinstance(token, str)
        settings[f"{name}_token_id"] = tokenizer.convert_tokens_to_ids(token) if known else None
    for name in _SETTINGS:
        value = getattr(tokenizer, name, None)
        if isinstance(value, PLAIN):
            settings[name] = value
    added = getattr(tokenizer, "added_tokens_decoder", {})
    settings["control"] = {str(identifier): str(token) for identifier, token in added.items()}
    backend = getattr(tokenizer, "_tokenizer", None)
    for name in _PARTS:
        part = getattr(backend, name, None)
        if hasattr(part, "__getstate__") and isinstance(state := part.__getstate__(), bytes):
            settings[name] = json.loads(state)
    return settings


def encoding_facts(encoded: Any, rows: int, known: set[int]) -> list[dict[str, Any]]:
    """How each row of a fast tokenizer's call came about; {} where the tokenizer does not say.

    Args:
        known: IDs whose tokens have been told; grows.

    Each row's facts, as far as they apply:
        tokens: ID -> token as the vocabulary spells it, of the IDs that are new.
        lengths: Characters of the text that each token stands for.
        jumps: Token -> how many characters lie between it and the token before (often a space that
            belongs to no token), where that is not 0. Tokens that share a character jump back.
        pretokens: Digest of where the pre-tokenizer cut the text.
        special: Positions of tokens that the post-processor put in.
        padded: How many tokens of padding are before and after.
        truncated: How many tokens of the text were cut off (with a stride, those said twice count).
    """
    encodings = getattr(encoded, "encodings", None) or ()
    if len(encodings) != rows:
        return [{}] * rows
    return [_facts(encoding) | _tokens(encoding, known) for encoding in encodings]


def _facts(encoding: Any) -> dict[str, Any]:
    mask = encoding.attention_mask
    padded = [_leading(mask), _leading(mask[::-1])] if 0 in mask else [0, 0]
    content = slice(padded[0], len(mask) - padded[1])
    special = [i for i, inserted in enumerate(encoding.special_tokens_mask) if inserted and mask[i]]
    spans = encoding.offsets[content]
    lengths, jumps, end = [], {}, 0
    for index, (start, stop) in enumerate(spans):
        lengths.append(stop - start)
        if stop == 0:
            continue  # stands for no character
        if start != end:
            jumps[str(index)] = start - end
        end = stop
    facts: dict[str, Any] = {"lengths": lengths, "pretokens": _pretokens(encoding, spans, content)}
    if jumps:
        facts["jumps"] = jumps
    if special:
        facts["special"] = special
    if any(padded):
        facts["padded"] = padded
    if encoding.overflowing:
        rests = encoding.overflowing  # each with special tokens (and padding) of its own
        facts["truncated"] = sum(len(rest) - sum(rest.special_tokens_mask) for rest in rests)
    return facts


def _tokens(encoding: Any, known: set[int]) -> dict[str, Any]:
    new = {i: place for place, i in enumerate(encoding.ids) if i not in known}
    if not new:
        return {}
    known.update(new)
    tokens = encoding.tokens
    return {"tokens": {str(identifier): tokens[place] for identifier, place in new.items()}}


def _pretokens(encoding: Any, spans: Sequence[tuple[int, int]], content: slice) -> str:
    """Digest of where each word of the pre-tokenizer begins."""
    words = encoding.word_ids[content]
    starts = [
        start
        for (start, _), word, before in zip(spans, words, [None, *words], strict=False)
        if word is not None and word != before
    ]
    return digest(np.array(starts, np.int64)).hex()[:12]


def _leading(mask: Sequence[int]) -> int:
    return next((i for i, value in enumerate(mask) if value), len(mask))
