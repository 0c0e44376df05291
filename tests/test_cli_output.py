"""Where output goes: files replaced as a whole, pipes that close, terminals of all kinds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tracediff.cli.output import write


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
