"""The command line: exit codes, where output goes, and one line for every error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracediff import bisection, session
from tracediff.cli import main
from tracediff.cli.output import write
from tracediff.errors import RulesError, ScriptError
from tracediff.events import Run
from tracediff.recording import Policy, Tape
from tracediff.trace import TraceWriter
from tracediff.verdict import Verdict

HIDDEN = "0/forward/model.hidden#0:out"


def build(
    path: Path, *, scale: float = 1.0, steps: int = 2, level: str = "module", name: str = "hidden"
) -> Path:
    """A trace of a model with one layer, whose output is `scale` times what it should be."""
    run = Run(stack="pytorch", argv=("train.py",), level=level, versions={"torch": "0"})
    random = np.random.default_rng(0)
    with TraceWriter(path, run) as writer:
        tape = Tape(writer, Policy(level=level))
        tape.emit_settings({"python.version": "3.11"})
        for _ in range(steps):
            tape.start_step()
            tape.emit_batch("input_ids", np.arange(12).reshape(2, 6), 0)
            values = random.standard_normal((2, 6, 8)).astype(np.float32)
            layer = tape.enter(f"model.{name}", "Linear", source="train.py:7")
            tape.emit_in(layer, "in", values)
            tape.emit_out(layer, "out", 2 * values * np.float32(scale))
            tape.exit(layer)
            tape.advance()
    return path


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return build(tmp_path / "baseline.zarr")


@pytest.fixture
def same(tmp_path: Path) -> Path:
    return build(tmp_path / "same.zarr")


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    return build(tmp_path / "drifted.zarr", scale=1.5)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process and returns its exit code, stdout and stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return (code, *capfd.readouterr())

    return run


Cli = Callable[..., tuple[int, str, str]]


def one_line(text: str) -> str:
    """The only line of stderr, which names the program."""
    (line,) = text.splitlines()
    assert line.startswith("tracediff: ")
    return line


def answers(monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
    monkeypatch.setattr(bisection, "bisect", lambda *_, **__: verdict)


# ---- bisect ------------------------------------------------------------------------------------


def test_two_equal_recordings_agree(cli: Cli, baseline: Path, same: Path) -> None:
    code, out, err = cli("bisect", baseline, same)
    assert (code, err) == (0, "")
    assert out.startswith("✓ IDENTICAL")


def test_a_scaled_output_is_named(cli: Cli, baseline: Path, drifted: Path) -> None:
    code, out, err = cli("bisect", baseline, drifted)
    assert (code, err) == (1, "")
    assert out.startswith("✗ DIVERGED")
    assert HIDDEN in out


def test_json_on_stdout_is_all_there_is_on_stdout(cli: Cli, baseline: Path, drifted: Path) -> None:
    code, out, _ = cli("bisect", baseline, drifted, "--json", "-")
    found = json.loads(out)
    assert code == 1
    assert found["outcome"] == "diverged"
    assert found["first"]["site"] == HIDDEN
    assert found["first"]["detail"]["factor"] == pytest.approx(1.5)


def test_files_are_written_beside_the_report(
    cli: Cli, baseline: Path, drifted: Path, tmp_path: Path
) -> None:
    (tmp_path / "v.json").write_text("old")
    code, out, _ = cli(
        "bisect", baseline, drifted, "--json", tmp_path / "v.json", "--html", tmp_path / "v.html"
    )
    assert code == 1
    assert out.startswith("✗ DIVERGED")
    assert json.loads((tmp_path / "v.json").read_text())["first"]["site"] == HIDDEN
    assert HIDDEN in (tmp_path / "v.html").read_text()
    assert sorted(path.name for path in tmp_path.glob("*v.*")) == ["v.html", "v.json"]


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("identical", 0), ("equivalent", 0), ("diverged", 1), ("incomparable", 125)],
)
def test_exit_codes(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, outcome: str, code: int, tmp_path: Path
) -> None:
    answers(monkeypatch, Verdict(outcome=outcome, reason="", baseline="a", target="b"))
    assert cli("bisect", "a", "b")[0] == code
    assert cli("bisect", "a", "b", "--json", tmp_path / "v.json")[0] == code


def test_warnings_reach_stderr_where_stdout_is_json(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned = Verdict(
        outcome="identical", reason="", baseline="a", target="b", warnings=("cut\x1b off",)
    )
    answers(monkeypatch, warned)
    code, out, err = cli("bisect", "a", "b", "--json", "-")
    assert json.loads(out)["warnings"] == ["cut\x1b off"]
    assert (code, one_line(err)) == (0, "tracediff: warning: cut␛ off")


def test_options_reach_the_bisection(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def bisect(*paths: Path, **options: Any) -> Verdict:
        seen.update(options, paths=paths)
        return Verdict(outcome="identical", reason="", baseline="a", target="b")

    monkeypatch.setattr(bisection, "bisect", bisect)
    options = ["--map", "r.toml", "--min-coverage", "0.5", "--rtol", "a*=1", "--rtol", "b=2"]
    assert cli("bisect", "a", "b", *options, "--atol", "c=3")[0] == 0
    assert seen["paths"] == (Path("a"), Path("b"))
    assert seen["rules"] == Path("r.toml")
    assert seen["min_coverage"] == 0.5
    assert list(seen["rtol"]) == ["a*=1", "b=2"]
    assert list(seen["atol"]) == ["c=3"]


def test_two_paths_alone_are_compared_as_by_default(
    cli: Cli, baseline: Path, drifted: Path
) -> None:
    assert cli("bisect", baseline, drifted) == cli(
        "bisect", baseline, drifted, "--min-coverage", "0.9"
    )
    assert cli("diff", baseline, drifted) == cli("diff", baseline, drifted, "--rank", "0")
    assert cli("bisect", baseline, "--help")[0] == 0


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bisect", "a.zarr"], "Missing argument 'B'"),
        (["bisect", "missing.zarr", "missing.zarr"], "missing.zarr"),
        (["bisect", "a", "b", "--min-coverage", "2"], "--min-coverage"),
        (["bisect", "a", "b", "--min-coverage", "nan"], "--min-coverage"),
        (["bisect", "a", "b", "--json", "nowhere/v.json"], "there is no folder nowhere"),
        (["bisect", "a", "b", "--json", "."], "is a folder"),
        (["bisect", "a", "b", "--json", "-", "--html", "-"], "only one can go to stdout"),
        (["bisect", "a", "b", "--rtol", "x"], "PATTERN=VALUE"),
        (["bisect", "a", "b", "--map", "missing.toml"], "missing.toml"),
        (["diff", "a", "b", "--step", "-1"], "--step"),
        (["show", "missing.zarr"], "missing.zarr"),
        (["verify", "."], "no trace"),
        (["bogus"], "No such command 'bogus'"),
        (["record", "x.py"], "Missing option '--output'"),
        (["record", "-o", "t.zarr", "missing.py"], "missing.py"),
        (["stacks", "--bogus"], "No such option"),
    ],
)
def test_wrong_input_is_one_sentence(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert said in one_line(err)


@pytest.mark.parametrize(
    "error", [RulesError("rule 3\n\tis \x1b[31mwrong"), OSError(28, "No space left", "v.json")]
)
def test_errors_from_below_are_one_inert_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def bisect(*_: Any, **__: Any) -> Verdict:
        raise error

    monkeypatch.setattr(bisection, "bisect", bisect)
    code, _, err = cli("bisect", "a", "b")
    assert code == 2
    assert "\x1b" not in one_line(err)


def test_a_defect_of_ours_is_not_told_as_a_divergence(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bisection, "bisect", lambda *_, **__: 1 / 0)
    code, _, err = cli("bisect", "a", "b")
    assert code == 2
    assert "ZeroDivisionError" in err
    assert err.splitlines()[-1].startswith("tracediff: internal error")


def test_nothing_at_all_prints_the_help(cli: Cli) -> None:
    code, out, err = cli()
    assert (code, err) == (2, "")
    assert "bisect" in out


@pytest.mark.parametrize(
    "command", ["record", "bisect", "diff", "show", "verify", "stacks", "demo"]
)
def test_every_command_has_help(cli: Cli, command: str) -> None:
    code, out, err = cli(command, "--help")
    assert (code, err) == (0, "")
    assert f"tracediff {command}" in out


def test_version(cli: Cli) -> None:
    code, out, _ = cli("--version")
    assert code == 0
    assert re.fullmatch(r"tracediff \S+ \((native|numpy) kernels\)\n", out)


# ---- diff, show, verify, stacks ----------------------------------------------------------------


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


# ---- record ------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_everything_after_the_script_is_the_scripts(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, separator: list[str], tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    def record_script(script: str, args: list[str], **options: Any) -> Run:
        seen.update(options, script=script, args=args)
        return Run(stack="mlx", notes=("mx.compile ran eagerly",))

    monkeypatch.setattr(session, "record_script", record_script)
    code, out, err = cli(
        *("record", "-o", "t.zarr", "--steps", "0:3", "--level", "op", "--overwrite"),
        *("--only", "model.layers.3"),
        *separator,
        *("train.py", "--level", "3", "--", "-o", "x"),
    )
    assert (code, out) == (0, "")
    assert seen["args"] == ["--level", "3", "--", "-o", "x"]
    assert (seen["script"], seen["output"]) == ("train.py", Path("t.zarr"))
    assert (seen["level"], seen["steps"], seen["overwrite"]) == ("op", "0:3", True)
    assert seen["only"] == "model.layers.3"
    assert seen["stack"] is None
    assert "mx.compile ran eagerly" in err


def test_a_script_that_raises_ends_with_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def record_script(*_: Any, **__: Any) -> Run:
        raise ScriptError("train.py raised ValueError: no data (train.py:3)")

    monkeypatch.setattr(session, "record_script", record_script)
    code, _, err = cli("record", "-o", "t.zarr", "train.py")
    assert code == 2
    assert one_line(err).endswith("ValueError: no data (train.py:3)")


# ---- output ------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_completed_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "v.json"
    path.write_text("old")

    def full(self: Path, text: str, **_: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "text"


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def tracediff(*arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
    program = "import sys; from tracediff.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


@pytest.mark.parametrize("options", [[], ["--json", "-"]])
def test_a_reader_that_leaves_is_no_error_and_no_divergence(
    baseline: Path, drifted: Path, options: list[str]
) -> None:
    with tracediff("bisect", baseline, drifted, *options) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_terminal_without_our_characters_gets_others(baseline: Path, drifted: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
    with tracediff("bisect", baseline, drifted, env=environment) as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (1, b"")
    assert out.startswith(b"X DIVERGED")


def test_no_colour_where_it_is_not_wanted(baseline: Path, drifted: Path) -> None:
    environment = os.environ | {"NO_COLOR": "1", "FORCE_COLOR": ""}
    with tracediff("bisect", baseline, drifted, env=environment) as process:
        out, _ = process.communicate()
    assert b"\x1b" not in out
