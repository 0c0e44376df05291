"""Samples by content: order, dropped, duplicated and changed records are told apart."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracediff import bisect
from tracediff.align.sequences import increasing, match
from tracediff.bisection import diff
from tracediff.events import Run
from tracediff.testing import build_event, build_trace
from tracediff.trace import TraceWriter
from tracediff.verdict import Divergence, Verdict

RECORDS = [f"dose of drug {i}: {i * 37 % 101} mg every {i % 5 + 3} hours" for i in range(40)]


def rendered(
    path: Path,
    records: Sequence[str],
    steps: Sequence[str] = ("messages", "template", "ids"),
    dtype: Any = np.int64,
    **run: Any,
) -> Path:
    """A trace of a script that renders records and calls no model."""
    values: list[tuple[str, Any]] = [("0/environment/device:out", "cpu")]
    for i, record in enumerate(records):
        made = {
            "messages": f'[{{"content": "{record}"}}]',
            "template": f"<user> {record}\n",
            "ids": (np.array([*map(ord, record)], dtype), {"kind": "ids"}),
        }
        values += [(f"0/rendering/sample[{i}].{step}", made[step]) for step in steps]
    return build_trace(path, values, **run)


Compare = Callable[..., Verdict]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    def run(target: Sequence[str], baseline: Sequence[str] = RECORDS, **fields: Any) -> Verdict:
        pair = Path(tempfile.mkdtemp(dir=tmp_path))
        return bisect(rendered(pair / "a", baseline), rendered(pair / "b", target, **fields))

    return run


def first(verdict: Verdict) -> Divergence:
    assert verdict.outcome == "diverged"
    assert verdict.first is not None
    assert verdict.first.stage == "rendering"
    return verdict.first


def test_equal_samples_are_identical(compare: Compare) -> None:
    verdict = compare(RECORDS)
    assert (verdict.outcome, verdict.coverage) == ("identical", 1.0)
    assert verdict.reason == "all 120 events compared are bit-equal"
    assert verdict.last_agreeing == "0/rendering/sample[39].ids"
    stage = next(stage for stage in verdict.stages if stage.stage == "rendering")
    assert (stage.outcome, stage.compared, stage.differing) == ("identical", 120, 0)


def test_a_changed_record_is_a_changed_record(compare: Compare) -> None:
    changed = [*RECORDS[:17], RECORDS[17].replace("mg", "µg"), *RECORDS[18:]]
    verdict = compare(changed)
    found = first(verdict)
    assert (found.site, found.kind) == ("0/rendering/sample[17].messages", "text")
    assert found.detail["index"] == f'[{{"content": "{RECORDS[17]}'.index("mg")
    assert verdict.last_agreeing == "0/rendering/sample[16].ids"
    assert verdict.coverage == 1.0


def test_a_shuffled_order_is_named_with_its_first_sample(compare: Compare) -> None:
    shuffled = list(RECORDS)
    random.Random(3).shuffle(shuffled)
    found = first(compare(shuffled))
    displaced = next(i for i in range(40) if shuffled[i] != RECORDS[i])
    assert (found.kind, found.pattern) == ("order", "shuffled")
    assert found.detail["sample"] == displaced
    assert found.detail["other_sample"] == shuffled.index(RECORDS[displaced])


def test_a_changed_record_in_a_shuffled_order_is_still_told(compare: Compare) -> None:
    shuffled = list(RECORDS)
    random.Random(3).shuffle(shuffled)
    shuffled[5] = shuffled[5].replace("every", "each")
    verdict = compare(shuffled)
    assert first(verdict).kind == "order"
    stage = next(stage for stage in verdict.stages if stage.stage == "rendering")
    assert (stage.compared, stage.differing, stage.unmatched) == (120, 3, (0, 0))


@pytest.mark.parametrize("place", [0, 17, 39])
def test_a_dropped_record(compare: Compare, place: int) -> None:
    found = first(compare([*RECORDS[:place], *RECORDS[place + 1 :]]))
    assert (found.kind, found.pattern) == ("missing", "dropped")
    assert (found.path, found.detail["sample"]) == (f"sample[{place}].messages", place)
    assert found.detail["count"] == 1


def test_a_duplicated_record(compare: Compare) -> None:
    found = first(compare([*RECORDS[:9], RECORDS[8], *RECORDS[9:]]))
    assert (found.kind, found.pattern) == ("extra", "duplicated")
    assert {found.detail["sample"], found.detail["other_sample"]} == {8, 9}
    found = first(compare([*RECORDS, RECORDS[3]]))
    assert (found.pattern, found.detail["sample"], found.detail["other_sample"]) == (
        "duplicated",
        40,
        3,
    )


def test_an_inserted_record_and_records_that_were_the_same(compare: Compare) -> None:
    found = first(compare([*RECORDS[:9], "new", *RECORDS[9:]]))
    assert (found.kind, found.pattern, found.detail["sample"]) == ("extra", "inserted", 9)
    found = first(compare(RECORDS, [*RECORDS[:9], RECORDS[2], *RECORDS[9:]]))
    assert (found.kind, found.pattern, found.detail["sample"]) == ("missing", "dropped", 9)
    assert found.detail["other_sample"] == 2


def test_a_dropped_and_a_changed_record_side_by_side(compare: Compare) -> None:
    changed = RECORDS[18].replace("hours", "h")
    verdict = compare([*RECORDS[:17], changed, *RECORDS[19:]])
    found = first(verdict)
    assert (found.kind, found.detail["sample"]) == ("missing", 17)
    stage = next(stage for stage in verdict.stages if stage.stage == "rendering")
    assert (stage.compared, stage.unmatched) == (117, (3, 0))


def test_records_that_a_killed_run_did_not_reach_are_none_dropped(compare: Compare) -> None:
    assert compare(RECORDS[:20], status="recording").outcome == "equivalent"
    assert first(compare(RECORDS[1:20], status="recording")).detail["sample"] == 0


def test_a_changed_text_of_an_equal_record_is_found_at_its_own_step(tmp_path: Path) -> None:
    values = [("0/rendering/sample[0].messages", "m"), ("0/rendering/sample[0].template", "a\n")]
    a = build_trace(tmp_path / "a", values)
    b = build_trace(tmp_path / "b", [values[0], ("0/rendering/sample[0].template", "a")])
    found = first(bisect(a, b))
    assert (found.site, found.pattern) == ("0/rendering/sample[0].template", "newline")


def test_one_side_saw_fewer_steps(tmp_path: Path) -> None:
    whole = rendered(tmp_path / "a", RECORDS)
    part = rendered(tmp_path / "b", RECORDS, steps=("template", "ids"))
    verdict = bisect(whole, part)
    assert (verdict.outcome, verdict.coverage) == ("equivalent", 1.0)
    (group,) = verdict.unmatched
    assert (group.side, group.count) == ("baseline", 40)
    assert "rendering step seen on one side only" in group.reason


def test_ids_of_another_width_are_compared_by_value(tmp_path: Path) -> None:
    wide = rendered(tmp_path / "a", RECORDS)
    assert bisect(wide, rendered(tmp_path / "b", RECORDS, dtype=np.int32)).outcome != "diverged"
    changed = [*RECORDS[:30], RECORDS[30] + ".", *RECORDS[31:]]
    narrow = rendered(tmp_path / "c", changed, dtype=np.int32, steps=("ids",))
    found = first(bisect(rendered(tmp_path / "d", RECORDS, steps=("ids",)), narrow))
    assert (found.site, found.kind) == ("0/rendering/sample[30].ids", "shape")


def test_rules_rename_and_ignore_steps(tmp_path: Path) -> None:
    a = build_trace(tmp_path / "a", [("0/rendering/sample[0].prompt", "a"), ("0/loading/x:p", 1)])
    b = build_trace(tmp_path / "b", [("0/rendering/sample[0].template", "b"), ("0/loading/x:p", 1)])
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rename]]\nside = "baseline"\npattern = "prompt$"\nreplace = "template"\n')
    assert first(bisect(a, b, rules=rules)).site == "0/rendering/sample[0].prompt"
    rules.write_text(rules.read_text() + '[[ignore]]\npattern = "^sample"\n')
    assert bisect(a, b, rules=rules).outcome != "diverged"


def test_where_a_model_ran_the_order_of_rendering_is_a_warning_only(tmp_path: Path) -> None:
    def run(name: str, records: Sequence[str]) -> Path:
        values: list[tuple[str, Any]] = [
            (f"0/rendering/sample[{i}].text", text) for i, text in enumerate(records)
        ]
        return build_trace(tmp_path / name, [*values, ("0/forward/root#0:out", np.ones(3))])

    verdict = bisect(run("a", RECORDS), run("b", [*RECORDS[::-1], "extra"]))
    assert verdict.outcome in ("identical", "equivalent")
    assert [w for w in verdict.warnings if "another order" in w]
    assert [w for w in verdict.warnings if "1 sample that the baseline does not have" in w]


def test_a_harmless_difference_of_all_samples_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All messages are written otherwise with no effect; one sample's IDs differ as well."""
    monkeypatch.setattr("tracediff.bisection.samples.LIMIT", 6)

    def run(name: str, space: str, changed: int) -> Path:
        path = tmp_path / name
        with TraceWriter(path, Run(stack="pytorch")) as writer:
            for i in range(40):
                ids = np.array([i, i + (i == changed)])
                site = f"0/rendering/sample[{i}]"
                writer.add(build_event(f"{site}.messages", f"[{i},{space}0]", 2 * i), None)
                event = build_event(f"{site}.ids", ids, 2 * i + 1, kind="ids", inputs=(2 * i,))
                writer.add(event, ids)
        return path

    assert bisect(run("a", "", -1), run("b", " ", -1)).outcome == "equivalent"
    found = first(bisect(run("c", "", -1), run("d", " ", 33)))
    assert found.detail["sample"] == 33


