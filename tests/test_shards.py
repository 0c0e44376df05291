"""Distributed tensors: every process records its part, says which it is, and changes nothing."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.shard_jobs import JOBS, Block, loss_of, mlp
from tracediff.bisection import bisect
from tracediff.recorders.pytorch_shards import shard_of
from tracediff.recorders.pytorch_tensors import read_part
from tracediff.testing import build_trace
from tracediff.trace import Trace, verify

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The traces of all jobs, of two processes that gloo connects on the CPU."""
    folder = tmp_path_factory.mktemp("shards")
    environment = os.environ | {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.shard_jobs", str(folder)],
            cwd=ROOT,
            env=environment | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return folder


def results(runs: Path, rank: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((runs / f"results-{rank}.json").read_text())
    return found


def assembled(path: Path, site: str) -> np.ndarray[Any, Any]:
    """The whole that the parts of two ranks make, each put where its text says."""
    whole = None
    with Trace(path) as first, first.of_rank(1) as second:
        for trace in (first, second):
            event = trace.find(site)
            part = trace.array(event)
            _, _, shape, offset = event.shard.split("|")
            if whole is None:
                whole = np.full(tuple(map(int, shape.split("x"))), np.nan, part.dtype)
            starts = map(int, offset.split(","))
            whole[tuple(slice(o, o + n) for o, n in zip(starts, part.shape, strict=True))] = part
    assert whole is not None
    return whole


# ---- recording ----------------------------------------------------------------------------------


@pytest.mark.parametrize("job", JOBS)
def test_recording_changes_no_loss_and_no_weight(runs: Path, job: str) -> None:
    for rank in (0, 1):
        found = results(runs, rank)[job]
        assert found["recorded"] == found["alone"]
    assert verify(runs / job).sound


def test_parts_say_where_in_the_whole_they_stand(runs: Path) -> None:
    torch.manual_seed(7)
    model = Block()
    for name in ("fc1.weight", "fc1.bias", "fc2.weight"):
        for job in ("columns", "rows"):
            if (job, name) == ("rows", "fc1.bias"):
                continue  # replicated there
            found = assembled(runs / job, f"0/loading/{name}:param")
            np.testing.assert_array_equal(found, model.get_parameter(name).detach().numpy())


def test_what_every_process_holds_whole_is_no_part(runs: Path) -> None:
    with Trace(runs / "columns") as trace:
        sites = ["norm.weight:param", "norm.bias:param", "fc2.bias:param"]
        assert {trace.find(f"0/loading/{site}").shard for site in sites} == {""}
        assert trace.find("0/forward/norm#0:out").shard == ""
    with Trace(runs / "whole") as trace:
        assert not any(event.shard for event in trace.events())


def test_outputs_and_gradients_of_tensor_parallel_layers_are_recorded(runs: Path) -> None:
    path = runs / "columns"
    with Trace(path) as trace, trace.of_rank(1) as other, Trace(runs / "whole") as plain:
        assert trace.find("0/forward/fc1#0:out").shard == "tp=2@0|S(1)|4x16|0,0"
        assert other.find("0/forward/fc1#0:out").shard == "tp=2@1|S(1)|4x16|0,8"
        assert trace.find("0/backward/norm#0:grad_out").shard == "tp=2@0|P(sum)|4x8|0,0"
        for site in (
            "0/forward/fc1#0:out",
            "0/backward/fc1#0:grad_out",
            "0/backward/fc1.weight#0:grad",
            "0/optimizer/fc2.weight:grad",
            "0/optimizer/fc1.weight:update",
        ):
            expected = plain.array(plain.find(site))
            np.testing.assert_allclose(assembled(path, site), expected, rtol=1e-4, atol=1e-7)


def test_the_state_of_fully_sharded_parameters_is_recorded(runs: Path) -> None:
    """FSDP2: each process averages the gradients of both over its part of the parameters."""
    path = runs / "fsdp"
    torch.manual_seed(7)
    model = mlp()
    for rank in (0, 1):
        (loss_of(model, torch.Generator().manual_seed(rank)) / 2).backward()
    for name, parameter in model.named_parameters():
        loaded = assembled(path, f"0/loading/{name}:param")
        np.testing.assert_array_equal(loaded, parameter.detach().numpy())
        assert parameter.grad is not None
        gradient = assembled(path, f"0/optimizer/{name}:grad")
        np.testing.assert_allclose(gradient, parameter.grad.numpy(), rtol=1e-4, atol=1e-7)
        moment = assembled(path, f"0/optimizer/{name}:state.exp_avg")
        np.testing.assert_allclose(moment, 0.1 * gradient, rtol=1e-5, atol=1e-9)
        before, update, after = (
            assembled(path, site)
            for site in (
                f"0/optimizer/{name}:param",
                f"1/optimizer/{name}:update",
                f"1/optimizer/{name}:param",
            )
        )
        np.testing.assert_allclose(before + update, after, rtol=1e-5, atol=1e-7)
    with Trace(path) as trace, trace.of_rank(1) as other:
        loaded_once = [event for event in trace.events() if event.site.phase == "loading"]
        assert len(loaded_once) == 4
        assert other.find("0/loading/2.weight:param").shape == (1, 10)  # of three rows


def exchanged(runs: Path, rank: int) -> list[tuple[np.ndarray[Any, Any], ...]]:
    """What each collective of the first step was given by a process, and what it came to."""
    with Trace(runs / "averaged", rank=rank) as trace:
        events = {each.order: each for each in trace.events(0)}
        found = [each for each in events.values() if each.op == "c10d.allreduce_.default"]
        return [(trace.array(events[each.inputs[0]]), trace.array(each)) for each in found]


def test_a_collective_is_recorded_with_what_it_came_to(runs: Path) -> None:
    """And not with what the memory held when it began: one process waits for the other."""
    first, second = (exchanged(runs, rank) for rank in (0, 1))
    assert len(first) == len(second) == 4
    for (own, total), (other, same) in zip(first, second, strict=True):
        assert not np.array_equal(own, other)
        np.testing.assert_array_equal(total, own + other)
        np.testing.assert_array_equal(total, same)


KINDS = ["operations", "operations fsdp", "operations fsdp1", "operations ddp", "averaged"]


@pytest.mark.parametrize("job", KINDS)
def test_equal_runs_have_equal_operations(runs: Path, job: str) -> None:
    """FSDP frees the memory of parameters: what it holds until it is gathered again is nobody's."""
    assert bisect(runs / job, runs / f"{job} again").outcome == "identical"


@pytest.mark.parametrize("job", ["averaged", "cancelling"])
def test_rounding_is_no_fault_of_a_collective(runs: Path, job: str) -> None:
    """Of which each process knows its own part, and not what the others round."""
    assert bisect(runs / job, runs / f"{job} rounded").outcome == "equivalent"


def test_the_process_that_was_wrong_is_named_and_not_those_it_sent_to(runs: Path) -> None:
    verdict = bisect(runs / "averaged", runs / "averaged one wrong")
    assert verdict.first is not None
    assert (verdict.rank, verdict.first.site) == (1, "0/forward/0@addmm#0:out")


def test_a_wrong_collective_is_named(runs: Path) -> None:
    verdict = bisect(runs / "averaged", runs / "averaged wrongly")
    assert verdict.first is not None
    assert verdict.first.site == "1/loss/root@c10d.allreduce#0:out"


# ---- which part it is ---------------------------------------------------------------------------


def test_offsets_are_those_of_the_values() -> None:
    """All placements over a mesh of three by two, of sizes that it does not divide."""
    shapes = ((7, 5), (4, 6), (1, 3), (13,))
    for rank in range(6):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
        try:
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            for shape in shapes:
                whole = torch.arange(float(np.prod(shape))).reshape(shape)
                kinds = [Replicate(), *map(Shard, range(len(shape)))]
                for placements in itertools.product(kinds, repeat=2):
                    check(distribute_tensor(whole, mesh, placements, src_data_rank=None), whole)
            part = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Partial()])
            at = f"dp=3@{rank // 2},tp=2@{rank % 2}"
            assert shard_of(part) == f"{at}|S(0),P(sum)|6x3|{rank // 2 * 2},0"
            scalar = DTensor.from_local(torch.ones(()), mesh, [Replicate(), Partial("avg")])
            assert shard_of(scalar) == f"{at}|R,P(avg)||"
        finally:
            dist.destroy_process_group()


