"""The whole post-mortem of long runs: which step, then that step again in full, on both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import long_jobs
from tests.test_long_runs import replayed
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["pytorch", "mlx"])
def test_one_draw_too_many_in_a_run_of_200_steps(tmp_path: Path, name: str) -> None:
    """LoRA with dropout and shuffling: replayed bit for bit, and one extra draw found and named."""
    script = long_jobs.write(tmp_path, name)
    a, b = tmp_path / "a.zarr", tmp_path / "b.zarr"
    long_jobs.record(script, a, "200", snapshot_every=50)
    long_jobs.record(script, b, "200", "draw=137", snapshot_every=50)
    done = replayed(script, a, 199, "200")
    assert (done.exact, done.start) == (True, 150)
    out = tmp_path / "verdict.json"
    keep = tmp_path / "replays"
    scripts = ["--", script, "200", "--", script, "200", "draw=137"]
    command = ["bisect", str(a), str(b), "--replay", "--keep", str(keep), "--json", str(out)]
    assert main([*command, *scripts]) == 1
    verdict = json.loads(out.read_text(encoding="utf-8"))
    path = {"pytorch": "torch.cpu", "mlx": "mlx"}[name]
    assert verdict["first"]["site"] == f"137/rng/{path}:state"
    assert "in the script: 1 extra draw" in verdict["reason"]
    assert sum("bit-exact replay of step 137" in text for text in verdict["warnings"]) == 2
    # The first value that it reaches is the output of the first dropout.
    dropout = next(d for d in verdict["also"] if d["stage"] == "forward")
    assert "dropout" in dropout["path"]
    with Trace(keep / "target.zarr") as trace:
        assert trace.steps[0] == 100
        assert all(e.payload for e in trace.events(137) if e.kind == "tensor")
