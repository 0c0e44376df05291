"""A slice of the fault benchmark: one fault of each stage, and the twins that cry wolf easily."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

from benchmarks.faults import planted, twins
from benchmarks.faults.blames import ASKED, CONFIGURED
from benchmarks.faults.case import Case
from benchmarks.faults.runner import Bench, wilson
from benchmarks.faults.score import SMALL_EFFECT

FAULTS = (
    "bos added twice-tm-llama-float32",
    "square matrix transposed-tm-llama-bfloat16",
    "another seed, dropout active-tt-llama-float32",
    "rotary base 500000-tm-llama-float32",
    "epsilon of the layer norms 1e-3-tm-gpt2-float32",
    "attention scale times 1.05-tm-llama-bfloat16",
    "one weight of one matrix off by 0.05-tm-llama-bfloat16",
    "sum of squares of one norm of 24 layers in bfloat16-tm-llama-bfloat16",
    "one element of an activation off-tm-llama-float32",
    "loss divided by the world size twice-tm-llama-float32",
    "gradient through one mlp times 1.01-tt-llama-float32",
    "learning rate times 1.1-tm-llama-float32",
    "one step more-tt-llama-float32",
)
BARELY_FELT = (
    "row of an unused token zero-tt-llama-float32",
    "inverse frequencies rounded to bfloat16-tt-llama-float32",
    "gelu with erf instead of tanh-tt-gpt2-float32",
    "gradient through one mlp times 1.01-tt-llama-float32",
    "gradient through a down projection times 1.01-tt-llama-float32",
    "gradient of the head doubled-tt-llama-float32",
    "gradients not zeroed-tt-llama-float32",
    "first moments of two parameters swapped-tt-llama-float32",
    "optimizer state lost after a step-tt-llama-float32",
    "norms without weight decay-tt-llama-float32",
)
"""Ten kinds that move the loss by less than 1e-4, relative, in all steps of the run."""

TWINS = (
    "recorded twice-tt-llama-float32",
    "eager against SDPA-tt-llama-bfloat16",
    "PyTorch against MLX-tm-gpt2-float32",
    "PyTorch against MLX-tm-qwen3-bfloat16",
    "PyTorch against MLX-tm-qwen3_moe-float32",
    "adapter-tm-llama-float32",
    "deep-tm-llama-bfloat16",
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


def _case(identifier: str) -> Case:
    cases = [*planted.REGISTRY.cases, *twins.REGISTRY.cases]
    return next(case for case in cases if case.id == identifier)


@pytest.mark.slow
@pytest.mark.parametrize("identifier", FAULTS)
def test_fault_is_found_where_it_is(bench: Bench, identifier: str) -> None:
    result = bench.run(_case(identifier))
    assert result.real
    assert result.outcome == "diverged", result.why
    assert result.located, f"{result.why}; expected {result.expected}"
    assert result.blamed == "right", f"{result.blame} is blamed, it should be {result.whom}"


@pytest.mark.slow
@pytest.mark.parametrize("identifier", BARELY_FELT)
def test_fault_that_the_loss_barely_feels_is_found(bench: Bench, identifier: str) -> None:
    result = bench.run(_case(identifier))
    assert result.real
    assert result.effect < SMALL_EFFECT
    assert result.detected, result.why


@pytest.mark.slow
@pytest.mark.parametrize("identifier", TWINS)
def test_twin_stays_silent(bench: Bench, identifier: str) -> None:
    case = _case(identifier)
    result = bench.run(case)
    assert result.silent, result.why
    assert result.real != case.same  # a twin differs in bits unless it is meant to be the same


def test_every_case_has_a_name_of_its_own() -> None:
    ids = [case.id for case in (*planted.REGISTRY.cases, *twins.REGISTRY.cases)]
    assert len(ids) == len(set(ids))


def test_blames_are_of_faults_that_there_are() -> None:
    names = {case.name for case in planted.REGISTRY.cases}
    assert ASKED.keys() | CONFIGURED <= names
    assert not ASKED.keys() & CONFIGURED


def test_wilson_interval_of_a_known_proportion() -> None:
    low, high = wilson(95, 100)  # 0.8882 to 0.9785: Brown, Cai and DasGupta's formula by hand
    assert low == pytest.approx(0.8882, abs=1e-3)
    assert high == pytest.approx(0.9785, abs=1e-3)
    assert wilson(0, 0) == (0.0, 1.0)
