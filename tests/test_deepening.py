"""From two scripts to the operation: `bisect --deepen`, and the commands that `bisect` prints.

One small model, written for both stacks with the same weights; the second argument of a script
plants one fault in one operation.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from tracediff import deepening
from tracediff.cli import main
from tracediff.deepening import Script
from tracediff.errors import ScriptError

WEIGHTS = """
import sys
import numpy as np
fault = sys.argv[1] if len(sys.argv) > 1 else ""
generator = np.random.default_rng(0)
def normal(*shape):
    return array((generator.standard_normal(shape) * 0.3).astype(np.float32))
"""

SCRIPTS = {
    "pytorch.py": """
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, silu
array = torch.tensor
"""
    + WEIGHTS
    + """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + normal(16))
    def forward(self, x):
        square = x.pow(2).mean(-1, keepdim=True)
        inverse = torch.rsqrt(square + (1e-2 if fault == "eps" else 1e-5))  # eps
        return self.weight * (x * inverse)

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.up.weight.data, self.down.weight.data = normal(32, 16), normal(16, 32)
    def forward(self, x):
        up = self.up(x)
        if fault == "gelu":
            return self.down(gelu(up))  # gelu
        h = silu(up)  # silu
        return self.down(h)  # down

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.mlp = nn.Embedding(20, 16), Norm(), MLP()
        self.embed.weight.data = normal(20, 16)
    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.mlp(self.norm(x))
        return x @ self.embed.weight.T

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.arange(12).reshape(2, 6)
logits = model(ids)[:, :-1].reshape(-1, 20)
cross_entropy(logits, ids[:, 1:].reshape(-1)).backward()
optimizer.step()
""",
    "mlx.py": """
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
array = mx.array
"""
    + WEIGHTS
    + """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = 1 + normal(16)
    def __call__(self, x):
        return mx.fast.rms_norm(x, self.weight, 1e-2 if fault == "eps" else 1e-5)  # eps

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.up.weight, self.down.weight = normal(32, 16), normal(16, 32)
    def __call__(self, x):
        h = nn.silu(self.up(x))
        if fault == "scaled":
            h = h * 1.01  # scaled
        return self.down(h)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.mlp = nn.Embedding(20, 16), Norm(), MLP()
        self.embed.weight = normal(20, 16)
    def __call__(self, ids):
        x = self.embed(ids)
        x = x + self.mlp(self.norm(x))
        return x @ self.embed.weight.T

def loss(model, ids):
    return nn.losses.cross_entropy(model(ids)[:, :-1], ids[:, 1:], reduction="mean")

def run(model):  # in globals, MLX would keep the optimizer alive beyond the script
    optimizer, ids = optim.SGD(0.1), mx.arange(12).reshape(2, 6)
    gradient = nn.value_and_grad(model, loss)
    optimizer.update(model, gradient(model, ids)[1])
    mx.eval(model.parameters(), optimizer.state)

