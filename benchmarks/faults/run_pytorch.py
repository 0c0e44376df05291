"""Runs a job on PyTorch, as a plain training script would."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import peft
import torch
import torch.nn.functional as F

from benchmarks.faults.job import IGNORED, Batch, Job, batches
from benchmarks.faults.models import (
    adapter,
    build_pytorch,
    checkpoint,
    load_checkpoint,
    load_pytorch,
)


class Runner:
    """The pieces of a run that a case may reach: `model`, `optimizer`, `parameters`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        random.seed(job.seed)
        np.random.seed(job.seed)
        torch.manual_seed(job.seed)
        for edit in job.seeded:
            edit()
        self.batches = batches(job.rendering)
        self.model = _model(job)
        self.parameters = {
            name: p
            for name, p in self.model.named_parameters()
            if p.requires_grad and not any(part in name for part in job.optimizer.frozen)
        }
        self.optimizer = _optimizer(job, self.parameters)
        self.called = torch.compile(self.model, backend="eager") if job.compiled else self.model

    def train(self) -> None:
        job, plan = self.job, self.job.optimizer
        self.model.train()
        for step in range(job.steps):
            for group in self.optimizer.param_groups:
                group["lr"] = plan.lr * plan.schedule(step)
            micro = range(step * job.accumulate, (step + 1) * job.accumulate)
            for index in micro:
                loss = self.loss(self.batches[index % len(self.batches)])
                whole = job.accumulate == 1 or job.averaged_late
                (loss if whole else loss / job.accumulate).backward()
            if job.accumulate > 1 and job.averaged_late:
                for parameter in self.parameters.values():
                    parameter.grad /= job.accumulate
            self._edit_gradients(step)
            if plan.clip is not None:
                self._clip(plan.clip)
            self.optimizer.step()
            if plan.zero_grad:
                self.optimizer.zero_grad()
            for after in job.stepped:
                after(self, step)
        if job.evaluate:
            self.model.eval()
            with torch.no_grad():
                self.loss(self.batches[-1])

    def loss(self, batch: Batch) -> torch.Tensor:
        names = [name for name in batch if name != "labels" or self.job.own_labels]
        inputs = {name: torch.from_numpy(batch[name]) for name in names}
        result = self.called(**inputs, use_cache=False)
        if self.job.own_labels:
            return result.loss
        logits = result.logits
        return _loss(self.job, logits, torch.from_numpy(batch["labels"]))

    def _edit_gradients(self, step: int) -> None:
        for edit in self.job.graded:
            grads = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
            for name, grad in edit(grads, step).items():
                self.parameters[name].grad = grad

    def _clip(self, limit: float) -> None:
        parameters = list(self.parameters.values())
        groups = [[p] for p in parameters] if self.job.optimizer.clip_each else [parameters]
        for group in groups:
            torch.nn.utils.clip_grad_norm_(group, limit)


def run(job: Job) -> None:
    """Trains; whatever the job changed in the process is set back."""
    threads = torch.get_num_threads()
    if job.threads:
        torch.set_num_threads(job.threads)
    try:
        with ExitStack() as stack:
            for owner, name, value in job.patches:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            Runner(job).train()
    finally:
        torch.set_num_threads(threads)


def _model(job: Job) -> Any:
    weights = load_checkpoint(checkpoint(job.family, job.trained), "pytorch")
    for edit in job.weights:
        edit(weights)
    model = build_pytorch(job.family, job.config, job.attention)
    load_pytorch(model, weights, job.dtype)
    if job.checkpointed:
        model.gradient_checkpointing_enable()
    if job.lora:
        model = _with_lora(model, job)
    for change in job.built:
        change(model)
    return model


def _with_lora(model: Any, job: Job) -> Any:
    plan = job.lora
    assert plan is not None
    config = peft.LoraConfig(
        r=plan.rank,
        lora_alpha=plan.alpha,
        lora_dropout=plan.dropout,
        use_rslora=plan.rslora,
        target_modules=list(plan.targets),
    )
    model = peft.get_peft_model(model, config)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    values = {n: lora_values(n, tuple(p.shape)) for n, p in trained.items()}
    loaded = adapter({n.replace(".default", ""): v for n, v in values.items()}, "pytorch")
    for name, parameter in trained.items():
        parameter.data = loaded[name.replace(".default", "")].to(getattr(torch, job.dtype))
    return model


def lora_values(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Values of an adapter matrix in peft's layout, the same for every stack; B is not zero."""
    stem = name.removeprefix("base_model.model.").split(".lora_")[0]
    seed = sum(map(ord, stem)) + 1000 * ("lora_B" in name)
    return (0.1 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def _loss(job: Job, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    plan = job.loss
    if plan.upcast:
        logits = logits.float()
    if plan.shift:
        logits, labels = logits[:, : -plan.shift], labels[:, plan.shift :]
    flat, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if plan.denominator == "tokens" and plan.fused:
        loss = F.cross_entropy(flat, targets, ignore_index=IGNORED, label_smoothing=plan.smoothing)
        return loss * plan.scale if plan.scale != 1.0 else loss
    mask = targets != IGNORED
    each = F.cross_entropy(
        flat,
        torch.where(mask, targets, 0),
        reduction="none",
        label_smoothing=plan.smoothing,
    )
    counts = {"tokens": mask.sum(), "elements": targets.numel(), "rows": labels.shape[0]}
    total = (each * mask).flip(0).cumsum(0)[-1] if plan.reversed_sum else (each * mask).sum()
    return total / counts[plan.denominator] * plan.scale


def _optimizer(job: Job, parameters: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    plan = job.optimizer
    plain = [p for name, p in parameters.items() if plan.no_decay(name)]
    decayed = [p for name, p in parameters.items() if not plan.no_decay(name)]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": plan.weight_decay}]
    if plain:
        groups.append({"params": plain, "weight_decay": 0.0})
    if plan.kind == "SGD":
        return torch.optim.SGD(groups, lr=plan.lr, momentum=plan.momentum)
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, plan.kind)
    return make(groups, lr=plan.lr, betas=plan.betas, eps=plan.eps, **plan.implementation)
