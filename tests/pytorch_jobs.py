"""Recording tiny PyTorch jobs and looking values up in their traces; shared by the tests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn

from tracediff.events import Event, Run
from tracediff.recorders.pytorch_recorder import Recorder
from tracediff.recording import Policy, Tape, attached
from tracediff.trace import Trace, TraceWriter


class Recording:
    """A finished trace with the look-ups that the tests need."""

    def __init__(self, path: Path) -> None:
        self.trace = Trace(path)
        self.events = self.trace.events()

    def sites(self, phase: str, step: int | None = None) -> list[str]:
        return [str(e.site) for e in self.of(phase, step)]

    def of(self, phase: str, step: int | None = None) -> list[Event]:
        return [e for e in self.events if e.site.phase == phase and step in (None, e.site.step)]

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
    gc.collect()  # an optimizer of an earlier test would count as existing
    writer = TraceWriter(path, Run(stack="pytorch", level=level))
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


def two_layers(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(dropout), nn.Linear(4, 1))


def llama(**extra: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **extra,
    )
    return transformers.LlamaForCausalLM(config)


def lora_llama(dropout: float = 0.1) -> Any:
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["q_proj", "v_proj"]
    )
    return peft.get_peft_model(llama(), config)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def fine_tune(steps: int = 2, micro_batches: int = 2) -> tuple[list[float], list[Any]]:
    """A LoRA fine-tune with dropout, accumulation, clipping and evaluation; losses and weights."""
    model = lora_llama()
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    losses = []
    for _ in range(steps):
        for _ in range(micro_batches):
            ids = torch.randint(0, 50, (2, 7))
            loss = model(input_ids=ids, labels=ids).loss / micro_batches
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=ids).loss.item())
        model.train()
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


class Function(nn.Module):
    """A function of x and one parameter, as a model."""

    def __init__(self, function: Callable[..., Any], weight: Any = None) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(3) if weight is None else weight)

    def forward(self, x: Any) -> Any:
        return self.function(x, self.weight)


def forward(record: Callable[..., Recording], function: Callable[..., Any], x: Any) -> Recording:
    model = Function(function)

    def job() -> None:
        model(x)

    return record(job, "op")


X = torch.arange(6.0).reshape(2, 3) - 2
