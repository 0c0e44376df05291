"""Byte-level BPE in plain Python from `tokenizer.json`, without code of the tokenizers library.

It is written to be read, not to be fast. What it does not implement it refuses when it is opened.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import regex

from tracediff.rendering.files import byte_of_character

GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern that a ByteLevel pre-tokenizer splits by."""

_FORMS: Final = ("NFC", "NFD", "NFKC", "NFKD")
_CHARACTER_OF_BYTE: Final = {byte: char for char, byte in byte_of_character().items()}

Pieces = Callable[[list[str]], list[str]]


class UnsupportedError(Exception):
    """The tokenizer has a part that is not implemented here; the message names it."""


class ByteLevelBPE:
    """Encodes text as a byte-level BPE `tokenizer.json` says.

    Args:
        tokenizer: The parsed file.

    Raises:
        UnsupportedError: A part of it is not implemented.
    """

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        model = tokenizer["model"]
        _check_model(model)
        self._vocab: Mapping[str, int] = model["vocab"]
        self._ranks = dict(_ranks(model["merges"]))
        self._whole_words = bool(model.get("ignore_merges"))
        self._unknown = model.get("unk_token")
        self._normalise = _normaliser(tokenizer.get("normalizer"))
        self._split = _pre_tokenizer(tokenizer.get("pre_tokenizer"))
        self._template = _template(tokenizer.get("post_processor"))
        added = tokenizer.get("added_tokens") or ()
        self._early = _added(added, normalized=False, normalise=str)
        self._late = _added(added, normalized=True, normalise=self._normalise)
        self._word = lru_cache(maxsize=1 << 16)(self._merge)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """IDs of a text, with those of the post-processor's template if asked for.

        Raises:
            UnicodeEncodeError: The text holds lone surrogates, which UTF-8 cannot write.
            UnsupportedError: A byte is not in the vocabulary.
        """
        ids: list[int] = []
        for piece in self._early(text):
            if isinstance(piece, int):
                ids.append(piece)
                continue
            for part in self._late(self._normalise(piece)):
                ids += [part] if isinstance(part, int) else self._plain(part)
        return self._around(ids) if add_special_tokens else ids

    def _plain(self, text: str) -> list[int]:
        """IDs of normalised text that holds no added token."""
        words = self._split([text]) if text else []
        return [identifier for word in words for identifier in self._word(word)]

    def _merge(self, word: str) -> tuple[int, ...]:
        """IDs of one pre-token, by the merge of lowest rank first, leftmost first."""
        parts = [_CHARACTER_OF_BYTE[byte] for byte in word.encode("utf-8")]
        whole = "".join(parts)
        if self._whole_words and whole in self._vocab:
            return (self._vocab[whole],)
        parts = [part for part in parts if self._known(part)]
        while len(parts) > 1:
            ranked = (
                (rank, place)
                for place in range(len(parts) - 1)
                if (rank := self._ranks.get((parts[place], parts[place + 1]))) is not None
            )
            best = min(ranked, default=None)
            if best is None:
                break
            place = best[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        return tuple(self._vocab[part] for part in parts)

    def _known(self, part: str) -> bool:
        """Whether a byte has a token; without one, the format says that it is left out."""
        if part not in self._vocab and self._unknown is not None:
            raise UnsupportedError("a byte without a token of its own, where unk_token is set")
        return part in self._vocab

    def _around(self, ids: list[int]) -> list[int]:
        out: list[int] = []
        for item in self._template:
            out += ids if item is None else item
        return out


def _check_model(model: Mapping[str, Any]) -> None:
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedError(f"a model of type {model['type']}, only BPE is read")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise UnsupportedError(f"the BPE option {option}={model[option]!r}")


def _ranks(merges: Sequence[Any]) -> Iterator[tuple[tuple[str, str], int]]:
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield (left, right), rank


def _normaliser(spec: Mapping[str, Any] | None) -> Callable[[str], str]:
    if spec is None:
        return str
    if spec["type"] == "Sequence":
        steps = [_normaliser(item) for item in spec["normalizers"]]
        return lambda text: _through(steps, text)
    if spec["type"] not in _FORMS:
        raise UnsupportedError(f"the normalizer {spec['type']}, only {', '.join(_FORMS)} are")
    form = spec["type"]
    return lambda text: unicodedata.normalize(form, text)


def _pre_tokenizer(spec: Mapping[str, Any] | None) -> Pieces:
    if spec is None:
        return list
    kind = spec["type"]
    if kind == "Sequence":
        steps = [_pre_tokenizer(item) for item in spec["pretokenizers"]]
        return lambda pieces: _through(steps, pieces)
    if kind == "ByteLevel":
        split = _isolated(GPT2) if spec.get("use_regex", True) else list
        if not spec.get("add_prefix_space"):
            return split
        return lambda pieces: split([p if p.startswith(" ") else f" {p}" for p in pieces])
    if kind == "Digits":
        return _isolated(r"\p{N}" if spec.get("individual_digits") else r"\p{N}+")
    if kind == "Split" and spec.get("behavior") == "Isolated" and not spec.get("invert"):
        pattern = spec["pattern"]
        return _isolated(pattern.get("Regex") or regex.escape(pattern["String"]))
    options = {name: value for name, value in spec.items() if name in ("behavior", "invert")}
    raise UnsupportedError(f"the pre-tokenizer {kind} {options or ''}".rstrip())


def _isolated(pattern: str) -> Pieces:
    """Splits so that matches, and what is between them, are pieces."""
    # Python's \s has the separators U+001C to U+001F besides; the engine that patterns are
    # written for takes White_Space alone.
    compiled = regex.compile(
        pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")
    )

    def split(pieces: list[str]) -> list[str]:
        return [part for piece in pieces for part in _parts(compiled, piece)]

    return split


def _parts(compiled: Any, text: str) -> Iterator[str]:
    start = 0
    for match in compiled.finditer(text):
        if match.start() > start:
            yield text[start : match.start()]
        if match.group():
            yield match.group()
        start = match.end()
    if start < len(text):
        yield text[start:]


def _added(
    tokens: Sequence[Mapping[str, Any]], *, normalized: bool, normalise: Callable[[str], str]
) -> Callable[[str], Iterator[str | int]]:
    """Finds added tokens in a text: the leftmost first, and of those the longest."""
    ids: dict[str, int] = {}
    for token in tokens:
        if token.get("normalized", False) is not normalized:
            continue
        for option in ("lstrip", "rstrip", "single_word"):
            if token.get(option):
                raise UnsupportedError(f"the option {option} of the added token {token['content']}")
        ids[normalise(token["content"])] = token["id"]
    if not ids:
        return lambda text: iter([text])
    longest_first = sorted(ids, key=len, reverse=True)
    compiled = regex.compile("|".join(map(regex.escape, longest_first)))

    def find(text: str) -> Iterator[str | int]:
        for part in _parts(compiled, text):
            yield ids.get(part, part)

    return find


def _template(spec: Mapping[str, Any] | None) -> list[list[int] | None]:
    """What stands around a single text: lists of IDs, and None for the text itself."""
    if spec is None or spec["type"] == "ByteLevel":  # ByteLevel moves offsets only
        return [None]
    if spec["type"] == "Sequence":
        items = [_template(item) for item in spec["processors"]]
        return next((item for item in items if item != [None]), [None])
    if spec["type"] != "TemplateProcessing":
        raise UnsupportedError(f"the post-processor {spec['type']}")
    ids = {name: item["ids"] for name, item in spec["special_tokens"].items()}
    return [
        None if "Sequence" in item else ids[item["SpecialToken"]["id"]] for item in spec["single"]
    ]


def _through(steps: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    for step in steps:
        value = step(value)
    return value
