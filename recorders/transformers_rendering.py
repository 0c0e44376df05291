"""What a transformers tokenizer is given and returns: messages, template text, token IDs.

Shared by every stack whose tokenizers are transformers' own (mlx-lm wraps one).
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tracediff.recorders.rendering_chain import PLAIN, Chain, as_ids, as_json, content_of
from tracediff.recorders.tokenizer_facts import encoding_facts, tokenizer_settings
from tracediff.recording import Patches
from tracediff.trace.summary import digest_value

_ENCODERS: Final = ("__call__", "encode", "batch_encode_plus", "encode_plus")
_TEMPLATE_SETTINGS: Final = ("add_generation_prompt", "continue_final_message")
_ENCODE_SETTINGS: Final = ("add_special_tokens", "padding", "truncation", "max_length")
_CLOCK: Final = "strftime_now"
"""The function with which a template reads the clock."""


class RenderingHooks:
    """Wraps the tokenizer methods of transformers, in the base class and where it is overridden.

    A template call and the tokenizer call on its text are one sample, also where the script changed
    the text in between; so are both halves of `apply_chat_template(tokenize=True)`. Only the
    outermost call is recorded.
    """

    def __init__(self, chain: Chain, patches: Patches) -> None:
        self._chain = chain
        self._patches = patches
        self._tokenizers: list[tuple[weakref.ref[PreTrainedTokenizerBase], set[int]]] = []
        self._decoded: set[int] = set()
        self._encoded: Any = None
        """What the tokenizer made inside the call that is being recorded."""

    def install(self) -> None:
        for cls in _with_subclasses(PreTrainedTokenizerBase):
            own = vars(cls)
            if "apply_chat_template" in own:
                self._patches.replace(cls, "apply_chat_template", self._wrap_template)
            for name in _ENCODERS:
                if name in own:
                    self._patches.replace(cls, name, self._wrap_encoder)
            if "decode" in own:
                self._patches.replace(cls, "decode", self._wrap_decode)

    # ---- templates -------------------------------------------------------------------------

    def _wrap_template(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def apply(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
            with self._chain.outermost() as records:
                self._encoded = None
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
        text, encoded = result, self._encoded
        if given.get("tokenize", True):
            # Rendering is a pure function of the messages: once more, without the tokenizer.
            text = original(tokenizer, **_as_text(given))
        conversations, texts = _samples(given.get("conversation"), text)
        inputs = _template_inputs(tokenizer, given)
        samples = [
            self._record_messages(messages, rendered, given, inputs)
            for messages, rendered in zip(conversations, texts, strict=False)
        ]
        if given.get("tokenize", True):
            rows = _rows(result, len(texts))
            facts = self._facts(tokenizer, encoded, len(rows))
            for index, rendered, ids, fact in zip(samples, texts, rows, facts, strict=False):
                self._text(tokenizer, index, rendered)
                self._chain.ids(index, ids, fact)
        else:
            for index, rendered in zip(samples, texts, strict=False):
                self._chain.waits(index, rendered)

    def _record_messages(
        self, messages: Any, text: str, given: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> int:
        index = self._chain.new()
        self._chain.text(index, "messages", as_json(messages))
        for name in ("tools", "documents"):
            if given.get(name):
                self._chain.text(index, name, as_json(given[name]))
        self._chain.text(index, "template", text, inputs)
        return index

    # ---- tokenizing ------------------------------------------------------------------------

    def _wrap_encoder(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def encode(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
            with self._chain.outermost() as records:
                if records:
                    self._encoded = None
                result = original(tokenizer, *args, **kwargs)
                if getattr(result, "encodings", None):
                    self._encoded = result
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
            if isinstance(value := given.get(name), PLAIN) and value is not None
        }
        rows = _rows(result, len(texts))
        if len(rows) == 1:
            texts = ["\n".join(texts)]  # `encode` takes a list for the words of one text
        elif (
            hasattr(result, "get") and (of := result.get("overflow_to_sample_mapping")) is not None
        ):
            texts = [texts[int(index)] for index in of]
        facts = self._facts(tokenizer, self._encoded, len(rows))
        for text, ids, fact in zip(texts, rows, facts, strict=False):
            index = self._chain.sample_of(text)
            self._text(tokenizer, index, text)
            self._chain.ids(index, ids, attributes | fact)

    def _text(self, tokenizer: Any, index: int, text: str) -> None:
        """Records the text that was tokenized, and what the normaliser makes of it if another."""
        self._chain.text(index, "text", text)
        normalizer = getattr(getattr(tokenizer, "_tokenizer", None), "normalizer", None)
        if normalizer is not None and (normalized := normalizer.normalize_str(text)) != text:
            self._chain.text(index, "normalized", normalized)

    # ---- decoding --------------------------------------------------------------------------

    def _wrap_decode(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def decode(tokenizer: Any, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
            with self._chain.outermost() as records:
                result = original(tokenizer, token_ids, *args, **kwargs)
                if records and isinstance(result, str):
                    self._record_decoding(token_ids, kwargs, result)
            return result

        return decode

    def _record_decoding(self, ids: Any, settings: Mapping[str, Any], text: str) -> None:
        """Records a text under the number of its IDs: decoding other IDs is another matter."""
        number = content_of(as_ids(ids))
        if number not in self._decoded:
            self._decoded.add(number)
            attributes = {k: v for k, v in settings.items() if isinstance(v, PLAIN)}
            self._chain.decoded(number, text, attributes)

    def _describe(self, tokenizer: Any) -> tuple[int, set[int]]:
        """Records the settings of a tokenizer when it is first used.

        Returns:
            Its number in this run, and the IDs whose tokens have been told.
        """
        for number, (reference, known) in enumerate(self._tokenizers):
            if reference() is tokenizer:
                return number, known
        number, known = len(self._tokenizers), set()
        self._tokenizers.append((weakref.ref(tokenizer), known))
        name = f"tokenizer[{number}]" if number else "tokenizer"
        settings = tokenizer_settings(tokenizer)
        self._chain.settings({f"{name}.{key}": value for key, value in settings.items()})
        return number, known

    def _facts(self, tokenizer: Any, encoded: Any, rows: int) -> list[dict[str, Any]]:
        number, known = self._describe(tokenizer)
        facts = encoding_facts(encoded, rows, known)
        return [fact | {"tokenizer": number} for fact in facts] if number else facts


def _template_inputs(tokenizer: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a template's text depends on besides the messages: flags, variables, itself, clock."""
    inputs = {name: given[name] for name in _TEMPLATE_SETTINGS if name in given}
    inputs |= {k: v for k, v in given.get("kwargs", {}).items() if isinstance(v, PLAIN)}
    template = given.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several by name, of which transformers chooses one
        template = template.get("tool_use" if given.get("tools") else "default")
    if isinstance(template, str):
        inputs["template"] = digest_value(template).hex()[:12]
        if _CLOCK in template:
            inputs["clock"] = time.strftime("%Y-%m-%d")
    return inputs


# ---- shapes of arguments and results ------------------------------------------------------------


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
