"""`tracediff render`: routes, their comparison, and the class of each planted difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rendering_tokenizer import (
    BOS,
    BOS_FIRST,
    EOS,
    FIRST,
    MERGED,
    PREFIX_SPACE,
    SPLIT_AT_B,
    TEMPLATE,
    need_js,
    tokenizer_json,
)

from tracediff.cli import main
from tracediff.rendering.checking import Check, broken_prefix, check
from tracediff.rendering.records import Settings, read_records
from tracediff.rendering.routes import Rendered, Route, names, open_route

pytest.importorskip("tokenizers")
pytest.importorskip("minijinja")
pytest.importorskip("regex")

MESSAGES = [{"role": "user", "content": "dose?"}, {"role": "assistant", "content": "abc"}]
Write = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Write:
    """Writes a folder of tokenizer files."""

    def write(name: str, template: str = TEMPLATE, **changes: Any) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "tokenizer.json").write_text(json.dumps(tokenizer_json(**changes)))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
        config |= {"bos_token": "<s>", "eos_token": "</s>"}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        (path / "chat_template.jinja").write_text(template)
        return path

    return write


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: dict[str, Any]) -> Path:
        path = tmp_path / "data.jsonl"
        lines = (json.dumps(record) for record in records or [{"messages": MESSAGES}])
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


def run(specs: list[str], path: Path, **settings: Any) -> Check:
    return check([open_route(spec) for spec in specs], read_records(path, Settings(**settings)))


def by_hand(text: str) -> list[int]:
    """IDs of a text without merges or special tokens: one per byte."""
    return [FIRST + byte for byte in text.encode()]


def routes(path: Path, *wanted: str) -> list[str]:
    return [f"{name}:{path}" for name in wanted]


EXPECTED_TEXT = "<|user|>dose?</s>\n<|assistant|>abc</s>\n"
EXPECTED_IDS = (
    *by_hand("<|user|>dose?"),
    EOS,
    *by_hand("\n<|assistant|>"),
    MERGED["abc"],
    EOS,
    *by_hand("\n"),
)


@pytest.mark.parametrize("name", ["hf", "hf2", "mlx", "jinja", "bpe", "js"])
def test_each_route_makes_the_text_and_the_ids_worked_out_by_hand(
    name: str, folder: Write, data: Callable[..., Path]
) -> None:
    route = opened(f"{name}:{folder('clean')}")
    (record,) = read_records(data(), Settings())
    try:
        assert route.render(record) == Rendered(EXPECTED_TEXT, EXPECTED_IDS)
    finally:
        route.close()


def opened(spec: str) -> Route:
    """A route, or a skipped test where what it runs on is not there."""
    needs = {"hf": "transformers", "hf2": "transformers", "mlx": "mlx_lm"}
    name = spec.partition(":")[0]
    if name in needs:
        pytest.importorskip(needs[name])
    if name == "js":
        need_js()
    return open_route(spec).route


def test_the_routes_that_the_help_lists_are_there() -> None:
    assert set(names()) == {"hf", "hf2", "mlx", "jinja", "bpe", "js"}


def test_two_independent_routes_agree_and_say_what_they_share(
    folder: Write, data: Callable[..., Path]
) -> None:
    clean = folder("clean")
    result = run(routes(clean, "jinja", "bpe"), data())
    assert (result.outcome, result.exit_code) == ("agree", 0)
    assert (result.compared, result.rows_compared) == (1, 1)
    assert {(t.tokens, t.bos, t.eos) for t in result.routes.values()} == {(len(EXPECTED_IDS), 0, 2)}
    (parts,) = result.shares.values()
    assert [part.split(" (")[0] for part in parts] == ["template", "vocabulary"]


TEXT_FAULTS = {
    "trailing whitespace": ("{{ messages[1].content }} ", "{{ messages[1].content }}", 3),
    "newline": ("a{{ '\\n' }}b", "ab", 1),
    "generation prompt": ("a</s>", "a</s><|assistant|>", 5),
    "system default": ("<|user|>a", "<|system|>You are kind.</s><|user|>a", 2),
    "unicode normalisation": ("dose é", "dose e\u0301", 5),
    "date": ("Today: 26 Jul 2024.", "Today: {{ '29 Nov 2026' }}.", 8),
    "thinking block": ("a<think>\n\n</think>\n\nb", "ab", 1),
    "BOS twice": ("<s>a", "<s><s>a", 3),
    "BOS missing": ("<s>a", "a", 0),
    "EOS missing": ("a</s>b</s>", "a</s>b", 6),
    "truncated": ("a long answer", "a long", 6),
    "JSON serialisation": ("{{ {'b': 1, 'a': 2} | tojson }}", '{"a": 2, "b": 1}', 2),
}


@pytest.mark.parametrize("pattern", TEXT_FAULTS)
def test_a_template_that_differs_is_named_by_its_class(
    pattern: str, folder: Write, data: Callable[..., Path]
) -> None:
    baseline, target, index = TEXT_FAULTS[pattern]
    specs = [f"bpe:{folder('a', baseline)}", f"bpe:{folder('b', target)}"]
    result = run(specs, data({"messages": MESSAGES}, {"question": "q", "answer": "abc"}))
    (finding,) = result.findings.values()
    assert (finding.step, finding.pattern, finding.detail["index"]) == ("text", pattern, index)
    assert (finding.count, finding.record, finding.line) == (2, 0, 1)
    assert (result.exit_code, result.differing, result.first) == (1, 2, [0, 1])


def test_a_system_turn_of_the_record_is_no_default(
    folder: Write, data: Callable[..., Path]
) -> None:
    without = (
        "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    specs = [f"bpe:{folder('a', TEMPLATE.replace('</s>', ''))}", f"bpe:{folder('b', without)}"]
    result = run(specs, data({"system": "Be brief.", "question": "q"}))
    (finding,) = result.findings.values()
    assert finding.pattern != "system default"


def test_bos_by_template_and_by_tokenizer_is_told_with_counts(
    folder: Write, data: Callable[..., Path]
) -> None:
    """Fault A01 and A02 of the catalogue: no template is right for both ways to call."""
    pytest.importorskip("transformers")
    found = {}
    for name, template in (("with", "<s>{{ messages[0].content }}"), ("without", "abc")):
        path = folder(name, template, post_processor=BOS_FIRST)
        result = run(routes(path, "hf", "hf2"), data())
        (finding,) = result.findings.values()
        found[name] = (finding.step, finding.pattern, dict(finding.detail["bos"]))
        assert [t.bos for t in result.routes.values()] == list(finding.detail["bos"].values())
    assert found == {
        "with": ("ids", "BOS twice", {"baseline": 1, "target": 2}),
        "without": ("ids", "BOS missing", {"baseline": 0, "target": 1}),
    }


ID_FAULTS: dict[str, tuple[str, dict[str, Any], list[int], list[int]]] = {
    "split pattern": (
        "abc",
        {"pre_tokenizer": SPLIT_AT_B},
        [MERGED["abc"]],
        by_hand("abc"),
    ),
    "prefix space": (
        "<s>ab",
        {"pre_tokenizer": PREFIX_SPACE},
        [BOS, MERGED["ab"]],
        [BOS, *by_hand(" "), MERGED["ab"]],
    ),
    "content becomes a control token": (
        "c</s>",
        {"added_tokens": []},
        [*by_hand("c"), EOS],
        by_hand("c</s>"),
    ),
    "unicode normalisation": (
        "e\u0301",
        {"normalizer": {"type": "NFC"}},
        by_hand("e\u0301"),
        by_hand("é"),
    ),
}


@pytest.mark.parametrize("pattern", ID_FAULTS)
@pytest.mark.parametrize("route", ["bpe", "jinja"])
def test_a_tokenizer_that_differs_is_named_by_its_class(
    pattern: str, route: str, folder: Write, data: Callable[..., Path]
) -> None:
    text, changes, baseline, target = ID_FAULTS[pattern]
    template = "{{ messages[0].content }}"
    specs = routes(folder("a", template), route) + routes(folder("b", template, **changes), route)
    path = data({"messages": [{"role": "user", "content": text}]})
    (record,) = read_records(path, Settings())
    rows = [open_route(spec).route.render(record).ids for spec in specs]
    assert rows == [tuple(baseline), tuple(target)]
    (finding,) = run(specs, path).findings.values()
    assert (finding.step, finding.pattern) == ("ids", pattern)
    assert finding.meaning


def test_the_routes_that_agree_with_each_other_are_told(
    folder: Write, data: Callable[..., Path]
) -> None:
    good, bad = folder("good"), folder("bad", TEMPLATE.replace("</s>", ""))
    result = run([f"jinja:{good}", f"bpe:{bad}", f"bpe:{good}"], data())
    (finding,) = result.findings.values()
    assert (finding.route, finding.pattern) == (f"bpe:{bad}", "EOS missing")
    assert finding.agreeing == (f"jinja:{good}", f"bpe:{good}")


def test_a_refusal_by_one_route_is_a_difference_and_by_all_is_none(
    folder: Write, data: Callable[..., Path]
) -> None:
    strict = "{{ raise_exception('only answers') }}"
    lenient, refusing = folder("lenient"), folder("strict", strict)
    result = run([f"jinja:{refusing}", f"bpe:{lenient}", f"jinja:{lenient}"], data())
    (finding,) = result.findings.values()
    assert (finding.step, result.exit_code) == ("refused", 1)
    assert "only answers" in finding.meaning
    nobody = run([f"jinja:{refusing}", f"bpe:{refusing}"], data())
    assert (nobody.outcome, nobody.exit_code) == ("incomparable", 125)
    assert [tally.refused for tally in nobody.routes.values()] == [1, 1]


def test_a_template_file_gives_texts_and_the_ids_of_the_others_are_still_compared(
    folder: Write, data: Callable[..., Path]
) -> None:
    clean, split = folder("a"), folder("b", pre_tokenizer=SPLIT_AT_B)
    specs = [f"jinja:{clean / 'chat_template.jinja'}", f"bpe:{clean}", f"bpe:{split}"]
    result = run(specs, data())
    (finding,) = result.findings.values()
    assert (finding.reference, finding.route) == (specs[1], specs[2])
    assert (finding.step, finding.pattern) == ("ids", "split pattern")


def test_memory_does_not_grow_with_differing_records(
    folder: Write, data: Callable[..., Path]
) -> None:
    specs = [f"bpe:{folder('a', 'a')}", f"bpe:{folder('b', 'b')}"]
    result = run(specs, data(*[{"question": "q"}] * 1500))
    assert (result.differing, len(result.first), len(result.findings)) == (1500, 1000, 1)


def test_the_prefix_property() -> None:
    assert broken_prefix(["a", "ab", "abc"]) is None
    assert broken_prefix(["a<t>", "a<t>b", "ab"]) == (3, 1)
    assert broken_prefix([]) is None


def test_a_template_that_rewrites_history_is_a_note_and_no_difference(
    folder: Write, data: Callable[..., Path]
) -> None:
    forgetful = "{% for m in messages %}{{ m.content if loop.last else '-' }}|{% endfor %}"
    named = [open_route(spec) for spec in routes(folder("a", forgetful), "jinja", "bpe")]
    result = check(named, read_records(data(), Settings()), turns=True)
    assert result.exit_code == 0
    assert [(t.count, t.turn, t.index) for t in result.turns.values()] == [(1, 2, 0)] * 2


def test_command_agrees_differs_and_has_nothing_to_compare(
    folder: Write, data: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean, bad = folder("clean"), folder("bad", TEMPLATE.replace("\n", ""))
    path = str(data({"id": "r1", "question": "dose?", "answer": "abc"}))
    same = ["render", path, "--route", f"jinja:{clean}", "--route", f"bpe:{clean}"]
    assert main(same) == 0
    assert "2 routes agree on the text of 1 and token IDs of 1 records" in capsys.readouterr().out
    out = tmp_path / "out.json"
    command = ["render", path, "--route", f"jinja:{clean}", "--route", f"bpe:{bad}"]
    assert main([*command, "--json", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "text: newline" in printed
    assert "record 0 (r1), line 1" in printed
    assert "dose?</s>␊" in printed
    found = json.loads(out.read_text())
    assert found["outcome"] == "differ"
    assert found["findings"][0]["pattern"] == "newline"
    assert [route["name"] for route in found["routes"]] == [f"jinja:{clean}", f"bpe:{bad}"]
    assert main([*same[:1], str(empty(tmp_path)), *same[2:]]) == 125


def empty(folder: Path) -> Path:
    path = folder / "empty.jsonl"
    path.write_text("\n")
    return path


def test_command_passes_variables_tools_flag_and_limit(
    folder: Write, data: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{{ thinking }}{{ tools[0].name }}{{ add_generation_prompt }}"
    path = folder("a", template)
    expected = folder("b", "{{ 'Falsepump' if thinking is false else 'x' }}True")
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "pump"}]')
    options = ["--tools", str(tools), "--set", "thinking=false", "--add-generation-prompt"]
    where = data({"question": "q"}, {"question": "q"}, {"nothing": 1})
    command = ["render", str(where), "--route", f"bpe:{path}", "--route", f"bpe:{expected}"]
    assert main([*command, *options, "--limit", "2"]) == 0
    assert "the text of 2 and" in capsys.readouterr().out
    assert main([*command, *options]) == 2
    assert "line 3 has 'nothing'; expected 'messages'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--route", "bpe:."], "two or more different --route"),
        (["--route", "bpe:x", "--route", "jinja:x"], "x is missing"),
        (["--route", "bpe", "--route", "jinja:x"], "has no path: write it as hf:DIR"),
        (["--route", "php:.", "--route", "jinja:x"], "route 'php' is unknown: use one of bpe,"),
        (["--route", "bpe:.", "--route", "js:.", "--set", "x"], "no NAME=VALUE"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    arguments: list[str],
    told: str,
    data: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["render", str(data()), *arguments]) == 2
    printed = capsys.readouterr().err
    assert told in printed
    assert len(printed.splitlines()) == 1


def test_files_that_a_library_cannot_read_are_one_sentence(
    folder: Write, data: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder("a", pre_tokenizer={"type": "Unheard"})
    command = ["render", str(data()), "--route", f"jinja:{path}", "--route", f"bpe:{path}"]
    assert main(command) == 2
    printed = capsys.readouterr().err
    assert f"route 'jinja:{path}' cannot be opened" in printed
    assert len(printed.splitlines()) == 1


def test_what_the_bpe_does_not_implement_it_refuses_in_one_sentence(
    folder: Write, data: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder("a", pre_tokenizer={"type": "Metaspace", "replacement": "▁"})
    command = ["render", str(data()), "--route", f"bpe:{path}", "--route", f"js:{path}"]
    assert main(command) == 2
    assert "does not implement the pre-tokenizer Metaspace" in capsys.readouterr().err
