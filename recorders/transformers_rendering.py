"""What a transformers tokenizer is given and returns: messages, template text, token IDs.

Shared by every stack whose tokenizers are transformers' own (mlx-lm wraps one).
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from itertools import islice
from typing import Any, Final

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tracediff.recording import Patches, Tape
from tracediff.trace.summary import digest_value

_ENCODERS: Final = ("__call__", "encode", "batch_encode_plus", "encode_plus")
_CANDIDATES: Final = 8
_SAME_SAMPLE: Final = 0.9
_PLAIN: Final = (bool, int, float, str, type(None))
_TEMPLATE_SETTINGS: Final = ("add_generation_prompt", "continue_final_message")
_ENCODE_SETTINGS: Final = ("add_special_tokens", "padding", "truncation", "max_length")
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


class RenderingHooks:
    """Wraps the tokenizer methods of transformers, in the base class and where it is overridden.

    A sample is a chain of steps: `messages`, `template` (the text that the template made), `text`
    (what was given to the tokenizer) and `ids`. Samples are counted over the calls of the run. A
    template call and the tokenizer call on its text are one sample, also where the script changed
    the text in between; so are both halves of `apply_chat_template(tokenize=True)`. Only the
    outermost call is recorded.
    """

    def __init__(self, tape: Tape, patches: Patches) -> None:
        self._tape = tape
        self._patches = patches
        self._process = os.getpid()
        self._inside = False
        self._samples = 0
        self._rendered: dict[str, deque[int]] = defaultdict(deque)
        self._tokenizers: list[weakref.ref[PreTrainedTokenizerBase]] = []

    def install(self) -> None:
        for cls in _with_subclasses(PreTrainedTokenizerBase):
            own = vars(cls)
            if "apply_chat_template" in own:
                self._patches.replace(cls, "apply_chat_template", self._wrap_template)
            for name in _ENCODERS:
                if name in own:
                    self._patches.replace(cls, name, self._wrap_encoder)

    @contextmanager
    def _outermost(self) -> Iterator[bool]:
        """Whether a call is not made by another one, nor in a forked worker process."""
        if self._inside or os.getpid() != self._process:
            yield False
            return
        self._inside = True
        try:
            yield True
        finally:
            self._inside = False

    # ---- templates -------------------------------------------------------------------------

    def _wrap_template(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def apply(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
            with self._outermost() as records:
                result = original(tokenizer, *args, **kwargs)
                if records:
                    given = _bound(signature, tokenizer, args, kwargs)
                    self._record_template(tokenizer, original, given, result)
            return result

        return apply

    def _record_template(
        self,
        tokenizer: Any,
        original: Callable[..., Any],
        given: Mapping[str, Any],
        result: Any,
    ) -> None:
        self._describe(tokenizer)
        text = result
        if given.get("tokenize", True):
            # Rendering is a pure function of the messages: once more, without the tokenizer.
            text = original(tokenizer, **_as_text(given))
        conversations, texts = _samples(given.get("conversation"), text)
        first = self._samples
        for messages, rendered in zip(conversations, texts, strict=False):
            self._record_messages(messages, rendered, given)
        if given.get("tokenize", True):
            rows = _rows(result, len(texts))
            for index, (rendered, ids) in enumerate(zip(texts, rows, strict=False), first):
                self._emit_text(index, "text", rendered, {})
                self._emit_ids(index, ids, {})
        else:
            for index, rendered in enumerate(texts, first):
                self._rendered[rendered].append(index)

    def _record_messages(self, messages: Any, text: str, given: Mapping[str, Any]) -> None:
        index, self._samples = self._samples, self._samples + 1
        canonical = json.dumps(_plain(messages), ensure_ascii=False)
        self._tape.emit("rendering", f"sample[{index}].messages", "out", canonical, kind="text")
        attributes = {name: given[name] for name in _TEMPLATE_SETTINGS if name in given}
        attributes |= {k: v for k, v in given.get("kwargs", {}).items() if isinstance(v, _PLAIN)}
        self._emit_text(index, "template", text, attributes)

    # ---- tokenizing ------------------------------------------------------------------------

    def _wrap_encoder(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def encode(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
            with self._outermost() as records:
                result = original(tokenizer, *args, **kwargs)
                if records:
                    given = _bound(signature, tokenizer, args, kwargs)
                    self._record_encoding(tokenizer, given, result)
            return result

        return encode

    def _record_encoding(self, tokenizer: Any, given: Mapping[str, Any], result: Any) -> None:
        texts = _texts(given)
        if not texts:
            return  # already token IDs
        self._describe(tokenizer)
        attributes = {
            name: value
            for name in _ENCODE_SETTINGS
            if isinstance(value := given.get(name), _PLAIN) and value is not None
        }
        rows = _rows(result, len(texts))
        if len(rows) == 1:
            texts = ["\n".join(texts)]  # `encode` takes a list for the words of one text
        elif (
            hasattr(result, "get") and (of := result.get("overflow_to_sample_mapping")) is not None
        ):
            texts = [texts[int(index)] for index in of]
        for text, ids in zip(texts, rows, strict=False):
            self._emit_ids(self._sample_of(text), ids, attributes)

    def _sample_of(self, text: str) -> int:
        """The sample that a template made of this text, or else a new one."""
        made = text if text in self._rendered else self._changed_into(text)
        if made is None:
            index, self._samples = self._samples, self._samples + 1
        else:
            waiting = self._rendered[made]
            index = waiting.popleft()
            if not waiting:
                del self._rendered[made]
        self._emit_text(index, "text", text, {})
        return index

    def _changed_into(self, text: str) -> str | None:
        """The template's text that the script seems to have changed into this one.

        Only the texts that wait longest and shortest are looked at: scripts tokenize a text right
        after making it, or all of them in the order in which they were made.
        """
        waiting = list(islice(self._rendered, _CANDIDATES))
        waiting += islice(reversed(self._rendered), _CANDIDATES)
        best = max(waiting, key=lambda made: _likeness(made, text), default=None)
        return best if best is not None and _likeness(best, text) >= _SAME_SAMPLE else None

    # ---- events ----------------------------------------------------------------------------

    def _emit_text(self, index: int, step: str, text: str, attributes: Mapping[str, Any]) -> None:
        path = f"sample[{index}].{step}"
        self._tape.emit("rendering", path, "out", text, kind="text", attributes=attributes)

    def _emit_ids(self, index: int, ids: Any, attributes: Mapping[str, Any]) -> None:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        self._tape.emit(
            "rendering",
            f"sample[{index}].ids",
            "out",
            array,
            kind="ids",
            dims=("sequence",),
            attributes=attributes,
        )

    def _describe(self, tokenizer: Any) -> None:
        """Records the settings of a tokenizer when it is first used."""
        if any(known() is tokenizer for known in self._tokenizers):
            return
        count = len(self._tokenizers)
        self._tokenizers.append(weakref.ref(tokenizer))
        name = f"tokenizer[{count}]" if count else "tokenizer"
        settings = tokenizer_settings(tokenizer)
        self._tape.emit_settings({f"{name}.{key}": value for key, value in settings.items()})


def tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """What the text and the IDs of a tokenizer depend on, apart from its vocabulary."""
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
        if isinstance(value, _PLAIN):
            settings[name] = value
    return settings


# ---- shapes of arguments and results ------------------------------------------------------------


def _likeness(made: str, text: str) -> float:
    """Share of the characters that two texts have in common, wherever they stand."""
    return SequenceMatcher(None, made, text, autojunk=False).quick_ratio()


def _with_subclasses(cls: Any) -> list[Any]:
    found = [cls]
    for subclass in cls.__subclasses__():
        found += [new for new in _with_subclasses(subclass) if new not in found]
    return found


def _bound(
    signature: inspect.Signature, tokenizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a call by name, defaults included; extra keywords under `kwargs`."""
    bound = signature.bind(tokenizer, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    arguments.pop(next(iter(signature.parameters)))
    return arguments


def _as_text(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a template call that returns the text instead of its tokens."""
    arguments = {name: value for name, value in given.items() if name != "kwargs"}
    arguments |= given.get("kwargs", {})
    arguments |= {"tokenize": False, "return_dict": False}
    if arguments.get("return_assistant_tokens_mask"):
        arguments["return_assistant_tokens_mask"] = False
    return arguments


def _samples(conversation: Any, text: Any) -> tuple[list[Any], list[str]]:
    """Conversations and texts as lists, whether the call was given one of them or several."""
    if isinstance(text, str):
        return [conversation], [text]
    return list(conversation), list(text)


def _texts(given: Mapping[str, Any]) -> list[str]:
    """The texts of a tokenizer call; a pair or a list of words is joined by a line break."""
    value = given.get("text", given.get("batch_text_or_text_pairs"))
    pair = given.get("text_pair")
    words = given.get("is_split_into_words", False)
    is_batch = isinstance(value, list | tuple) and not (words and value and _is_text(value[0]))
    values = list(value) if is_batch else [value]
    pairs = list(pair) if is_batch and pair is not None else [pair] * len(values)
    joined = [_joined(text, other) for text, other in zip(values, pairs, strict=False)]
    return [text for text in joined if text is not None]


def _joined(text: Any, pair: Any) -> str | None:
    parts = [
        part if _is_text(part) else "\n".join(part)
        for part in (text, pair)
        if _is_text(part) or (isinstance(part, list | tuple) and all(map(_is_text, part)))
    ]
    return "\n".join(parts) if parts else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _rows(result: Any, count: int) -> list[Any]:
    """Token IDs of each sample from a list, a tensor, or an encoding of one or several."""
    ids = result["input_ids"] if isinstance(result, Mapping) or hasattr(result, "keys") else result
    if ids is None:
        return []
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    is_batch = (bool(ids) and isinstance(ids[0], list | tuple)) or (not ids and count != 1)
    return list(ids) if is_batch else [ids]


def _plain(value: Any) -> Any:
    """Messages as JSON types: objects by their fields, anything else by its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, _PLAIN):
        return value
    if hasattr(value, "messages"):
        return _plain(value.messages)
    return str(value)
