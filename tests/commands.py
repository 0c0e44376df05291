"""Running commands in this process, on traces of one layer; shared by the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tracediff.cli import main
from tracediff.events import Run
from tracediff.recording import Policy, Tape
from tracediff.trace import TraceWriter

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


Cli = Callable[..., tuple[int, str, str]]


def runner(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command in this process and returns its exit code, stdout and stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return (code, *capfd.readouterr())

    return run


def one_line(text: str) -> str:
    """The only line of stderr, which names the program."""
    (line,) = text.splitlines()
    assert line.startswith("tracediff: ")
    return line
