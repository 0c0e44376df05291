"""Runs a job on MLX, as a plain training script around mlx-lm's models would."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from benchmarks.faults.job import IGNORED, Batch, Job, batches
from benchmarks.faults.models import adapter, build_mlx, checkpoint, load_checkpoint, load_mlx
from benchmarks.faults.run_pytorch import lora_values


class Runner:
    """The pieces of a run that a case may reach: `model`, `optimizer`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        random.seed(job.seed)
        np.random.seed(job.seed)
        mx.random.seed(job.seed)
        for edit in job.seeded:
            edit()
        self.parts = 1  # micro-batches that a loss is divided by
        self.batches = batches(job.rendering)
        self.model = _model(job)
        self.optimizer = _optimizer(job)

    def train(self) -> None:
        job, plan = self.job, self.job.optimizer
        self.model.train()
        self.parts = 1 if job.averaged_late else job.accumulate
        gradient = nn.value_and_grad(self.model, self.loss)
        for step in range(job.steps):
            self.optimizer.learning_rate = plan.lr * plan.schedule(step)
            total: Any = None
            for index in range(step * job.accumulate, (step + 1) * job.accumulate):
                inputs, labels = _arrays(self.batches[index % len(self.batches)])
                _, grads = gradient(self.model, inputs, labels)
                total = grads if total is None else tree_map(mx.add, total, grads)
            if job.accumulate > 1 and job.averaged_late:
                total = tree_map(lambda g: g / job.accumulate, total)
            flat = dict(tree_flatten(total))
            for edit in job.graded:
                flat |= edit(flat, step)
            total = tree_unflatten(list(flat.items()))
            if plan.clip is not None:
                total, _ = optim.clip_grad_norm(total, plan.clip)
            self.optimizer.update(self.model, total)
            mx.eval(self.model.parameters(), self.optimizer.state)
            for after in job.stepped:
                after(self, step)
        if job.evaluate:
            self.model.eval()
            self.parts = 1
            mx.eval(self.loss(self.model, *_arrays(self.batches[-1])))

    def loss(self, model: Any, inputs: mx.array, labels: mx.array) -> mx.array:
        plan = self.job.loss
        logits = model(inputs)
        if plan.upcast:
            logits = logits.astype(mx.float32)
        if plan.shift:
            logits, labels = logits[:, : -plan.shift], labels[:, plan.shift :]
        mask = labels != IGNORED
        targets = mx.where(mask, labels, 0)
        each = nn.losses.cross_entropy(logits, targets, label_smoothing=plan.smoothing)
        counts = {"tokens": mask.sum(), "elements": labels.size, "rows": labels.shape[0]}
        loss = (each * mask).astype(mx.float32).sum() / counts[plan.denominator] * plan.scale
        return loss / self.parts if self.parts > 1 else loss


def run(job: Job) -> None:
    Runner(job).train()


def _arrays(batch: Batch) -> tuple[mx.array, mx.array]:
    return mx.array(batch["input_ids"]), mx.array(batch["labels"])


def _model(job: Job) -> Any:
    weights = load_checkpoint(checkpoint(job.family, job.trained), "mlx")
    for edit in job.weights:
        edit(weights)
    model = build_mlx(job.family, job.config)
    load_mlx(model, weights, job.dtype, job.family)
    if job.lora:
        _add_lora(model, job)
    for change in job.built:
        change(model)
    if job.optimizer.frozen:
        parts = job.optimizer.frozen
        for name, module in model.named_modules():
            if any(part in f"{name}." for part in parts):
                module.freeze()
    return model


def _add_lora(model: Any, job: Job) -> None:
    plan = job.lora
    assert plan is not None
    model.freeze()
    factor = plan.rank**0.5 if plan.rslora else plan.rank
    keys = [f"self_attn.{target}" for target in plan.targets]
    config = {"rank": plan.rank, "scale": plan.alpha / factor, "dropout": plan.dropout}
    linear_to_lora_layers(model, len(model.layers), config | {"keys": keys})
    arrays = {}
    for name, array in tree_flatten(model.trainable_parameters()):
        peft_name = name.replace("lora_a", "lora_A").replace("lora_b", "lora_B")
        values = lora_values(peft_name, array.shape[::-1]).T
        arrays[name] = np.ascontiguousarray(values)
    model.load_weights(list(adapter(arrays, "mlx").items()), strict=False)
    model.set_dtype(getattr(mx, job.dtype))
    mx.eval(model.parameters())


def _optimizer(job: Job) -> Any:
    plan = job.optimizer
    if plan.kind == "SGD":
        return optim.SGD(plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay)
    options: dict[str, Any] = {
        "betas": list(plan.betas),
        "eps": plan.eps,
        "bias_correction": plan.bias_correction,
    }
    if plan.kind == "Adam":
        return optim.Adam(plan.lr, **options)
    options["weight_decay"] = plan.weight_decay
    return optim.AdamW(plan.lr, **options)