def test_offsets_of_fully_sharded_tensor_parallel_layers_are_those_of_the_values() -> None:
    """FSDP2 over tensor parallel, of sizes that neither divides."""
    seen = set()
    for rank in range(6):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
        try:
            # Named by rank, as torch keeps the mesh that it makes of both for the whole process.
            names = (f"dp{rank}", "tp")
            mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=names)
            model = nn.Sequential(nn.Linear(5, 11), nn.Linear(11, 4))
            whole = {name: p.detach().clone() for name, p in model.named_parameters()}
            plan: dict[str, ParallelStyle] = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
            fully_shard(model, mesh=mesh[names[0]])
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                check(parameter, whole[name])
                seen.add(shard_of(parameter).split("|")[1])
        finally:
            dist.destroy_process_group()
    assert seen == {"_StridedShard(0/3),S(0)", "S(0),S(1)", "S(0),R"}


def check(tensor: DTensor, whole: torch.Tensor) -> None:
    array, shard = read_part(tensor)
    assert array is not None
    if not shard:
        assert all(isinstance(placement, Replicate) for placement in tensor.placements)
        np.testing.assert_array_equal(array, whole.numpy())
        return
    _, _, shape, offset = shard.split("|")
    assert shape == "x".join(map(str, whole.shape))
    starts = map(int, offset.split(","))
    place = tuple(slice(o, o + n) for o, n in zip(starts, array.shape, strict=True))
    np.testing.assert_array_equal(array, whole.numpy()[place])


# ---- comparing ----------------------------------------------------------------------------------


def test_equal_runs_of_shards_agree(runs: Path) -> None:
    verdict = bisect(runs / "columns", runs / "twin")
    assert (verdict.outcome, verdict.coverage) == ("identical", 1.0)


