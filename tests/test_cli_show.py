"""The commands that look into traces: diff, show, verify and stacks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.commands import HIDDEN, Cli, build, one_line
from tracediff.events import Run
from tracediff.trace import TraceWriter


def test_diff_lists_every_site(cli: Cli, baseline: Path, drifted: Path) -> None:
    code, out, _ = cli("diff", baseline, drifted)
    marks = {
        line.split()[2]: line.split()[1] for line in out.splitlines() if line[:1] in ("✓", "✗", "≈")
    }
    assert code == 1
    assert marks["0/forward/model.hidden#0:in"] == "identical"
    assert marks[HIDDEN] == marks["1/forward/model.hidden#0:out"] == "diverged"
    assert next(line for line in out.splitlines() if HIDDEN in line).split()[6] == "introduced"
    assert "7 sites compared, 2 diverged, 0 unmatched" in out


def test_diff_keeps_long_names_whole_in_a_pipe(cli: Cli, tmp_path: Path) -> None:
    name = ".".join(f"block_{i}" for i in range(40))
    paths = [build(tmp_path / f"{side}.zarr", name=name, steps=1) for side in "ab"]
    code, out, _ = cli("diff", *paths)
    assert code == 0
    assert f"0/forward/model.{name}#0:out" in out


def test_diff_of_one_stage_and_step(cli: Cli, baseline: Path, drifted: Path) -> None:
    code, out, _ = cli("diff", baseline, drifted, "--stage", "forward", "--step", 1, "--json", "-")
    assert code == 1
    assert [row["site"] for row in json.loads(out)["sites"]] == [
        "1/forward/model.hidden#0:in",
        "1/forward/model.hidden#0:out",
    ]
    assert cli("diff", baseline, drifted, "--stage", "rendering")[0] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stage", "forwards"], "--stage 'forwards' is unknown: use one of environment"),
        (["--stage", "forward", "--step", "9"], "stage forward at step 9"),
    ],
)
def test_diff_of_what_is_not_there(
    cli: Cli, baseline: Path, same: Path, options: list[str], said: str
) -> None:
    code, _, err = cli("diff", baseline, same, *options)
    assert code == 2
    assert said in one_line(err)


def test_show_tells_the_run_and_its_steps(cli: Cli, baseline: Path) -> None:
    code, out, _ = cli("show", baseline)
    assert code == 0
    assert "pytorch" in out
    assert "finished" in out
    found = json.loads(cli("show", baseline, "--json", "-")[1])
    assert found["run"]["argv"] == ["train.py"]
    assert found["steps"][1] == {"step": 1, "events": {"rendering": 1, "forward": 2}}


def test_a_strangers_manifest_does_not_act_on_the_terminal(cli: Cli, tmp_path: Path) -> None:
    run = Run(
        stack="py\x1b[2J", argv=("train.py", "[red]\x1b]0;x\x07"), versions={"a\u202e": "\r1"}
    )
    with TraceWriter(tmp_path / "t.zarr", run) as writer:
        writer.add_note("\x1b[31mred")
    code, out, _ = cli("show", tmp_path / "t.zarr")
    assert code == 0
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(out)
    assert "[red]" in out


def test_show_of_a_site_has_its_values_and_where_they_came_from(cli: Cli, baseline: Path) -> None:
    (event,) = json.loads(cli("show", baseline, HIDDEN, "--json", "-")[1])["events"]
    inputs = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
    np.testing.assert_array_equal(np.float32(event["values"]), 2 * inputs)
    assert event["fingerprint"]["l2"] == pytest.approx(np.linalg.norm(2 * inputs))
    assert event["inputs"] == ["0/forward/model.hidden#0:in"]
    assert (event["op"], event["source"]) == ("Linear", "train.py:7")
    assert "train.py:7" in cli("show", baseline, HIDDEN)[1]


def test_show_of_a_part_of_a_site_lists_all_of_them(cli: Cli, baseline: Path) -> None:
    code, out, _ = cli("show", baseline, "hidden#0:out")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == [
        HIDDEN,
        "1/forward/model.hidden#0:out",
    ]


def test_show_says_where_no_values_were_kept(cli: Cli, tmp_path: Path) -> None:
    path = build(tmp_path / "digests.zarr", level="digest")
    assert "no values were kept" in cli("show", path, HIDDEN)[1]


def test_show_of_no_site_names_the_closest(cli: Cli, baseline: Path) -> None:
    code, _, err = cli("show", baseline, "0/forward/model.hiden#0:out")
    assert code == 2
    assert f"the closest is '{HIDDEN}'" in one_line(err)


def test_verify(cli: Cli, baseline: Path) -> None:
    code, out, _ = cli("verify", baseline)
    assert code == 0
    assert out.startswith("✓ SOUND")
    segment = baseline / "segments" / "0" / "00000001.zip"
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 0xFF
    segment.write_bytes(content)
    code, out, _ = cli("verify", baseline)
    assert code == 1
    assert out.startswith("✗ DAMAGED")
    assert "00000001.zip" in out
    found = json.loads(cli("verify", baseline, "--json", "-")[1])
    assert (found["sound"], found["steps"]) == (False, 2)


def test_stacks_lists_what_can_be_recorded(cli: Cli) -> None:
    code, out, _ = cli("stacks")
    assert code == 0
    assert {"pytorch", "mlx"} <= {line.split()[0] for line in out.splitlines()}
    names = {stack["name"] for stack in json.loads(cli("stacks", "--json", "-")[1])}
    assert {"pytorch", "mlx"} <= names
