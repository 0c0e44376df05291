"""A byte-level BPE tokenizer small enough to work out its IDs by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tracediff.rendering.files import byte_of_character
from tracediff.rendering.routes import RouteError
from tracediff.replayers.rendering_js import packages

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BOS, EOS, PAD, FIRST = 0, 1, 2, 3
ORDER = sorted(byte_of_character(), key=lambda character: byte_of_character()[character])
"""The byte-level alphabet in the order of its bytes: byte b has the ID b + FIRST."""
MERGES = [["a", "b"], ["Ġ", "a"], ["ab", "c"]]
MERGED = {"ab": 259, "Ġa": 260, "abc": 261}


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    """A byte-level BPE of 256 bytes, three merges and three special tokens, written by hand."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    vocab = {"<s>": BOS, "</s>": EOS, "<pad>": PAD}
    added = [{"id": i, "content": c, "special": True, **special} for c, i in vocab.items()]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab | {c: FIRST + byte for byte, c in enumerate(ORDER)} | MERGED,
            "merges": MERGES,
        },
        **changes,
    }


BOS_FIRST = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
}


SPLIT_AT_B = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"String": "b"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
PREFIX_SPACE = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}


def need_js() -> None:
    """Skips a test where Node or its packages cannot be had."""
    try:
        packages()
    except RouteError as error:
        pytest.skip(str(error))
