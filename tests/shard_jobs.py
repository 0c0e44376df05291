"""Jobs of two processes that train distributed tensors; `python -m tests.shard_jobs FOLDER`.

Each process records all jobs one after the other, and writes what they computed to
`FOLDER/results-<rank>.json`: by job, and whether it was recorded, the losses and the bits of the
weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import tracediff

STEPS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(self.norm(x))))


def tensor_parallel(mesh: DeviceMesh, fc1: Any, fc2: Any) -> nn.Module:
    model = Block()
    for name, parameter in list(model.norm.named_parameters()):
        held = distribute_tensor(parameter.detach(), mesh, [Replicate()])
        model.norm.register_parameter(name, nn.Parameter(held))
    hold = [Replicate()]
    model.norm.register_forward_pre_hook(lambda _, args: DTensor.from_local(args[0], mesh, hold))
    return parallelize_module(model, mesh, {"fc1": fc1, "fc2": fc2})


def columns(mesh: DeviceMesh) -> nn.Module:
    """The first layer cut along its outputs, the second along its inputs."""
    return tensor_parallel(mesh, ColwiseParallel(use_local_output=False), RowwiseParallel())


def local_outputs(mesh: DeviceMesh) -> nn.Module:
    """Layers cut as torch does by default: plain tensors between them, which tell no placement."""
    plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
    return parallelize_module(Block(), mesh, plan)


def rows(mesh: DeviceMesh) -> nn.Module:
    """The other way round, so that no part of a weight is the same."""
    return tensor_parallel(
        mesh,
        RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
        ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    )


def whole(mesh: DeviceMesh) -> nn.Module:
    return Block()


def mlp(mesh: DeviceMesh | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 3))


def fully_sharded(mesh: DeviceMesh) -> nn.Module:
    """FSDP2, with sizes that two processes do not share evenly."""
    model = mlp()
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def flat_sharded(mesh: DeviceMesh) -> nn.Module:
    """FSDP1."""
    return FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"), device_mesh=mesh)


def replicated(mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(mlp())


def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Of two calls: FSDP keeps the parameters of the outermost module whole between them."""
    calls = [model(torch.randn(4, 8, generator=generator)) for _ in range(2)]
    return torch.cat(calls).square().mean()


def rounded(make: Callable[[DeviceMesh], nn.Module]) -> Callable[[DeviceMesh], nn.Module]:
    """The same model with another rounding of what its first module computes."""

    def rounding(mesh: DeviceMesh) -> nn.Module:
        model = make(mesh)
        first = next(model.children())
        first.register_forward_hook(lambda module, args, out: out * (1 + 2.0**-23))
        return model

    return rounding


def one_wrong(mesh: DeviceMesh) -> nn.Module:
    """One process computes something else in its first module."""
    model = mlp()
    if dist.get_rank() == 1:
        model[0].register_forward_hook(lambda module, args, out: out * 1.01)
    return model


def train(model: nn.Module, seed: int, fault: Callable[[int, nn.Module], None]) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, generator)
        loss.backward()
        fault(step, model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def bits(model: nn.Module) -> list[str]:
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return [tensor.detach().numpy().tobytes().hex() for tensor in local]


def no_fault(step: int, model: nn.Module) -> None:
    pass


def wrong_gradient(step: int, model: nn.Module) -> None:
    """One process scales one row of its part of a gradient, in the second step."""
    if dist.get_rank() == 1 and step == 1:
        model.fc1.weight.grad.to_local()[3] *= 1.01


def clipped(step: int, model: nn.Module) -> None:
    """The norm is that of all parts, of which each process knows its own."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def averaged(step: int, model: nn.Module, how: Any = dist.ReduceOp.SUM) -> None:
    """Gradients are added up while the program goes on; one process is late."""
    time.sleep(0.2 * dist.get_rank())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for work in [dist.all_reduce(grad, op=how, async_op=True) for grad in gradients]:
        work.wait()
    for grad in gradients:
        grad /= dist.get_world_size()


def cancelling(step: int, model: nn.Module) -> None:
    """What two processes add is nearly nothing."""
    for p in model.parameters():
        if dist.get_rank():
            p.grad *= -0.999
    averaged(step, model)


def averaged_wrongly(step: int, model: nn.Module) -> None:
    """In the second step, the larger of two gradients is taken for their sum."""
    averaged(step, model, dist.ReduceOp.MAX if step == 1 else dist.ReduceOp.SUM)


JOBS: dict[str, tuple[Callable[[DeviceMesh], nn.Module], Callable[[int, nn.Module], None]]] = {
    "columns": (columns, no_fault),
    "twin": (columns, no_fault),
    "columns rounded": (rounded(columns), no_fault),
    "faulty": (columns, wrong_gradient),
    "rows": (rows, no_fault),
    "whole": (whole, no_fault),
    "local outputs": (local_outputs, no_fault),
    "local outputs rounded": (rounded(local_outputs), no_fault),
    "operations": (columns, no_fault),
    "operations again": (columns, no_fault),
    "operations fsdp": (fully_sharded, no_fault),
    "operations fsdp again": (fully_sharded, no_fault),
    "operations fsdp1": (flat_sharded, no_fault),
    "operations fsdp1 again": (flat_sharded, no_fault),
    "operations ddp": (replicated, no_fault),
    "operations ddp again": (replicated, no_fault),
    "fsdp": (fully_sharded, no_fault),
    "replicas": (fully_sharded, clipped),
    "replicas rounded": (rounded(fully_sharded), clipped),
    "mlp": (mlp, clipped),
    "averaged": (mlp, averaged),
    "averaged again": (mlp, averaged),
    "averaged wrongly": (mlp, averaged_wrongly),
    "averaged rounded": (rounded(mlp), averaged),
    "averaged one wrong": (one_wrong, averaged),
    "cancelling": (mlp, cancelling),
    "cancelling rounded": (rounded(mlp), cancelling),
}


def run(name: str, mesh: DeviceMesh, folder: Path | None) -> dict[str, Any]:
    torch.manual_seed(7)
    make, fault = JOBS[name]
    level = "op" if name.startswith(("operations", "averaged", "cancelling")) else "module"
    with tracediff.record(folder / name, level=level) if folder else nullcontext():
        model = make(mesh)
        # Data-parallel processes differ in data.
        differ = name.startswith(("fsdp", "averaged", "operations fsdp", "operations ddp"))
        own = dist.get_rank() if differ else 0
        losses = train(model, own, fault)
        dist.barrier()
    return {"losses": losses, "weights": bits(model)}


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = {
        name: {"recorded": run(name, mesh, folder), "alone": run(name, mesh, None)} for name in JOBS
    }
    (folder / f"results-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