def test_a_fault_in_one_part_is_named_with_its_rank(runs: Path) -> None:
    verdict = bisect(runs / "columns", runs / "faulty")
    assert verdict.first is not None
    assert (verdict.rank, verdict.first.site) == (1, "1/optimizer/fc1.weight:grad")
    assert {deviation.index[0] for deviation in verdict.first.deviations} == {3}


@pytest.mark.parametrize("job", ["columns", "local outputs", "replicas"])
def test_rounding_in_runs_of_shards_is_no_divergence(runs: Path, job: str) -> None:
    """No formula of a whole is held against parts: of a weight, or terms of a sum."""
    other = f"{job} rounded"
    for pair in ((job, other), (other, job)):
        verdict = bisect(runs / pair[0], runs / pair[1])
        assert (verdict.outcome, verdict.coverage) == ("equivalent", 1.0), verdict.reason


@pytest.mark.parametrize(
    ("baseline", "target"),
    [
        ("columns", "rows"),
        ("columns", "whole"),
        ("whole", "rows"),
        ("operations", "whole"),
        ("local outputs", "whole"),
        ("local outputs", "columns"),
        ("replicas", "mlp"),
        ("mlp", "replicas"),
    ],
)
def test_other_placements_are_told_and_are_no_divergence(
    runs: Path, baseline: str, target: str
) -> None:
    verdict = bisect(runs / baseline, runs / target)
    assert (verdict.outcome, verdict.exit_code, verdict.first) == ("incomparable", 125, None)
    assert "the runs place tensors differently on their meshes" in verdict.reason
    assert any("tp=2@0|S(" in warning for warning in verdict.warnings)
    told = "the runs place it differently on their meshes"
    assert any(group.reason.endswith(told) for group in verdict.unmatched)
    assert bisect(runs / baseline, runs / target, min_coverage=0.4).outcome == "equivalent"


def test_another_number_of_processes_is_no_divergence(runs: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(runs / "mlp", alone)
    for folder in ("segments", "index"):
        shutil.rmtree(alone / folder / "1")
    for pair in ((runs / "replicas", alone), (alone, runs / "replicas")):
        verdict = bisect(*pair)
        assert (verdict.outcome, verdict.first) == ("incomparable", None)
        agreeing = bisect(*pair, min_coverage=0.4)
        assert (agreeing.outcome, agreeing.first) == ("equivalent", None)
        assert any("has no rank 1" in warning for warning in agreeing.warnings)
    whole = bisect(runs / "mlp", alone)
    assert whole.first is not None
    assert whole.first.kind == "missing"


PART = {"shard": "tp=2@0|S(0)|8x4|0,0"}


def written(path: Path, part: bool, **changed: np.ndarray[Any, Any]) -> Path:
    """A step of a layer whose weight is a part or whole, its output without a word of that."""
    values = {
        "loading/norm.weight:param": np.ones(4, np.float32),
        "loading/fc.weight:param": np.ones((4 if part else 8, 4), np.float32),
        "forward/norm#0:out": np.full((2, 4), 0.5, np.float32),
        "forward/fc#0:out": np.full((2, 4 if part else 8), 2, np.float32),
        "forward/head#0:out": np.full((2, 3), 3, np.float32),
    }
    names = {"weight": "loading/norm.weight:param", "out": "forward/head#0:out"}
    values |= {names[name]: value for name, value in changed.items()}
    events: list[tuple[str, Any]] = [
        (f"0/{site}", (value, PART) if part and site.startswith("loading/fc") else value)
        for site, value in values.items()
        if value.size
    ]
    return build_trace(path, events)


def test_what_is_whole_on_both_sides_is_compared_under_other_placements(tmp_path: Path) -> None:
    baseline = written(tmp_path / "a", part=True)
    clean = bisect(baseline, written(tmp_path / "b", part=False), min_coverage=0.5)
    assert (clean.outcome, clean.first) == ("equivalent", None)
    reasons = {group.reason for group in clean.unmatched}
    shaped = "of another shape where the runs place tensors differently on their meshes"
    assert f"forward: {shaped}" in reasons
    for name, site, value in (
        ("weight", "0/loading/norm.weight:param", np.full(4, 1.01, np.float32)),
        ("out", "0/forward/head#0:out", np.full((2, 3), 3.03, np.float32)),
    ):
        faulty = bisect(baseline, written(tmp_path / name, part=False, **{name: value}))
        assert faulty.first is not None
        assert faulty.first.site == site
    lacking = bisect(baseline, written(tmp_path / "c", part=False, weight=np.ones(0)))
    assert lacking.first is not None
    assert (lacking.first.kind, lacking.first.site) == ("missing", "0/loading/norm.weight:param")


def test_another_shape_of_the_same_part_is_a_divergence(tmp_path: Path) -> None:
    sites = [("0/loading/fc.weight:param", (np.ones(shape), PART)) for shape in ((4, 4), (3, 4))]
    verdict = bisect(*(build_trace(tmp_path / str(i), [one]) for i, one in enumerate(sites)))
    assert verdict.first is not None
    assert verdict.first.kind == "shape"
