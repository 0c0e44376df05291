"""Self-check: a clean script, one that is not deterministic, one that notices the recorder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tracediff.cli import main
from tracediff.errors import UsageError
from tracediff.selfcheck import AGAIN, RUNS, Job, SelfCheck, selfcheck

PYTORCH = """
import sys, torch
{before}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    out = model(torch.ones(5, 3) {noise})
    loss = out.pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
open(sys.argv[1], "a").write(repr([p.tolist() for p in model.parameters()]))
{after}
"""

MLX = """
import sys
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
{before}
mx.random.seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
optimizer = optim.SGD(0.1)
step = nn.value_and_grad(model, lambda x: model(x).square().mean())
for _ in range(2):
    loss, grads = step(mx.ones((16, 16)))
    optimizer.update(model, grads)
    mx.eval(model.parameters())
    print(loss.item())
mx.savez(sys.argv[1], **model.layers[0].parameters())
{after}
"""


def pytorch(before: str = "", noise: str = "", after: str = "sys.exit(0)") -> str:
    return PYTORCH.format(before=before, noise=noise, after=after)


def mlx(before: str = "", after: str = "") -> str:
    """The script for what no stack is special in: it starts within a fraction of PyTorch's time."""
    return MLX.format(before=before, after=after)


def check(folder: Path, script: str, name: str = "weights.npz", **extra: Any) -> SelfCheck:
    path = folder / "train.py"
    path.write_text(script, encoding="utf-8")
    output = folder / name
    job = Job(str(path), (str(output),), files=(output,), **extra)
    return selfcheck(job, keep=folder / "kept")


def marks(found: SelfCheck) -> list[str]:
    """Marks of exit status, standard output and the file."""
    return [output.mark for output in found.outputs]


@pytest.mark.slow
def test_a_deterministic_script_is_unchanged(tmp_path: Path) -> None:
    # The script appends to what it finds: each run must find what the first one found.
    (tmp_path / "weights.txt").write_text("before\n", encoding="utf-8")
    found = check(tmp_path, pytorch(), "weights.txt")
    assert (found.outcome, found.exit_code) == ("unchanged", 0), found.reason
    assert marks(found) == ["equal"] * 3
    assert found.verdict is not None
    assert found.verdict.outcome == "identical"
    assert found.verdict.stages[8].compared > 0
    assert (tmp_path / "weights.txt").read_text(encoding="utf-8").startswith("before\n[[")
    assert {trace.name for trace in (tmp_path / "kept").glob("*.zarr")} == {
        "recorded-1.zarr",
        "recorded-2.zarr",
    }


@pytest.mark.slow
def test_a_deterministic_mlx_script_is_unchanged(tmp_path: Path) -> None:
    found = check(tmp_path, mlx())
    assert (found.outcome, found.exit_code) == ("unchanged", 0), found.reason
    assert marks(found) == ["equal"] * 3


@pytest.mark.slow
def test_noise_is_found_at_its_first_site_with_its_size(tmp_path: Path) -> None:
    noise = "* (1 + 1e-3 * __import__('secrets').randbelow(1000) / 1000)"
    found = check(tmp_path, pytorch(noise=noise), "weights.txt")
    assert (found.outcome, found.exit_code) == ("nondeterministic", 1)
    assert found.wobble is not None
    assert found.wobble.site == "0/forward/root#0:in"
    assert 0 < found.wobble.error.rel_l2 < 2e-3
    assert marks(found) == ["equal", "varies", "varies"]
    assert found.wobble.site in found.reason


@pytest.mark.slow
def test_a_script_that_notices_the_recorder_is_told(tmp_path: Path) -> None:
    """The same test holds the unrecorded run to have nothing of tracediff in it."""
    found = check(tmp_path, mlx(before='print("tracediff" in sys.modules)'))
    assert (found.outcome, found.exit_code) == ("changed", 1)
    assert marks(found) == ["equal", "changed", "equal"]
    assert "standard output" in found.reason
    assert list(found.outputs[0].values) == [*RUNS, AGAIN]
    printed = (tmp_path / "kept" / "unrecorded" / "stdout.txt").read_text(encoding="utf-8")
    assert printed.startswith("False")


@pytest.mark.slow
def test_the_recorder_is_not_blamed_for_what_two_plain_runs_do_not_share(tmp_path: Path) -> None:
    when = 'print("tracediff" in sys.modules or __import__("secrets").token_hex())'
    found = check(tmp_path, mlx(before=when))
    assert (found.outcome, found.exit_code) == ("nondeterministic", 1)
    assert marks(found) == ["equal", "varies", "equal"]


@pytest.mark.slow
def test_the_exit_status_is_the_scripts_own(tmp_path: Path) -> None:
    found = check(tmp_path, mlx(after="sys.exit(7)"))
    assert found.outcome == "unchanged"
    assert set(found.outputs[0].values.values()) == {"7"}
    assert any("exit status 7" in warning for warning in found.warnings)


@pytest.mark.slow
def test_timings_on_stdout_can_be_left_out(tmp_path: Path) -> None:
    script = mlx(before="print(__import__('time').time_ns())")
    assert check(tmp_path, script, stdout=False).outcome == "unchanged"


@pytest.mark.slow
def test_what_was_not_written_is_not_called_equal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(mlx(), encoding="utf-8")
    gone = tmp_path / "metrics.json"
    arguments = ["selfcheck", "--compare", str(gone), "--json", "-", "--"]
    code = main([*arguments, str(script), str(tmp_path / "weights.npz")])
    found = json.loads(capfd.readouterr().out)
    assert (code, found["outcome"]) == (125, "incomparable")
    assert str(gone) in found["reason"]
    assert [row["mark"] for row in found["outputs"]] == ["equal", "equal", "absent"]
    assert found["deterministic"] is True


@pytest.mark.slow
def test_a_script_without_a_model_is_incomparable(tmp_path: Path) -> None:
    found = check(tmp_path, "import mlx.core\n")
    assert (found.outcome, found.exit_code) == ("incomparable", 125)


def test_usage_errors_come_before_any_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import mlx.core\nopen('ran', 'w')\n", encoding="utf-8")
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").touch()
    with pytest.raises(UsageError, match="is not a file"):
        selfcheck(Job(str(tmp_path / "none.py")))
    with pytest.raises(UsageError, match="holds something"):
        selfcheck(Job(str(script)), keep=full)
    with pytest.raises(UsageError, match="is a folder"):
        selfcheck(Job(str(script), files=(full,)))
    with pytest.raises(UsageError, match="--steps"):
        selfcheck(Job(str(script), recording={"steps": "x"}))
    assert main(["selfcheck", "--", str(tmp_path / "none.py")]) == 2
    assert not list((tmp_path).glob("ran"))