def test_diff_lists_equal_samples_too(tmp_path: Path) -> None:
    rows = diff(rendered(tmp_path / "a", RECORDS[:2]), rendered(tmp_path / "b", RECORDS[:2]))
    assert sum(row.mark == "identical" and "sample[" in row.site for row in rows) == 6


def test_more_differences_than_are_listed_are_counted(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracediff.bisection.samples.LIMIT", 5)
    verdict = compare([record.upper() for record in RECORDS])
    assert first(verdict).path == "sample[0].messages"
    stage = next(stage for stage in verdict.stages if stage.stage == "rendering")
    assert (stage.compared, stage.differing) == (120, 120)
    verdict = compare(RECORDS[:10])
    stage = next(stage for stage in verdict.stages if stage.stage == "rendering")
    assert (stage.compared, stage.unmatched) == (30, (90, 0))


# ---- sequences --------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6)), st.lists(st.integers(0, 6)))
def test_a_match_takes_as_many_equal_elements_as_there_are(a: list[int], b: list[int]) -> None:
    partner = match(a, b)
    taken = [j for j in partner if j >= 0]
    assert len(set(taken)) == len(taken)
    assert all(a[i] == b[j] for i, j in enumerate(partner) if j >= 0)
    assert len(taken) == sum(min(a.count(x), b.count(x)) for x in set(a))


@given(st.permutations(range(9)))
def test_increasing_is_as_long_as_can_be(values: list[int]) -> None:
    found = increasing(values)
    chosen = [values[place] for place in found]
    assert found == sorted(found)
    assert chosen == sorted(chosen)
    longest = [1] * len(values)  # by the quadratic recurrence
    for i in range(len(values)):
        before = [longest[k] for k in range(i) if values[k] < values[i]]
        longest[i] = 1 + max(before, default=0)
    assert len(found) == max(longest)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(50, 400))
def test_one_edit_of_distinct_elements_is_found(seed: int, size: int) -> None:
    rng = random.Random(seed)
    a = list(range(size))
    place = rng.randrange(size)
    dropped = match(a, a[:place] + a[place + 1 :])
    assert [i for i, j in enumerate(dropped) if j < 0] == [place]
    again = match(a, [*a[:place], a[place], *a[place:]])
    assert set(range(size + 1)) - set(again) <= {place, place + 1}
