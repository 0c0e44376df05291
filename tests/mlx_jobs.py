"""Recording tiny MLX jobs and looking values up in their traces; shared by the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers

from tracediff.events import Event, Run
from tracediff.recorders.mlx_recorder import Recorder
from tracediff.recording import Policy, Tape, attached
from tracediff.trace import Trace, TraceWriter


class Recording:
    """A finished trace with the look-ups that the tests need."""

    def __init__(self, path: Path) -> None:
        self.trace = Trace(path)
        self.events = self.trace.events()
        self.notes = self.trace.run.notes

    def of(self, phase: str, step: int | None = None) -> list[Event]:
        return [e for e in self.events if e.site.phase == phase and step in (None, e.site.step)]

    def sites(self, phase: str, step: int | None = None) -> list[str]:
        return [str(e.site) for e in self.of(phase, step)]

    def __getitem__(self, site: str) -> Any:
        event = self.trace.find(site)
        return event.value if event.value is not None else self.trace.array(event)

    @property
    def digests(self) -> list[tuple[str, bytes]]:
        return [(str(e.site), e.digest) for e in self.events]

    def settings(self) -> dict[str, Any]:
        return {e.site.path: e.value for e in self.of("environment")}


@contextmanager
def recording(path: Path, level: str = "module") -> Iterator[Tape]:
    writer = TraceWriter(path, Run(stack="mlx", level=level))
    tape = Tape(writer, Policy(level=level))
    with tape, attached(Recorder(tape)):
        yield tape


def recorder_into(folder: Path) -> Callable[..., Recording]:
    """A function that runs a job under the recorder and opens its trace."""
    count = iter(range(100))

    def run(job: Callable[[], Any], level: str = "module") -> Recording:
        path = folder / f"{next(count)}.zarr"
        with recording(path, level):
            job()
        return Recording(path)

    return run


class TwoLayers(nn.Module):
    """Linear, tanh, dropout, linear, for regression."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = [nn.Linear(3, 4), nn.Linear(4, 1)]
        self.dropout = nn.Dropout(dropout)

    def __call__(self, x: mx.array) -> mx.array:
        return self.layers[1](self.dropout(mx.tanh(self.layers[0](x))))


def two_layers(dropout: float = 0.0) -> TwoLayers:
    mx.random.seed(0)
    return TwoLayers(dropout)


def llama(lora: bool = False, **extra: Any) -> Model:
    mx.random.seed(0)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=16,
            num_hidden_layers=2,
            intermediate_size=24,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=50,
            **extra,
        )
    )
    if lora:
        model.freeze()
        config = {"rank": 4, "scale": 2.0, "dropout": 0.1}
        linear_to_lora_layers(model, 2, config | {"keys": ["self_attn.q_proj", "self_attn.v_proj"]})
    return model


def next_token_loss(model: Any, inputs: mx.array, targets: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(inputs), targets, reduction="mean")


def batches(count: int) -> list[tuple[mx.array, mx.array]]:
    ids = np.random.default_rng(0).integers(0, 50, (count, 2, 6))
    return [(mx.array(b[:, :-1]), mx.array(b[:, 1:])) for b in ids]


def weights(model: nn.Module) -> list[np.ndarray[Any, Any]]:
    return [np.array(array) for _, array in tree_flatten(model.parameters())]


def fine_tune(steps: int = 2, lora: bool = True) -> tuple[list[float], list[Any]]:
    """A LoRA fine-tune with dropout, clipping, a schedule and evaluation; losses and weights."""
    model = llama(lora)
    optimizer = optim.AdamW(optim.linear_schedule(1e-2, 5e-3, 2))
    step = nn.value_and_grad(model, next_token_loss)
    losses = []
    for inputs, targets in batches(steps):
        model.train()
        loss, grads = step(model, inputs, targets)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
        model.eval()
        losses += [loss.item(), next_token_loss(model, inputs, targets).item()]
    return losses, weights(model)
