"""Alignment: peft and mlx-lm names, order, rules, samples; nothing dropped, nothing forced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from tracediff.align import Alignment, align, load_rules
from tracediff.align.samples import align_samples
from tracediff.errors import RulesError
from tracediff.events import Event, Site
from tracediff.trace.samples import SampleRows
from tracediff.trace.summary import digest_value

STACKS = ("pytorch", "mlx")


def events(*sites: str, op: str = "", shape: tuple[int, ...] = (4,)) -> list[Event]:
    return [
        Event(site=Site.parse(site), order=order, op=op, shape=shape, dtype="float32")
        for order, site in enumerate(sites)
    ]


def paired(alignment: Alignment) -> dict[str, tuple[str, str, str]]:
    return {
        str(pair.baseline.site): (str(pair.target.site), pair.matched_by, pair.layout)
        for pair in alignment.pairs
    }


def test_peft_names_meet_mlx_lm_names() -> None:
    base = "base_model.model.model.layers.0.self_attn.q_proj"
    baseline = events(
        f"0/loading/{base}.base_layer.weight:param",
        f"0/loading/{base}.lora_A.default.weight:param",
        f"0/loading/{base}.lora_B.default.weight:param",
        f"0/forward/{base}#0:out",
        "0/forward/root#0:out",
        shape=(2, 3),
    )
    short = "model.layers.0.self_attn.q_proj"
    target = events(
        f"0/loading/{short}.linear.weight:param",
        f"0/loading/{short}.lora_a:param",
        f"0/loading/{short}.lora_b:param",
        f"0/forward/{short}#0:out",
        "0/forward/root#0:out",
        shape=(2, 3),
    )
    found = paired(align(baseline, target, STACKS))
    assert found[f"0/loading/{base}.base_layer.weight:param"] == (
        f"0/loading/{short}.linear.weight:param",
        "alias",
        "same",
    )
    assert found[f"0/loading/{base}.lora_A.default.weight:param"] == (
        f"0/loading/{short}.lora_a:param",
        "alias",
        "transposed",
    )
    assert found["0/forward/root#0:out"][1] == "name"
    assert len(found) == 5


def test_one_stack_never_transposes_its_own_adapter() -> None:
    names = events("0/loading/q_proj.lora_a:param", shape=(2, 3))
    (pair,) = align(names, names, ("mlx", "mlx")).pairs
    assert pair.layout == "same"


def module(path: str, op: str, order: int, shape: tuple[int, ...] = (1, 4, 8)) -> Event:
    return Event(
        site=Site(0, "forward", path, 0, "out"), order=order, op=op, shape=shape, dtype="float32"
    )


def test_modules_with_other_names_are_paired_by_order_and_family() -> None:
    baseline = [
        module("root", "LlamaModel", 9),
        module("layers.0", "DecoderLayer", 8),
        module("layers.0.ln1", "RMSNorm", 1),
        module("layers.0.wq", "Linear", 2),
        module("layers.0.act", "SiLU", 3),
        module("layers.0.wo", "Linear", 4),
    ]
    target = [
        module("root", "Model", 9),
        module("blocks.0", "TransformerBlock", 8),
        module("blocks.0.attention_norm", "RMSNorm", 1),
        module("blocks.0.query", "Linear", 2),
        module("blocks.0.output", "Linear", 3),
    ]
    alignment = align(baseline, target, STACKS)
    found = {p.baseline.site.path: (p.target.site.path, p.matched_by) for p in alignment.pairs}
    assert found["layers.0"] == ("blocks.0", "order")
    assert found["layers.0.ln1"] == ("blocks.0.attention_norm", "order")
    assert found["layers.0.wq"] == ("blocks.0.query", "order")
    assert found["layers.0.wo"] == ("blocks.0.output", "order")
    ((left, reason),) = alignment.baseline_only
    assert left.site.path == "layers.0.act"
    assert "SiLU" in reason
    assert alignment.target_only == ()


def test_a_module_of_another_family_is_not_paired() -> None:
    baseline = [module("root", "Model", 2), module("a", "LayerNorm", 1)]
    target = [module("root", "Model", 2), module("b", "Linear", 1)]
    alignment = align(baseline, target, STACKS)
    assert [p.baseline.site.path for p in alignment.pairs] == ["root"]


def test_parameters_follow_their_module(tmp_path: Path) -> None:
    baseline = [module("root", "Model", 9), module("ln1", "RMSNorm", 1)]
    target = [module("root", "Model", 9), module("attention_norm", "RMSNorm", 1)]
    baseline += events("0/loading/ln1.weight:param")
    target += events("0/loading/attention_norm.weight:param")
    found = paired(align(baseline, target, STACKS))
    assert found["0/loading/ln1.weight:param"][0] == "0/loading/attention_norm.weight:param"


def test_rules_rename_transpose_and_ignore(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        """
[[rename]]
side = "target"
pattern = '^enc\\.(\\d+)'
replace = 'encoder.layer.\\1'
[[transposed]]
pattern = 'dense\\.weight$'
[[ignore]]
pattern = 'scratch'
reason = "a debugging buffer"
"""
    )
    baseline = events("0/loading/encoder.layer.3.dense.weight:param", shape=(2, 3))
    target = events("0/loading/enc.3.dense.weight:param", "0/loading/scratch:param", shape=(3, 2))
    alignment = align(baseline, target, STACKS, load_rules(rules))
    (pair,) = alignment.pairs
    assert (pair.matched_by, pair.layout) == ("rule", "transposed")
    assert [reason for _, reason in alignment.target_only] == ["a debugging buffer"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rename]]\npattern = '('\nreplace = 'x'", "invalid"),
        ("[[rename]]\npattern = 1\nreplace = 'x'", "must be a string"),
        ("[[rename]]\nside = 'left'\npattern = 'a'\nreplace = 'x'", "left"),
        ("rename = 3", "array of tables"),
        ("[[renames]]", "renames"),
        ("not toml", "no TOML"),
    ],
)
def test_a_malformed_rules_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(text)
    with pytest.raises(RulesError, match=message) as caught:
        load_rules(rules)
    assert "\n" not in str(caught.value)


def text_event(order: int, index: int, text: str) -> Event:
    site = Site(0, "rendering", f"sample[{index}].text")
    return Event(site=site, order=order, kind="text", digest=digest_value(text), value=text)


def no_payload(event: Event) -> NDArray[Any]:
    raise AssertionError(f"{event.site} is a text")


def test_samples_are_paired_by_content_before_position() -> None:
    baseline = [text_event(i, i, text) for i, text in enumerate(["a", "b", "c", "d"])]
    target = [text_event(i, i, text) for i, text in enumerate(["a", "extra", "b", "C", "d"])]
    rows = SampleRows.of_events(baseline), SampleRows.of_events(target)
    samples = align_samples(*rows, (no_payload, no_payload), limit=None)
    found = {p.baseline.value: p.target.value for p in samples.pairs}
    assert found == {"a": "a", "b": "b", "c": "C", "d": "d"}
    assert [event.value for event, _ in samples.only[1]] == ["extra"]


def test_every_event_is_either_paired_or_listed() -> None:
    baseline = events("0/forward/a#0:out", "0/forward/b#0:out", "0/forward/b#1:out")
    target = events("0/forward/b#0:out", "0/forward/c#0:out")
    alignment = align(baseline, target, STACKS)
    assert len(alignment.pairs) + len(alignment.baseline_only) == len(baseline)
    assert len(alignment.pairs) + len(alignment.target_only) == len(target)
    assert all(reason for _, reason in (*alignment.baseline_only, *alignment.target_only))
