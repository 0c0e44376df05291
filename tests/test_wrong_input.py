"""Wrong input to the real commands: one clear sentence, exit code 2, and nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracediff.cli import main
from tracediff.testing import build_trace
from tracediff.trace import Trace, verify

torch = pytest.importorskip("torch")

TRAINS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 1:
        {end}
"""


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must fail, and returns its sentence."""
    assert main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("tracediff: ")
    assert "Traceback" not in lines[0]
    return lines[0]


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def test_paths_that_are_no_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(build_trace(tmp_path / "good.zarr", [("0/loss/loss:out", 1.0)]))
    assert "missing.zarr" in refused(capsys, "bisect", good, str(tmp_path / "missing.zarr"))
    assert "no trace" in refused(capsys, "bisect", good, str(tmp_path))


def test_a_newer_format_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = build_trace(tmp_path / "new.zarr", [("0/loss/loss:out", 1.0)])
    manifest = json.loads((path / "zarr.json").read_text())
    manifest["attributes"]["tracediff"]["format"] = 2
    (path / "zarr.json").write_text(json.dumps(manifest))
    sentence = refused(capsys, "verify", str(path))
    assert "2" in sentence
    assert "1" in sentence


def test_half_a_segment_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = build_trace(tmp_path / "half.zarr", [("0/loss/loss:out", 1.0)])
    (segment,) = path.glob("segments/0/*.zip")
    segment.write_bytes(segment.read_bytes()[: segment.stat().st_size // 2])
    other = str(build_trace(tmp_path / "other.zarr", [("0/loss/loss:out", 1.0)]))
    assert "00000000.zip" in refused(capsys, "bisect", str(path), other)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("raise ValueError('no more data')", "ValueError: no more data (train.py:9)"),
        ("raise SystemExit(3)", "exited with 3"),
        ("import os; os.listdir('/nothing here')", "FileNotFoundError"),
    ],
)
def test_what_a_script_did_before_it_failed_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, said: str
) -> None:
    output = tmp_path / "run.zarr"
    path = script(tmp_path, TRAINS.format(end=end))
    assert said in refused(capsys, "record", "-o", str(output), "--", path)
    assert verify(output).sound
    with Trace(output) as trace:
        assert trace.run.status == "failed"
        assert trace.steps == [0, 1]
        assert trace.find("1/optimizer/weight:param").shape == (1, 2)


def test_a_script_that_never_runs_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, "import torch\ntorch.ones(2).sum()\n")
    sentence = refused(capsys, "record", "-o", str(tmp_path / "run.zarr"), "--", path)
    assert "without rendering a sample or calling a pytorch model" in sentence


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stack", "jax"], "jax"),
        (["--level", "everything"], "everything"),
        (["--steps", "3:1"], "3:1"),
        (["--steps", "-1"], "-1"),
        (["--sketch-every", "0"], "0"),
    ],
)
def test_options_out_of_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    path = script(tmp_path, TRAINS.format(end="break"))
    output = tmp_path / "run.zarr"
    assert said in refused(capsys, "record", "-o", str(output), *options, "--", path)
    assert not output.exists()


def test_scripts_that_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "run.zarr")
    assert "gone.py" in refused(capsys, "record", "-o", output, "--", str(tmp_path / "gone.py"))
    path = script(tmp_path, "def broken(:\n")
    assert "train.py" in refused(capsys, "record", "-o", output, "--", path)
    path = script(tmp_path, "import json\n")
    assert "--stack" in refused(capsys, "record", "-o", output, "--", path)


def test_a_recording_never_replaces_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, TRAINS.format(end="break"))
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "one.jpg").write_bytes(b"1")
    for options in ([], ["--overwrite"]):
        refused(capsys, "record", "-o", str(folder), *options, "--", path)
        assert (folder / "one.jpg").read_bytes() == b"1"


def test_min_coverage_is_a_fraction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(build_trace(tmp_path / "a.zarr", [("0/loss/loss:out", 1.0)]))
    assert "--min-coverage" in refused(capsys, "bisect", trace, trace, "--min-coverage", "1.5")
