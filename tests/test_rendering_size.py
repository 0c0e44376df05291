"""A slice of the benchmark of a real data set's size: what is found, and what a token costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rendering_tokenizer import TEMPLATE, tokenizer_json

from benchmarks.rendering import CHANGED, REAL_SIZE, load, records, render, table, words_of
from tracediff import bisect, record
from tracediff.trace import Trace, verify

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "clinical_lora" / "build" / "model"
COUNT = 300
SYLLABLES = ("ca", "dor", "fe", "lin", "mo", "nal", "pre", "ri", "sol", "ter", "vo", "xan")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's tokenizer where it was prepared, else a small one."""
    if (EXAMPLE / "tokenizer.json").is_file():
        return EXAMPLE
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def words(model: Path) -> list[str]:
    """The vocabulary's own words; the small tokenizer has none."""
    return words_of(model) or [a + b + c for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES]


def test_records_are_the_same_for_the_same_seed() -> None:
    words = ["fever", "renal", "acute", "dose"]
    first = list(records(words, 50))
    assert first == list(records(words, 50))
    assert first != list(records(words, 50, seed=1))
    assert len({json.dumps(messages) for messages in first}) == 50
    assert [message["role"] for message in first[0]] == ["user", "assistant"]


@pytest.mark.parametrize("batch", [1, 64])
def test_one_changed_record_in_the_middle_is_found(
    model: Path, words: list[str], tmp_path: Path, batch: int
) -> None:
    tokens = []
    for name, changed in (("a", None), ("b", COUNT // 2)):
        with record(tmp_path / name, stack="pytorch"):
            tokens.append(render(load(model), words, COUNT, batch, changed))
    assert tokens[0] < tokens[1]
    verdict = bisect(tmp_path / "a", tmp_path / "b")
    assert verdict.first is not None
    assert verdict.first.site == f"0/rendering/sample[{COUNT // 2}].messages"
    messages = list(records(words, COUNT))[COUNT // 2]
    text = json.dumps(messages, ensure_ascii=False)
    assert verdict.first.detail["index"] == len(text) - len('"}]')
    assert CHANGED in verdict.first.detail["target_context"] + verdict.first.detail["added"]
    stage = next(stage for stage in verdict.stages if stage.stage == "rendering")
    steps = {name for name, _ in Trace(tmp_path / "a").samples(0).steps}
    assert stage.compared == COUNT * len(steps)
    assert verdict.coverage == 1.0
    assert verify(tmp_path / "b").sound


def test_the_trace_is_smaller_than_the_ids_as_int32(
    model: Path, words: list[str], tmp_path: Path
) -> None:
    """On so few records what each trace has anyway (environment, metadata) is left out."""
    with record(tmp_path / "a", stack="pytorch"):
        tokens = render(load(model), words, COUNT, 64, None)
    with record(tmp_path / "none", stack="pytorch"):
        render(load(model), words, 1, 1, None)
    size = Trace(tmp_path / "a").bytes_stored - Trace(tmp_path / "none").bytes_stored
    assert size < 4 * tokens


def test_the_table_says_what_was_measured() -> None:
    part = {"seconds": 4.0, "cpu_seconds": 2.0, "records_per_second": 50.0, "peak": 3 << 20}
    part |= {"tokens": 1000}
    found = dict.fromkeys(("bare", "recorded", "changed"), part)
    bisected = {**part, "site": "0/rendering/sample[50].messages", "index": 7}
    shown = table({"records": 100, "trace_bytes": 2500, **found, "bisect": bisected})
    assert "| recorded | 4.0 | 2.0 | 50 | 3 MiB |" in shown
    assert "2.50 a token" in shown
    assert REAL_SIZE == 168_574
