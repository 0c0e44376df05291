"""One training run as data: a fault or a variation edits the data, both stacks can run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from benchmarks.faults.models import FAMILIES, VOCABULARY, Weights

Batch = dict[str, NDArray[np.int64]]
Conversation = list[dict[str, str]]

IGNORED = -100
SPECIAL = ("<pad>", "<s>", "</s>", "<system>", "<user>", "<assistant>", "<end>", "<unk>")
TEMPLATE = (
    "<s> {% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@dataclass(slots=True)
class Rendering:
    """How conversations become batches.

    Attributes:
        changed: Edits the text of a template before it is tokenized.
        encoded: Edits the token IDs of one sample; given its index.
        labelled: Edits the labels of one sample; given its index.
        collated: Edits the list of batches.
    """

    template: str = TEMPLATE
    add_special_tokens: bool = False
    max_length: int = 24
    pad_to: int | None = None
    rows: int = 2
    train_on_prompt: bool = False
    changed: list[Callable[[str], str]] = field(default_factory=list)
    encoded: list[Callable[[list[int], int], list[int]]] = field(default_factory=list)
    labelled: list[Callable[[list[int], int], list[int]]] = field(default_factory=list)
    collated: list[Callable[[list[Batch]], None]] = field(default_factory=list)


@dataclass(slots=True)
class Loss:
    """Cross-entropy of the next token: `denominator` is `tokens`, `elements` or `rows`."""

    shift: int = 1
    denominator: str = "tokens"
    smoothing: float = 0.0
    scale: float = 1.0
    upcast: bool = True
    reversed_sum: bool = False
    fused: bool = True


@dataclass(slots=True)
class Optimizer:
    kind: str = "AdamW"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0
    bias_correction: bool = True
    schedule: Callable[[int], float] = lambda step: 1.0
    clip: float | None = 1.0
    clip_each: bool = False
    zero_grad: bool = True
    frozen: tuple[str, ...] = ()
    no_decay: Callable[[str], bool] = lambda name: False
    implementation: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Lora:
    rank: int = 4
    alpha: float = 8.0
    dropout: float = 0.0
    rslora: bool = False
    targets: tuple[str, ...] = ("q_proj", "v_proj")


@dataclass(slots=True)
class Job:
    """A training run on one stack.

    Attributes:
        trained: The configuration of the checkpoint that the weights are loaded from.
        weights: Edits of the weights (by transformers names) before they are loaded.
        built: Edits of the finished model, of either stack.
        graded: Edits of the gradients before clipping: given name -> gradient and the step,
            they return name -> gradient.
        stepped: Called after each update with the runner of the stack and the step.
        seeded: Called after the seeds are set, before anything is built.
        patches: Owner, name and value of attributes set for the duration of the run (PyTorch).
        averaged_late: Gradients are divided by the number of micro-batches after they are summed,
            where otherwise each loss is divided.
        own_labels: The model is given the labels and computes the loss itself (PyTorch).
    """

    stack: str = "pytorch"
    family: str = "llama"
    dtype: str = "float32"
    steps: int = 2
    seed: int = 0
    accumulate: int = 1
    attention: str = "eager"
    threads: int | None = None
    compiled: bool = False
    evaluate: bool = True
    own_labels: bool = False
    averaged_late: bool = False
    checkpointed: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    trained: dict[str, Any] = field(default_factory=dict)
    rendering: Rendering = field(default_factory=Rendering)
    loss: Loss = field(default_factory=Loss)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lora: Lora | None = None
    weights: list[Callable[[Weights], None]] = field(default_factory=list)
    built: list[Callable[[Any], None]] = field(default_factory=list)
    graded: list[Callable[[dict[str, Any], int], dict[str, Any]]] = field(default_factory=list)
    stepped: list[Callable[[Any, int], None]] = field(default_factory=list)
    seeded: list[Callable[[], None]] = field(default_factory=list)
    patches: list[tuple[Any, str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = FAMILIES[self.family] | self.config
        self.trained = dict(self.config)


def conversations(count: int = 8) -> list[Conversation]:
    """Short conversations of made-up words, of different lengths."""
    generator = np.random.default_rng(3)
    words = [f"w{i}" for i in range(VOCABULARY - len(SPECIAL))]

    def say(low: int, high: int) -> str:
        return " ".join(generator.choice(words, int(generator.integers(low, high))))

    return [
        [
            {"role": "system", "content": "w1 w2"},
            {"role": "user", "content": say(2, 5)},
            {"role": "assistant", "content": say(2, 6)},
        ]
        for _ in range(count)
    ]


def tokenizer(rendering: Rendering) -> PreTrainedTokenizerFast:
    """A word-level tokenizer whose post-processor adds `<s>` where special tokens are wanted."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL)}
    for index in range(VOCABULARY - len(SPECIAL)):
        vocabulary[f"w{index}"] = len(SPECIAL) + index
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    outer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    outer.chat_template = rendering.template
    return outer


def batches(rendering: Rendering) -> list[Batch]:
    """Renders and tokenizes the conversations and pads them, on the right, to batches."""
    tok = tokenizer(rendering)
    samples = [_sample(tok, talk, i, rendering) for i, talk in enumerate(conversations())]
    found = [
        _collate(samples[i : i + rendering.rows], rendering)
        for i in range(0, len(samples), rendering.rows)
    ]
    for edit in rendering.collated:
        edit(found)
    return found


def _sample(tok: Any, talk: Conversation, index: int, rendering: Rendering) -> Batch:
    text = tok.apply_chat_template(talk, tokenize=False)
    prompt = tok.apply_chat_template(talk[:-1], tokenize=False, add_generation_prompt=True)
    for edit in rendering.changed:
        text = edit(text)
    special = rendering.add_special_tokens
    ids = tok(text, add_special_tokens=special)["input_ids"]
    prompt_length = len(tok(prompt, add_special_tokens=special)["input_ids"])
    for change in rendering.encoded:
        ids = change(ids, index)
    hidden = 0 if rendering.train_on_prompt else prompt_length
    labels = [IGNORED] * hidden + ids[hidden:]
    for change in rendering.labelled:
        labels = change(labels, index)
    stop = rendering.max_length
    return {"ids": np.array(ids[:stop]), "labels": np.array(labels[:stop])}


def _collate(samples: list[Batch], rendering: Rendering) -> Batch:
    longest = rendering.pad_to or max(len(sample["ids"]) for sample in samples)
    shape = len(samples), longest
    batch = {
        "input_ids": np.zeros(shape, np.int64),
        "labels": np.full(shape, IGNORED, np.int64),
        "attention_mask": np.zeros(shape, np.int64),
    }
    for row, sample in enumerate(samples):
        length = len(sample["ids"])
        batch["input_ids"][row, :length] = sample["ids"]
        batch["labels"][row, :length] = sample["labels"]
        batch["attention_mask"][row, :length] = 1
    return batch
