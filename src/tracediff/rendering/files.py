"""What a folder of tokenizer files says: template, special tokens, vocabulary. Reads JSON only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from tracediff.errors import UsageError

_SPECIAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token strings by ID, and which IDs have a role of their own.

    Attributes:
        tokens: Token of each ID, as the vocabulary spells it (byte-level or with `▁`).
        control: IDs of added tokens: text that spells one becomes that one ID.
        bos, eos, pad: Their IDs, None where the tokenizer has none.
    """

    tokens: Mapping[int, str]
    control: frozenset[int] = frozenset()
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None

    def token(self, identifier: int) -> str:
        """The token of an ID; the ID itself in brackets where there is none."""
        return self.tokens.get(identifier, f"[{identifier}]")

    def spelling(self, identifier: int | None) -> str | None:
        """The token of an ID that may be None."""
        return None if identifier is None else self.token(identifier)

    def text(self, identifiers: Iterable[int]) -> str:
        """The text that tokens stand for; bytes that are no UTF-8 become U+FFFD."""
        parts = []
        pending = bytearray()
        for identifier in identifiers:
            token = self.token(identifier)
            table = byte_of_character()
            if identifier not in self.control and all(character in table for character in token):
                pending.extend(table[character] for character in token)
                continue
            parts += [pending.decode("utf-8", "replace"), token.replace("▁", " ")]
            pending.clear()
        return "".join([*parts, pending.decode("utf-8", "replace")])


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of one folder, as far as they are there.

    Attributes:
        template: Source of the chat template, or None.
        special: Strings of the special tokens by name (`bos_token`, ...): template variables.
        tokenizer: The parsed `tokenizer.json`, or None.
    """

    path: Path
    template: str | None
    special: Mapping[str, str]
    tokenizer: Mapping[str, Any] | None

    @property
    def template_digest(self) -> str:
        """First 12 digits of the SHA-256 of the template."""
        return _digest((self.template or "").encode())

    @property
    def tokenizer_digest(self) -> str:
        """First 12 digits of the SHA-256 of `tokenizer.json`."""
        return _digest((self.path / "tokenizer.json").read_bytes())

    def vocabulary(self) -> Vocabulary | None:
        """Tokens and special IDs, or None without a `tokenizer.json`."""
        if self.tokenizer is None:
            return None
        vocab = self.tokenizer["model"].get("vocab", {})
        pairs = vocab.items() if isinstance(vocab, Mapping) else ()  # Unigram lists its scores
        added = {item["content"]: item["id"] for item in self.tokenizer.get("added_tokens", ())}
        ids = dict(pairs) | added
        roles = {name[:3]: ids.get(self.special.get(name, "")) for name in _SPECIAL[:3]}
        return Vocabulary(
            {identifier: token for token, identifier in ids.items()},
            frozenset(added.values()),
            **roles,
        )


def read_files(path: Path) -> TokenizerFiles:
    """Reads a folder with `tokenizer.json`, or a file with the source of a chat template.

    Raises:
        UsageError: There is neither, or a file is no JSON.
    """
    if path.is_file():
        return TokenizerFiles(path, path.read_text(encoding="utf-8"), {}, None)
    if not path.is_dir():
        raise UsageError(f"{path} is missing: give a folder with tokenizer.json or a template")
    config = _json(path / "tokenizer_config.json") or {}
    tokenizer = _json(path / "tokenizer.json")
    template = _template(path, config)
    if tokenizer is None and template is None:
        raise UsageError(f"{path} holds neither tokenizer.json nor a chat template: give one")
    special = {name: _content(config[name]) for name in _SPECIAL if config.get(name)}
    return TokenizerFiles(path, template, special, tokenizer)


@cache
def byte_of_character() -> Mapping[str, int]:
    """The table of byte-level BPE: which byte each character of its alphabet stands for.

    Bytes that print as themselves in Latin-1 keep their character; the other 68 follow from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(hidden)
    }


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name: the one called default is used for chats
        named = {item["name"]: item["template"] for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is no JSON ({error}): fetch the file again") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
