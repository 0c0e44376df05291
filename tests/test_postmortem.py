"""The whole post-mortem of long runs: which step, that step again in full on both sides, and which
operation."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests import long_jobs
from tests.test_long_runs import replayed
from tracediff import postmortem
from tracediff.cli import main
from tracediff.errors import UsageError
from tracediff.postmortem import split_scripts
from tracediff.trace import Trace


def test_scripts_are_split_at_the_dashes() -> None:
    assert split_scripts(["a.py", "1", "--", "b.py"]) == (["a.py", "1"], ["b.py"])
    assert split_scripts(["a.py", "-x"]) == (["a.py", "-x"], ["a.py", "-x"])
    for wrong in ([], ["a.py", "--"], ["a.py", "--", "b.py", "--", "c.py"]):
        with pytest.raises(UsageError, match="--replay needs the scripts"):
            split_scripts(wrong)


def test_scripts_without_replay_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", str(tmp_path), str(tmp_path), "x.py"]) == 2
    assert "x.py: scripts are given with --replay only" in capsys.readouterr().err


STACKS: Final = ("pytorch", "mlx")

EXTRA: Final = {
    "pytorch": ("torch.cpu", "aten.rand.default", "torch.rand(1)"),
    "mlx": ("mlx", "mlx.random.uniform", "mx.random.uniform()"),
}
"""The generator, and the operation and line that draw from it once too often."""

FLIPPED: Final = {
    "pytorch": ("lora_dropout.default@bernoulli#0:out", "aten.bernoulli_.float", "dropout(x, *o"),
    "mlx": ("q_proj.dropout@bernoulli#0:out", "mlx.random.bernoulli", "bernoulli(*options)"),
}
"""The site and operation that draw otherwise, and the line that makes them."""


def replayed_here(
    trace: Path, step: int, script: Sequence[str], options: Sequence[str], output: Path
) -> str:
    """As `postmortem.replay`, in this process."""
    gc.collect()  # an optimizer of an earlier run would count as existing
    command = ["replay", str(trace), "--step", str(step), *options, "-o", str(output)]
    assert main([*command, "--overwrite", "--", *script]) == 0
    return f"bit-exact replay of step {step}"


def post_mortem(folder: Path, script: str, steps: int, fault: str, every: int) -> dict[str, Any]:
    """Records a script without and with a fault, and bisects with replays."""
    paths = folder / "a.zarr", folder / f"{fault}.zarr"
    arguments = [str(steps)], [str(steps), fault]
    for path, own in zip(paths, arguments, strict=True):
        if not path.exists():
            long_jobs.record(script, path, *own, snapshot_every=every)
    out = folder / f"{fault}.json"
    command = ["bisect", *map(str, paths), "--replay", "--keep", str(folder / fault)]
    scripts = ["--", script, *arguments[0], "--", script, *arguments[1]]
    assert main([*command, "--json", str(out), *scripts]) == 1
    verdict: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert sum("bit-exact replay of step" in text for text in verdict["warnings"]) == 2
    return verdict


def line(script: str, text: str) -> str:
    """The last line of a script that holds a text, as a report has it."""
    lines = Path(script).read_text(encoding="utf-8").splitlines()
    number = max(i for i, found in enumerate(lines, 1) if text in found)
    return f"{Path(script).name}:{number}"


def check_extra(verdict: dict[str, Any], name: str, script: str, step: int) -> None:
    path, op, text = EXTRA[name]
    first = verdict["first"]
    assert first["site"] == f"{step}/rng/{path}:state"
    assert first["op"] == {"target": op}
    assert first["where"]["target"] == line(script, text)
    assert verdict["reason"].endswith(
        f"the generators part between the update of step {step - 1} and the first call of step "
        f"{step}, in the script: 1 extra draw from {path} in the target (0 against 1), by {op} "
        f"({line(script, text)})"
    )
    # The first value that it reaches is the output of the first dropout.
    dropout = next(d for d in verdict["also"] if d["stage"] == "forward")
    assert "dropout" in dropout["path"]


def check_flipped(verdict: dict[str, Any], name: str, script: str, step: int) -> None:
    site, op, text = FLIPPED[name]
    first = verdict["first"]
    assert first["site"].startswith(f"{step}/forward/")
    assert first["site"].endswith(site)
    assert first["op"] == {"baseline": op, "target": op}
    assert first["where"]["target"] == line(script, text)
    assert "the generators were in the same state before the step" in verdict["reason"]


@pytest.mark.parametrize("name", STACKS)
def test_the_operation_that_draws_once_too_often_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """At the step of a snapshot, before which nothing is computed."""
    monkeypatch.setattr(postmortem, "replay", replayed_here)
    script = long_jobs.write(tmp_path, name)
    check_extra(post_mortem(tmp_path, script, 4, "draw=3", 3), name, script, 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STACKS)
def test_one_draw_in_a_run_of_200_steps(tmp_path: Path, name: str) -> None:
    """LoRA with dropout and shuffling: replayed bit for bit, and one draw that comes out otherwise
    is found and named to the operation."""
    script = long_jobs.write(tmp_path, name)
    check_flipped(post_mortem(tmp_path, script, 200, "flip=137", 50), name, script, 137)
    with Trace(tmp_path / "flip=137" / "target.zarr") as trace:
        assert trace.steps[0] == 100
        assert all(e.payload for e in trace.events(137) if e.kind == "tensor")
    done = replayed(script, tmp_path / "a.zarr", 199, "200")
    assert (done.exact, done.start) == (True, 150)