run(Model())
""",
}


def line(script: str, marker: str) -> str:
    """The source line that ends in a comment, as a report has it."""
    lines = SCRIPTS[script].splitlines()
    found = [i for i, text in enumerate(lines, 1) if text.endswith(f"# {marker}")]
    assert len(found) == 1
    return f"{script}:{found[0]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Script, list[str]]]:
    """What `--deepen` records, in this process; what was recorded before is copied."""
    asked: list[tuple[Script, list[str]]] = []

    def record(script: Script, trace: Path, options: Sequence[str]) -> None:
        asked.append((script, list(options)))
        kept = folder / "-".join((Path(script.path).stem, *script.args, *options))
        if not kept.exists():
            gc.collect()  # an optimizer of an earlier run would count as existing
            command = ["record", "-o", str(kept), *options, "--", script.path, *script.args]
            assert main(command) == 0
        copytree(kept, trace)

    monkeypatch.setattr(deepening, "record", record)
    monkeypatch.chdir(folder)
    return asked


def deepened(capsys: pytest.CaptureFixture[str], *scripts: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["bisect", "--json", "-", "--deepen", "--", *scripts])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("target", ["pytorch.py", "mlx.py"])
def test_clean_scripts_are_recorded_once(
    recorded: list[tuple[Script, list[str]]], capsys: pytest.CaptureFixture[str], target: str
) -> None:
    code, verdict = deepened(capsys, "pytorch.py", "--", target)
    assert (code, verdict["first"]) == (0, None)
    assert [options for _, options in recorded] == [[], []]


@pytest.mark.parametrize(
    ("scripts", "ops", "canonical", "lines", "only"),
    [
        pytest.param(
            ("pytorch.py", "pytorch.py", "gelu"),
            {"baseline": "aten.silu.default", "target": "aten.gelu.default"},
            ("mlp@silu", "mlp@gelu"),
            (line("pytorch.py", "silu"), line("pytorch.py", "gelu")),
            "mlp",
            id="another activation",
        ),
        pytest.param(
            ("pytorch.py", "pytorch.py", "eps"),
            {"baseline": "aten.add.Tensor", "target": "aten.add.Tensor"},
            ("norm@add", "norm@add"),
            (line("pytorch.py", "eps"), line("pytorch.py", "eps")),
            "norm",
            id="another constant",
        ),
        pytest.param(
            ("pytorch.py", "mlx.py", "eps"),
            {"baseline": "aten.mul.Tensor", "target": "mlx.fast.rms_norm"},
            ("norm@mul", "norm@rms_norm"),
            ("pytorch.py", line("mlx.py", "eps")),
            "norm",
            id="a constant of a fused operation",
        ),
        pytest.param(
            ("pytorch.py", "mlx.py", "scaled"),
            {"target": "mlx.multiply"},
            ("mlp@silu", "mlp@mul"),
            (line("pytorch.py", "down"), line("mlx.py", "scaled")),
            "mlp",
            id="one operation more",
        ),
    ],
)
def test_the_operation_is_named(
    recorded: list[tuple[Script, list[str]]],
    capsys: pytest.CaptureFixture[str],
    scripts: tuple[str, str, str],
    ops: dict[str, str],
    canonical: tuple[str, str],
    lines: tuple[str, str],
    only: str,
) -> None:
    baseline, target, fault = scripts
    code, verdict = deepened(capsys, baseline, "--", target, fault)
    first = verdict["first"]
    assert code == 1
    assert first["op"] == ops
    sites = first["site"], first["target_site"]
    assert tuple(site.split("/")[2].split("#")[0] for site in sites) == canonical
    assert first["where"]["baseline"].startswith(lines[0])
    assert first["where"]["target"] == lines[1]
    extra = ["--level", "op", "--steps", "0", "--only", only]
    assert [options for _, options in recorded] == [[], [], extra, extra]
    for side, op in ops.items():
        assert f"{op} ({first['where'][side]})" in verdict["reason"]


def test_a_constant_that_differs_is_told(
    recorded: list[tuple[Script, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, verdict = deepened(capsys, "pytorch.py", "--", "pytorch.py", "eps")
    assert verdict["first"]["settings"] == [
        {"name": "add operand 2", "baseline": 1e-5, "target": 1e-2}
    ]


def test_a_script_that_fails_is_told(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("print('no model')\n", encoding="utf-8")
    with pytest.raises(ScriptError, match=r"broken.py imports no framework that is known"):
        deepening.record(Script(str(script)), tmp_path / "trace", ())


@pytest.mark.slow
def test_the_command_that_bisect_prints_names_the_operation(
    recorded: list[tuple[Script, list[str]]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, args in (("pytorch.py", ()), ("mlx.py", ("scaled",))):
        deepening.record(Script(name, args), folder / f"{name}.zarr", ())
    capsys.readouterr()
    assert main(["bisect", "--json", "-", "pytorch.py.zarr", "mlx.py.zarr"]) == 1
    command = json.loads(capsys.readouterr().out)["next_command"]
    bin_folder = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    told = " ".join(done.stdout.split())
    assert f"the result of mlx.multiply ({line('mlx.py', 'scaled')})" in told
