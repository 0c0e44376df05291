"""The real job: examples/clinical_lora on both stacks, clean and with one fault planted at a time.

Real weights, tokenizer and template; four of the thirty layers, so that a run takes seconds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tracediff.bisection import bisect
from tracediff.session import record_script
from tracediff.verdict import Verdict

pytest.importorskip("torch")
pytest.importorskip("mlx_lm")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "clinical_lora"
PATCHES = ROOT / "tests" / "faults"
MODEL = EXAMPLE / "build" / "model4"
MENDED = EXAMPLE / "build" / "model4-mended"
STEPS = 2

Record = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = [sys.executable, str(EXAMPLE / "prepare.py"), "--layers", "4", "--mend"]
    subprocess.run([*command, "--out", str(MODEL)], check=True, capture_output=True)
    return tmp_path_factory.mktemp("example")


@pytest.fixture(scope="module")
def record(folder: Path) -> Record:
    """Records a script of the example, once per name; patched in a copy if there is a patch."""
    made: dict[str, Path] = {}

    def run(
        name: str, script: str, model: Path, patch: str | None = None, steps: int = STEPS
    ) -> Path:
        if name not in made:
            source = EXAMPLE / script
            if patch is not None:
                source = patched(folder / name, patch)
            arguments = ["--model", str(model), "--steps", str(steps)]
            arguments += ["--out", str(folder / f"{name}.json")]
            arguments += ["--save", str(folder / f"{name}.safetensors")]
            made[name] = folder / f"{name}.zarr"
            record_script(str(source), arguments, output=made[name])
        return made[name]

    return run


def patched(folder: Path, patch: str) -> Path:
    """A copy of the example in which one fault is planted."""
    copy = folder / "examples" / "clinical_lora"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("build", "__pycache__"))
    subprocess.run(
        ["patch", "-p1", "-i", str(PATCHES / f"{patch}.patch")],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return copy / "train_mlx.py"


@pytest.fixture(scope="module")
def baseline(record: Record) -> Path:
    return record("pytorch", "train_pytorch.py", MODEL)


@pytest.fixture(scope="module")
def clean(record: Record) -> Path:
    return record("mlx", "train_mlx.py", MENDED)


PEFT = "base_model.model.model.layers"

FAULTS = {
    "newline": ("rendering", 0, "sample[0].text", "newline"),
    "transposed_weight": (
        "loading",
        0,
        f"{PEFT}.1.self_attn.q_proj.base_layer.weight",
        "transposed",
    ),
    "rms_eps": ("forward", 0, f"{PEFT}.2.input_layernorm", None),
    "label_shift": ("loss", 0, "loss", None),
    "lora_alpha": ("forward", 0, f"{PEFT}.0.self_attn.q_proj", None),
    "no_clip": ("optimizer", 0, f"{PEFT}.0.self_attn.q_proj.lora_A.default.weight", "scaled"),
    "no_bias_correction": (
        "optimizer",
        0,
        f"{PEFT}.0.self_attn.q_proj.lora_A.default.weight",
        "setting",
    ),
    "schedule_off_by_one": (
        "optimizer",
        1,
        f"{PEFT}.0.self_attn.q_proj.lora_A.default.weight",
        "setting",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_script_is_named_exactly(
    baseline: Path, record: Record, fault: str
) -> None:
    stage, step, path, pattern = FAULTS[fault]
    steps = STEPS if step else 1
    verdict = bisect(baseline, record(fault, "train_mlx.py", MENDED, patch=fault, steps=steps))
    assert verdict.exit_code == 1
    first = verdict.first
    assert first is not None
    assert (first.stage, first.step, first.path) == (stage, step, path)
    assert first.origin == "introduced"
    if pattern is not None:
        assert first.pattern == pattern


def stages(verdict: Verdict) -> dict[str, int]:
    return {stage.stage: stage.compared for stage in verdict.stages}


def test_the_mended_pair_is_equivalent_at_every_stage(baseline: Path, clean: Path) -> None:
    verdict = bisect(baseline, clean)
    assert (verdict.outcome, verdict.exit_code) == ("equivalent", 0)
    assert all(count > 0 for count in stages(verdict).values())
    assert verdict.coverage >= 0.95
    assert all(row.reason for row in verdict.unmatched)


def test_the_rotary_base_that_nobody_planted_is_found(baseline: Path, record: Record) -> None:
    verdict = bisect(baseline, record("unmended", "train_mlx.py", MODEL, steps=1))
    first = verdict.first
    assert first is not None
    assert first.site == f"0/forward/{PEFT}.0.self_attn.rope#0:out"
    assert first.detail["first_position"] == 1  # position 0 is equal
    assert ("config.rope_theta", 100000.0, 10000) in first.settings
    assert verdict.last_agreeing == f"0/forward/{PEFT}.0.self_attn.rope#0:in"


@pytest.mark.parametrize(
    ("script", "model"), [("train_pytorch.py", MODEL), ("train_mlx.py", MENDED)]
)
def test_recording_changes_nothing_and_twice_is_identical(
    record: Record, folder: Path, script: str, model: Path
) -> None:
    stack = script.removeprefix("train_").removesuffix(".py")
    first = record(stack, script, model)
    assert bisect(first, record(f"{stack} again", script, model)).outcome == "identical"
    plain = folder / f"{stack} plain"
    command = [sys.executable, str(EXAMPLE / script), "--model", str(model)]
    command += ["--steps", str(STEPS), "--out", f"{plain}.json", "--save", f"{plain}.safetensors"]
    subprocess.run(command, check=True, capture_output=True)
    recorded = folder / stack
    for suffix in (".json", ".safetensors"):
        assert Path(f"{plain}{suffix}").read_bytes() == Path(f"{recorded}{suffix}").read_bytes()
    assert json.loads(Path(f"{plain}.json").read_text())["steps"]
