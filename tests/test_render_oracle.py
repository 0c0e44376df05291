"""Independent renderers against each other, on the real SmolLM2 and Qwen3 files.

What agrees here agrees between implementations that share no code; the disagreements that are known
are listed one by one (docs/rendering.md explains them), so that a new one fails the test.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unicodedata import ucd_3_2_0

import pytest
import qwen3
import rendering_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_tokenizer import BOS_FIRST, PREFIX_SPACE, SPLIT_AT_B, need_js, tokenizer_json

from tracediff.rendering.checking import Check, check
from tracediff.rendering.files import read_files
from tracediff.rendering.records import Settings, read_records
from tracediff.rendering.routes import open_route

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("regex")

from tracediff.replayers.byte_level_bpe import ByteLevelBPE, UnsupportedError  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "clinical_lora"
MODEL = EXAMPLE / "build" / "model4"
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "<tool_call>", "<|im_", "'ll"]
TEXTS = st.lists(st.text(max_size=12) | st.sampled_from([*CONTROL, " ", "\n\n", "a", "ab"])).map(
    "".join
)

DIGITS = {"type": "Digits", "individual_digits": True}
BYTE_LEVEL = tokenizer_json()["pre_tokenizer"]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix space": {"pre_tokenizer": PREFIX_SPACE},
    "split by a string": {"pre_tokenizer": SPLIT_AT_B},
    "digits first": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]}},
    "NFC": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}},
    "BOS first": {"post_processor": BOS_FIRST},
}


def pair(tokenizer: dict[str, Any]) -> tuple[ByteLevelBPE, Any]:
    return ByteLevelBPE(tokenizer), tokenizers.Tokenizer.from_str(json.dumps(tokenizer))


def known(text: str) -> bool:
    """Whether a text has old characters only: Rust's NFC does not know those after Unicode 9."""
    return all(ucd_3_2_0.category(character) != "Cn" for character in text)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(deadline=None)
@given(text=TEXTS)
def test_the_bpe_is_that_of_the_tokenizers_library(variant: str, text: str) -> None:
    if variant == "NFC" and not known(text):
        return
    ours, theirs = pair(tokenizer_json(**VARIANTS[variant]))
    for special in (False, True):
        expected = theirs.encode(text, add_special_tokens=special).ids
        assert ours.encode(text, add_special_tokens=special) == expected


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "pre-tokenizer Metaspace"),
        ({"post_processor": {"type": "RobertaProcessing"}}, "post-processor RobertaProcessing"),
        ({"model": {"type": "Unigram", "vocab": []}}, "model of type Unigram"),
        ({"model": {**tokenizer_json()["model"], "byte_fallback": True}}, "byte_fallback=True"),
        (
            {"added_tokens": [{"id": 0, "content": "<s>", "lstrip": True}]},
            "option lstrip of the added token <s>",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        ByteLevelBPE(tokenizer_json(**changes))


def test_a_lone_surrogate_is_refused_and_not_replaced() -> None:
    with pytest.raises(UnicodeEncodeError):
        ByteLevelBPE(tokenizer_json()).encode("a\ud800")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    pytest.importorskip("transformers")
    command = [sys.executable, str(EXAMPLE / "prepare.py"), "--layers", "4", "--out", str(MODEL)]
    subprocess.run(command, check=True, capture_output=True)
    return MODEL


@pytest.fixture(scope="module", params=["smollm2", "qwen3"])
def model(request: pytest.FixtureRequest) -> Path:
    if request.param == "qwen3":
        return qwen3.folder()
    path: Path = request.getfixturevalue("smollm2")
    return path


@pytest.mark.slow
def test_the_bpe_on_real_vocabularies(model: Path) -> None:
    tokenizer = read_files(model).tokenizer
    assert tokenizer is not None
    ours, theirs = pair(dict(tokenizer))
    texts = [
        *clinical_texts(),
        *rendering_cases.UNICODE.values(),
        *rendering_cases.CONTROL.values(),
    ]
    for text in filter(known, texts):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text

    @settings(deadline=None, max_examples=500)
    @given(TEXTS.filter(known))
    def fuzz(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids

    fuzz()


def clinical_texts() -> Iterator[str]:
    for name in ("train", "heldout"):
        for line in (EXAMPLE / "data" / f"{name}.jsonl").read_text("utf-8").splitlines():
            record = json.loads(line)
            yield f"<|im_start|>user\n{record['question']}<|im_end|>\n{record['answer']}"


@pytest.mark.slow
def test_clinical_data_agree_on_every_route(smollm2: Path) -> None:
    need_js()
    result = rendered(smollm2, EXAMPLE / "data" / "train.jsonl", "hf", "mlx", "jinja", "bpe", "js")
    assert (result.outcome, result.compared, result.rows_compared) == ("agree", 215, 215)
    assert {(tally.bos, tally.eos) for tally in result.routes.values()} == {(645, 645)}


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_disagreements_on_hard_conversations_are_those_that_are_known(
    model: Path, thinking: bool | None, tmp_path: Path
) -> None:
    need_js()
    path = tmp_path / "cases.jsonl"
    lines = [f"{json.dumps(record)}\n" for record in rendering_cases.records()]
    path.write_text("".join(lines), encoding="utf-8")
    variables = {} if thinking is None else {"enable_thinking": thinking}
    routes = ("hf", "mlx", "jinja", "bpe", "js")
    result = rendered(model, path, *routes, variables=variables, add_generation_prompt=True)
    found = {
        (finding.route.partition(":")[0], finding.step, finding.pattern.partition(" (")[0])
        for finding in result.findings.values()
    }
    assert found == (QWEN3 if model == qwen3.CACHE else SMOLLM2)
    assert result.compared == (84 if model == qwen3.CACHE else 86)


REFUSALS = {
    ("hf", "refused", "refused"),
    ("mlx", "refused", "refused"),
    ("jinja", "refused", "refused"),
    ("bpe", "refused", "refused"),
}
SMOLLM2 = REFUSALS | {("js", "ids", "split pattern")}
QWEN3 = REFUSALS | {
    ("bpe", "ids", "unicode normalisation"),
    ("js", "ids", "unicode normalisation"),
    ("jinja", "text", "thinking block"),
    ("bpe", "text", "thinking block"),
    ("js", "text", "thinking block"),
    ("js", "text", "JSON serialisation"),
    ("js", "text", "whitespace"),
    ("js", "text", "deleted"),
}


opened = functools.cache(open_route)
"""Only routes that nothing closes: the others hold a vocabulary, which takes seconds to read."""


def rendered(model: Path, data: Path, *routes: str, **settings: Any) -> Check:
    named = [(open_route if route == "js" else opened)(f"{route}:{model}") for route in routes]
    return check(named, read_records(data, Settings(**settings)))
