"""The command line: exit codes, where output goes, and one line for every error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import HIDDEN, Cli, one_line
from tracediff import bisection, session
from tracediff.errors import RulesError, ScriptError
from tracediff.events import Run
from tracediff.verdict import Verdict


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
