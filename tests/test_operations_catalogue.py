"""Arithmetic faults of the catalogue (section c), each named at its operation, and clean twins.

Both sides are recorded as they run: PyTorch against PyTorch, or against MLX where a row is about
two stacks. The target has the fault.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")

import tracediff
from tests import catalogue_jobs as jobs
from tests.catalogue_jobs import KERNELS, Job, Kernel


@dataclass(frozen=True)
class Fault:
    """What is to be named.

    Attributes:
        ops: Operation by side; the side that lacks it is left out.
        line: Part of the line of code of those sides.
    """

    ops: dict[str, str]
    line: str
    blame: str = "undecided"
    kind: str = "value"


def both(op: str) -> dict[str, str]:
    return {"baseline": op, "target": op}


SDPA = "aten._scaled_dot_product_flash_attention_for_cpu.default"

FAULTS: dict[Job, Fault] = {
    jobs.c01: Fault({"baseline": "aten.add.Tensor"}, "1 + w"),
    jobs.c03: Fault(both("aten.mean.dim"), "functional.rms_norm", "target"),
    jobs.c04: Fault(both("aten.gelu.default"), "functional.gelu"),
    jobs.c05: Fault(both(SDPA), "functional.scaled_dot_product_attention"),
    jobs.c06: Fault(both("aten._softmax.default"), "softmax", kind="nonfinite"),
    jobs.c08: Fault(both(SDPA), "functional.scaled_dot_product_attention"),
    jobs.c11: Fault({"baseline": "aten.div.Tensor"}, "top / top.sum"),
    jobs.c11_no_gradient: Fault({"baseline": "aten._softmax.default"}, "softmax(-1).topk"),
    jobs.c12: Fault(both("aten.topk.default"), "scores.topk"),
    jobs.c13: Fault({"target": "aten._softmax.default"}, "probabilities.softmax"),
    jobs.c16: Fault({"baseline": "aten.mul.Tensor"}, "smooth * counted"),
    jobs.c17: Fault(both("aten.index_put_.default"), "y[rows] += y[rows]", "target"),
    jobs.c18: Fault(both("aten.mm.default"), "x @ w", "target"),
    jobs.c19: Fault(both("aten.addcdiv_.default"), "optimizer.step()", "target"),
    jobs.c20: Fault(both("aten.silu_backward.default"), "functional.silu", "target"),
    jobs.c21: Fault(
        {"baseline": "aten.add.Tensor", "target": "aten._to_copy.default"}, "ids + 1", "target"
    ),
    jobs.c21_argmax: Fault(both("aten.argmax.default"), "x.argmax", "target"),
    jobs.c22: Fault(both("aten._softmax.default"), "x[:, :16].softmax", "target"),
}
ROUNDING: tuple[Job, ...] = (jobs.c02, jobs.c06_padding, jobs.c11_same_function, jobs.c14, jobs.c23)


def recorded(folder: Path, job: Job, faulty: bool, stack: str = "pytorch") -> Path:
    gc.collect()  # an optimizer of an earlier test would count as existing
    path = folder / f"{job.__name__}-{faulty}"
    with ExitStack() as contexts:
        if faulty and job in KERNELS:
            contexts.enter_context(Kernel(*KERNELS[job]))
        contexts.enter_context(tracediff.record(path, stack=stack, level="op"))
        job(faulty)
    return path


def is_named(first: tracediff.Divergence | None, fault: Fault) -> None:
    assert first is not None
    assert first.span is not None
    assert (first.op, first.blame, first.kind) == (fault.ops, fault.blame, fault.kind)
    lines = Path(jobs.__file__).read_text(encoding="utf-8").splitlines()
    for side in fault.ops:
        file, _, number = first.where[side].rpartition(":")
        assert file.endswith(Path(jobs.__file__).name)
        assert fault.line in lines[int(number) - 1]


@pytest.mark.parametrize("job", FAULTS, ids=lambda job: job.__name__)
def test_the_fault_is_named_at_its_operation(tmp_path: Path, job: Job) -> None:
    verdict = tracediff.bisect(recorded(tmp_path, job, False), recorded(tmp_path, job, True))
    is_named(verdict.first, FAULTS[job])


@pytest.mark.parametrize("job", ROUNDING, ids=lambda job: job.__name__)
def test_what_is_no_fault_is_silent(tmp_path: Path, job: Job) -> None:
    verdict = tracediff.bisect(recorded(tmp_path, job, False), recorded(tmp_path, job, True))
    assert verdict.outcome in ("identical", "equivalent"), verdict.reason


def test_two_stacks_align_a_causal_mask_apart(tmp_path: Path) -> None:
    a, b = (
        recorded(tmp_path, jobs.c05_of_pytorch, False),
        recorded(tmp_path, jobs.c05_of_mlx, True, "mlx"),
    )
    ops = {"baseline": SDPA, "target": "mlx.fast.scaled_dot_product_attention"}
    is_named(tracediff.bisect(a, b).first, Fault(ops, "scaled_dot_product_attention"))


def test_two_stacks_agree_on_a_square_causal_mask(tmp_path: Path) -> None:
    a = recorded(tmp_path, jobs.c05_of_pytorch, True)
    b = recorded(tmp_path, jobs.c05_of_mlx_square, True, "mlx")
    assert tracediff.bisect(a, b).outcome == "equivalent"
