"""`tracediff render --trace`: recorded conversations through independent routes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rendering_tokenizer import TEMPLATE, tokenizer_json
from transformers import AutoTokenizer

from tracediff.cli import main
from tracediff.events import Run
from tracediff.recorders.rendering_chain import Chain
from tracediff.recorders.transformers_rendering import RenderingHooks
from tracediff.recording import Patches, Policy, Tape
from tracediff.testing import build_trace
from tracediff.trace import Trace, TraceWriter

pytest.importorskip("regex")
pytest.importorskip("minijinja")

CHATS = [
    [{"role": "user", "content": f"dose {i}?"}, {"role": "assistant", "content": f"ab {i} é"}]
    for i in range(4)
]
Job = Callable[[Any], None]


def tokenizer_folder(path: Path, template: str = TEMPLATE) -> Path:
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    config |= {"bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tokenizer_folder(tmp_path / "tokenizer")


def record(path: Path, folder: Path, job: Job) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    patches = Patches()
    with TraceWriter(path, Run(stack="pytorch")) as writer:
        tape = Tape(writer, Policy())
        tape.emit_settings({"version.jinja2": "3.0", "version.tokenizers": "0.1"})
        RenderingHooks(Chain(tape), patches).install()
        try:
            job(tokenizer)
        finally:
            patches.undo()
        tape.finish()
    return path


def rendered(trace: Path, report: Path, *routes: str) -> tuple[int, dict[str, Any]]:
    specs = [part for route in routes for part in ("--route", route)]
    code = main(["render", "--trace", str(trace), *specs, "--json", str(report)])
    return code, json.loads(report.read_text())


def test_what_was_recorded_agrees_with_the_independent_routes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(tokenizer: Any) -> None:
        for chat in CHATS[:2]:
            tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        tokenizer.apply_chat_template(CHATS, padding=True, return_tensors="np")
        tokenizer("no conversation")

    trace = record(tmp_path / "run.zarr", folder, job)
    code, found = rendered(trace, tmp_path / "r.json", f"bpe:{folder}", f"jinja:{folder}")
    assert (code, found["outcome"], found["records"]) == (0, "agree", 6)
    assert found["compared"] == {"text": 6, "ids": 6}
    assert "1 samples have no messages" in capsys.readouterr().err
    shared = {tuple(item["routes"]): item["parts"] for item in found["shared"]}
    own = shared[f"bpe:{folder}", f"trace:{trace}"]
    assert len(own) == 1
    assert own[0].startswith("template (")


def test_a_script_that_changes_the_text_departs_at_the_text(folder: Path, tmp_path: Path) -> None:
    def job(tokenizer: Any) -> None:
        for i, chat in enumerate(CHATS):
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            tokenizer(text.rstrip() if i == 2 else text)

    trace = record(tmp_path / "run.zarr", folder, job)
    code, found = rendered(trace, tmp_path / "r.json", f"bpe:{folder}")
    (finding,) = found["findings"]
    assert (code, finding["step"], finding["record"], finding["count"]) == (1, "text", 2, 1)
    assert finding["route"] == f"trace:{trace}"


def test_another_template_departs_at_the_template(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tokenizer_folder(tmp_path / "other", TEMPLATE.replace("\n", ""))
    job: Job = lambda tokenizer: [tokenizer.apply_chat_template(chat) for chat in CHATS]  # noqa: E731
    trace = record(tmp_path / "run.zarr", other, job)
    code, found = rendered(trace, tmp_path / "r.json", f"bpe:{folder}")
    (finding,) = found["findings"]
    assert (code, finding["step"], finding["pattern"], finding["count"]) == (
        1,
        "template",
        "newline",
        4,
    )
    assert found["shared"][0]["parts"] == []
    assert "0/rendering/sample[0].template" in capsys.readouterr().out


def test_ids_that_were_cut_depart_at_the_ids(folder: Path, tmp_path: Path) -> None:
    def job(tokenizer: Any) -> None:
        for i, chat in enumerate(CHATS):
            length = 5 if i == 1 else 1000
            tokenizer.apply_chat_template(chat, truncation=True, max_length=length)

    code, found = rendered(
        record(tmp_path / "run.zarr", folder, job), tmp_path / "r.json", f"bpe:{folder}"
    )
    (finding,) = found["findings"]
    assert (code, finding["step"], finding["record"], finding["pattern"]) == (
        1,
        "ids",
        1,
        "truncated",
    )


ANY = st.text(st.characters(codec=None, categories=None), max_size=10)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.lists(ANY, min_size=1, max_size=4), min_size=1, max_size=3))
@example([["a\0b \ud83d", "\udfff\u0301e😀\U0010ffff\r\n"]])
def test_any_text_in_any_turns_passes_the_recorder_unchanged(
    folder: Path, turns: list[list[str]]
) -> None:
    """Also lone surrogates, which the tokenizer refuses but a template does not."""
    chats = [[{"role": "user", "content": text} for text in chat] for chat in turns]
    made: list[str] = []

    def job(tokenizer: Any) -> None:
        made.extend(tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats)

    with tempfile.TemporaryDirectory() as temporary:
        trace = Trace(record(Path(temporary) / "run.zarr", folder, job))
        found = {event.site.path: event.value for event in trace.samples(0)}
    for i, (chat, text) in enumerate(zip(chats, made, strict=True)):
        assert json.loads(found[f"sample[{i}].messages"]) == chat
        assert found[f"sample[{i}].template"] == text


def test_wrong_use_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = build_trace(tmp_path / "run.zarr", [("0/rendering/sample[0].text", "no messages")])
    route = ["--route", f"bpe:{folder}"]
    for arguments, message in (
        (["--trace", str(trace), *route], "no conversation that could be rendered again"),
        (["--trace", str(trace)], "give two or more"),
        ([*route], "either a file"),
        (["data.jsonl", "--trace", str(trace), *route], "either a file"),
        (["--trace", str(trace), "--set", "a=1", *route], "leave out"),
        (["--trace", str(tmp_path / "none.zarr"), *route], "none.zarr"),
    ):
        assert main(["render", *arguments]) == 2
        told = capsys.readouterr().err
        assert message in told
        assert len(told.strip().splitlines()) == 1
