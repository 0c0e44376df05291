"""The rendering recorder on a small transformers tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tracediff.events import Event, Run
from tracediff.recorders.rendering_chain import Chain
from tracediff.recorders.transformers_rendering import RenderingHooks
from tracediff.recording import Patches, Policy, Tape
from tracediff.trace import Trace, TraceWriter

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "dose 5 µg"}, {"role": "assistant", "content": "no"}]
TEXT = "<user> dose 5 µg\n<assistant> no\n"
Job = Callable[[], Any]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "[PAD]", "[BOS]", "<user>", "<assistant>", "dose", "5", "µg", "no", "yes"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[BOS] $A", pair="[BOS] $A $B", special_tokens=[("[BOS]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[UNK]",
        pad_token="[PAD]",
        bos_token="[BOS]",
        chat_template=TEMPLATE,
    )


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def rendered(tmp_path: Path) -> Callable[[Job], list[Event]]:
    def run(job: Job) -> list[Event]:
        patches = Patches()
        with TraceWriter(tmp_path / "run.zarr", Run(stack="pytorch"), overwrite=True) as writer:
            tape = Tape(writer, Policy())
            RenderingHooks(Chain(tape), patches).install()
            try:
                job()
            finally:
                patches.undo()
            tape.finish()
        trace = Trace(tmp_path / "run.zarr")
        return trace.events() if trace.steps else []

    return run


def values(events: list[Event], tmp_path: Path) -> dict[str, Any]:
    trace = Trace(tmp_path / "run.zarr")
    return {
        e.site.path: e.value if e.value is not None else trace.array(e).tolist()
        for e in events
        if e.site.phase == "rendering"
    }


def test_template_and_the_tokenizer_call_on_its_text_are_one_sample(
    tokenizer: Any, rendered: Callable[[Job], list[Event]], tmp_path: Path
) -> None:
    def job() -> None:
        text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
        tokenizer("yes 5")
        tokenizer(text, add_special_tokens=False)

    events = rendered(job)
    found = values(events, tmp_path)
    assert list(found) == [
        "sample[0].messages",
        "sample[0].template",
        "sample[1].text",
        "sample[1].ids",
        "sample[0].text",
        "sample[0].ids",
    ]
    assert found["sample[0].template"] == found["sample[0].text"] == TEXT
    assert "µg" in found["sample[0].messages"]
    assert json.loads(found["sample[0].messages"]) == MESSAGES
    assert found["sample[0].ids"] == [3, 5, 6, 7, 4, 8]
    assert found["sample[1].ids"] == [2, 9, 6]
    by_path = {e.site.path: e for e in events}
    assert by_path["sample[0].ids"].kind == "ids"
    assert by_path["sample[0].ids"].dtype == "int64"
    assert by_path["sample[0].ids"].attributes["add_special_tokens"] is False
    text = by_path["sample[0].template"]
    assert text.kind == "text"
    assert text.attributes["add_generation_prompt"] is False


def test_a_text_that_the_script_changed_is_still_its_sample(
    tokenizer: Any, rendered: Callable[[Job], list[Event]], tmp_path: Path
) -> None:
    def job() -> None:
        text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
        prompt = tokenizer.apply_chat_template(MESSAGES[:1], tokenize=False)
        tokenizer(text.replace("\n", ""))
        tokenizer(prompt)

    found = values(rendered(job), tmp_path)
    assert found["sample[0].template"] == TEXT
    assert found["sample[0].text"] == TEXT.replace("\n", "")
    assert found["sample[1].template"] == found["sample[1].text"]
    assert not any(path.startswith("sample[2]") for path in found)


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("return_tensors", [None, "np", "pt"])
def test_template_that_tokenizes_gives_messages_text_and_ids(
    tokenizer: Any,
    rendered: Callable[[Job], list[Event]],
    tmp_path: Path,
    return_dict: bool,
    return_tensors: str | None,
) -> None:
    results: list[Any] = []

    def job() -> None:
        results.append(
            tokenizer.apply_chat_template(
                MESSAGES,
                add_generation_prompt=True,
                return_dict=return_dict,
                return_tensors=return_tensors,
            )
        )

    found = values(rendered(job), tmp_path)
    assert list(found) == [f"sample[0].{step}" for step in ("messages", "template", "text", "ids")]
    assert found["sample[0].text"] == TEXT + "<assistant>"
    ids = results[0]["input_ids"] if return_dict else results[0]
    assert found["sample[0].ids"] == np.asarray(ids).reshape(-1).tolist()
    assert found["sample[0].ids"][-1] == 4


def test_batches_are_one_sample_each(
    tokenizer: Any, rendered: Callable[[Job], list[Event]], tmp_path: Path
) -> None:
    def job() -> None:
        tokenizer(["yes", "no 5"], padding=True, return_tensors="np")
        tokenizer.apply_chat_template([MESSAGES, MESSAGES[:1]], padding=True)

    found = values(rendered(job), tmp_path)
    assert found["sample[0].text"] == "yes"
    assert found["sample[0].ids"] == [2, 9, 1]
    assert found["sample[1].ids"] == [2, 8, 6]
    assert found["sample[2].text"] == TEXT
    assert found["sample[3].text"] == "<user> dose 5 µg\n"
    assert found["sample[3].ids"] == [3, 5, 6, 7, 1, 1]


def test_encode_pairs_words_and_ids(
    tokenizer: Any, rendered: Callable[[Job], list[Event]], tmp_path: Path
) -> None:
    def job() -> None:
        tokenizer.encode("yes")
        tokenizer("dose", "5")
        tokenizer(["dose", "5"], is_split_into_words=True)
        tokenizer(["dose 5 no yes"], truncation=True, max_length=3, return_overflowing_tokens=True)
        tokenizer("dose").input_ids.copy()

    found = values(rendered(job), tmp_path)
    assert found["sample[0].ids"] == [2, 9]
    assert (found["sample[1].text"], found["sample[1].ids"]) == ("dose\n5", [2, 5, 6])
    assert (found["sample[2].text"], found["sample[2].ids"]) == ("dose\n5", [2, 5, 6])
    assert [found[f"sample[{i}].ids"] for i in (3, 4)] == [[2, 5, 6], [2, 8, 9]]
    assert found["sample[5].ids"] == [2, 5]


def test_same_text_rendered_twice_is_two_samples(
    tokenizer: Any, rendered: Callable[[Job], list[Event]], tmp_path: Path
) -> None:
    def job() -> None:
        texts = [tokenizer.apply_chat_template(MESSAGES, tokenize=False) for _ in range(2)]
        tokenizer(texts)
        tokenizer(texts[0])

    found = values(rendered(job), tmp_path)
    assert [path for path in found if path.endswith(".ids")] == [
        "sample[0].ids",
        "sample[1].ids",
        "sample[2].ids",
    ]
    assert "sample[2].messages" not in found


def test_settings_are_recorded_once_per_tokenizer(
    tokenizer: Any, rendered: Callable[[Job], list[Event]]
) -> None:
    other = make_tokenizer()
    other.chat_template = TEMPLATE.replace("\n", "")

    def job() -> None:
        for each in (tokenizer, other, tokenizer):
            each("yes")

    events = rendered(job)
    settings = [(e.site.path, e.value) for e in events if e.site.phase == "environment"]
    assert len(dict(settings)) == len(settings)
    found = dict(settings)
    assert found["tokenizer.bos_token_id"] == 2
    assert found["tokenizer.eos_token_id"] is None
    assert found["tokenizer.pad_token_id"] == 1
    assert found["tokenizer.padding_side"] == tokenizer.padding_side
    assert found["tokenizer.chat_template"] != found["tokenizer[1].chat_template"]


def test_results_are_those_of_the_bare_tokenizer_and_errors_pass(
    tokenizer: Any, rendered: Callable[[Job], list[Event]]
) -> None:
    bare = tokenizer.apply_chat_template(MESSAGES), tokenizer(["no", "yes"], padding=True)
    recorded: list[Any] = []

    def job() -> None:
        recorded.append(tokenizer.apply_chat_template(MESSAGES))
        recorded.append(tokenizer(["no", "yes"], padding=True))
        with pytest.raises(ValueError, match="empty conversation"):
            tokenizer.apply_chat_template([])
        recorded.append(tokenizer("no"))

    events = rendered(job)
    assert [dict(r) for r in recorded[:2]] == [dict(b) for b in bare]
    assert events[-1].site.path == "sample[3].ids"
    assert rendered(lambda: None) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_workers_do_not_write(
    tokenizer: Any, rendered: Callable[[Job], list[Event]]
) -> None:
    def job() -> None:
        tokenizer("yes")
        child = os.fork()
        if child == 0:
            tokenizer("no")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        tokenizer("dose")

    events = rendered(job)
    assert [e.value for e in events if e.kind == "text"] == ["yes", "dose"]


def test_decoded_text_stands_under_a_number_of_its_ids(
    tokenizer: Any, rendered: Callable[[Job], list[Event]]
) -> None:
    def job() -> None:
        for ids in ([2, 5, 6], [5], [2, 5, 6]):
            tokenizer.decode(ids, skip_special_tokens=True)

    found = [(e.site.path, e.value, dict(e.attributes)) for e in rendered(job) if e.kind == "text"]
    assert [text for _, text, _ in found] == ["dose 5", "dose"]
    assert found[0][0] != found[1][0]
    assert all(path.startswith("decoded[") for path, _, _ in found)
    assert found[0][2] == {"skip_special_tokens": True}
    again = [e.site.path for e in rendered(lambda: tokenizer.decode([5])) if e.kind == "text"]
    assert again == [found[1][0]]


def test_a_row_of_ids_says_how_it_came_about(
    tokenizer: Any, rendered: Callable[[Job], list[Event]]
) -> None:
    def job() -> None:
        tokenizer(["dose 5", "no"], padding=True)
        tokenizer("dose 5 no", truncation=True, max_length=3)

    rows = [e.attributes for e in rendered(job) if e.kind == "ids"]
    assert rows[0]["lengths"] == [0, 4, 1]
    assert rows[0]["jumps"] == {"2": 1}
    assert rows[0]["special"] == [0]
    assert rows[0]["tokens"] == {"2": "[BOS]", "5": "dose", "6": "5"}
    assert (rows[1]["lengths"], rows[1]["padded"]) == ([0, 2], [0, 1])
    assert rows[1]["tokens"] == {"8": "no", "1": "[PAD]"}
    assert (rows[2]["truncated"], "tokens" in rows[2]) == (1, False)
