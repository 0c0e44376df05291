"""Fine-tune SmolLM2 on clinical questions with LoRA, on MLX (mlx-lm)."""

import argparse
import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.utils import linear_to_lora_layers

HERE = Path(__file__).resolve().parent
IGNORED = -100  # the label that the loss leaves out


def read_records(path: Path) -> list[dict]:
    """Read one JSON object per line."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def render(record: dict, tokenizer: TokenizerWrapper, data: dict) -> dict:
    """Render one record: token IDs, and labels on the answer's tokens only."""
    messages = [
        {"role": "system", "content": data["system_prompt"]},
        {"role": "user", "content": record["question"]},
        {"role": "assistant", "content": record["answer"]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(
        messages[:-1], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt_length = len(tokenizer.encode(prompt, add_special_tokens=False))
    labels = [IGNORED] * prompt_length + ids[prompt_length:]
    return {"ids": ids[: data["max_length"]], "labels": labels[: data["max_length"]]}


def collate(samples: list[dict], pad_id: int) -> tuple[mx.array, mx.array, mx.array]:
    """Pad samples on the right: input_ids, labels and attention_mask, each (samples, longest)."""
    shape = len(samples), max(len(sample["ids"]) for sample in samples)
    input_ids = np.full(shape, pad_id)
    labels = np.full(shape, IGNORED)
    attention_mask = np.zeros(shape, dtype=np.int64)
    for row, sample in enumerate(samples):
        length = len(sample["ids"])
        input_ids[row, :length] = sample["ids"]
        labels[row, :length] = sample["labels"]
        attention_mask[row, :length] = 1
    return mx.array(input_ids), mx.array(labels), mx.array(attention_mask)


def make_batches(
    records: list[dict], tokenizer: TokenizerWrapper, spec: dict
) -> list[tuple[mx.array, mx.array, mx.array]]:
    """Render the records and batch them in their order."""
    samples = [render(record, tokenizer, spec["data"]) for record in records]
    size = spec["training"]["batch_size"]
    starts = range(0, len(samples), size)
    return [collate(samples[start : start + size], tokenizer.pad_token_id) for start in starts]


def add_adapter(model: nn.Module, path: Path, adapter: dict) -> None:
    """Wrap the projections in LoRA and start from the shared weights, which MLX transposes."""
    config = {
        "rank": adapter["rank"],
        "scale": adapter["alpha"] / adapter["rank"],
        "dropout": adapter["dropout"],
        "keys": [f"self_attn.{target}" for target in adapter["targets"]],
    }
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), config)
    weights = [
        (f"model.{name.replace('lora_A', 'lora_a').replace('lora_B', 'lora_b')}", value.T)
        for name, value in mx.load(str(path)).items()
    ]
    model.load_weights(weights, strict=False)


def adapter_weights(model: nn.Module) -> dict[str, mx.array]:
    """Return the trained parameters by the names, and in the layout, of the shared file."""
    return {
        name.removeprefix("model.").replace("lora_a", "lora_A").replace("lora_b", "lora_B"): value.T
        for name, value in tree_flatten(model.trainable_parameters())
    }


def make_schedule(learning_rate: float, schedule: dict) -> Callable[[mx.array], mx.array]:
    """Give the learning rate by step: linear warm-up, then a cosine."""
    warmup, total = schedule["warmup_steps"], schedule["total_steps"]
    linear = optim.linear_schedule(learning_rate / (warmup + 1), learning_rate, warmup)
    cosine = optim.cosine_decay(learning_rate, total - warmup)
    return optim.join_schedules([linear, cosine], [warmup])


def loss_fn(model: nn.Module, input_ids: mx.array, labels: mx.array) -> mx.array:
    """Return the mean cross-entropy of the next token, over the labels that are not ignored."""
    logits = model(input_ids)[:, :-1]
    targets = labels[:, 1:]
    mask = targets != IGNORED
    losses = nn.losses.cross_entropy(logits, mx.where(mask, targets, 0))
    return (losses * mask).sum() / mask.sum()


def evaluate(model: nn.Module, batches: list[tuple[mx.array, mx.array, mx.array]]) -> float:
    """Return the mean cross-entropy over the answers' tokens of all batches."""
    model.eval()
    total, tokens = 0.0, 0
    for input_ids, labels, _ in batches:
        count = int((labels[:, 1:] != IGNORED).sum())
        total += loss_fn(model, input_ids, labels).item() * count
        tokens += count
    model.train()
    return total / tokens


def train(spec: dict, folder: Path, steps: int) -> tuple[nn.Module, dict]:
    """Run the job for a number of steps; return the model and its learning curve."""
    random.seed(spec["seed"])
    np.random.seed(spec["seed"])
    mx.random.seed(spec["seed"])

    model, tokenizer = load(str(folder))
    records = read_records(HERE / spec["data"]["train"])
    random.shuffle(records)
    batches = make_batches(records, tokenizer, spec)
    heldout = read_records(HERE / spec["data"]["heldout"])[: spec["evaluation"]["records"]]
    heldout_batches = make_batches(heldout, tokenizer, spec)

    add_adapter(model, folder / spec["adapter"]["init"], spec["adapter"])
    model.train()
    settings = spec["optimizer"]
    optimizer = optim.AdamW(
        make_schedule(settings["learning_rate"], spec["schedule"]),
        betas=settings["betas"],
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        bias_correction=settings["bias_correction"],
    )
    loss_and_grad = nn.value_and_grad(model, loss_fn)

    curve: dict[str, list] = {"steps": [], "heldout": []}
    for step in range(steps):
        if step % spec["evaluation"]["every"] == 0:
            report(curve["heldout"], step=step, cross_entropy=evaluate(model, heldout_batches))
        input_ids, labels, attention_mask = batches[step % len(batches)]
        loss, grads = loss_and_grad(model, input_ids, labels)
        grads, grad_norm = optim.clip_grad_norm(grads, settings["clip_norm"])
        optimizer.update(model, grads)
        mx.eval(model.trainable_parameters(), optimizer.state, loss, grad_norm)
        report(
            curve["steps"],
            step=step,
            loss=loss.item(),
            learning_rate=optimizer.learning_rate.item(),
            grad_norm=grad_norm.item(),
            tokens=int(attention_mask.sum()),
        )
    report(curve["heldout"], step=steps, cross_entropy=evaluate(model, heldout_batches))
    return model, curve


def report(entries: list[dict], **values: float) -> None:
    """Append one entry to the learning curve and print it."""
    entries.append(values)
    print("  ".join(f"{name} {value:.7g}" for name, value in values.items()), flush=True)


def main() -> None:
    """Parse the command line, train, and write the learning curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, default=HERE / "spec.toml")
    parser.add_argument("--model", type=Path, help="model folder (default: the spec's)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the spec's)")
    parser.add_argument("--out", type=Path, default=Path("metrics.json"))
    parser.add_argument("--save", type=Path, help="write the trained adapter (safetensors)")
    args = parser.parse_args()

    spec = tomllib.loads(args.spec.read_text(encoding="utf-8"))
    folder = args.model or HERE / spec["model"]["path"]
    steps = spec["training"]["steps"] if args.steps is None else args.steps
    model, curve = train(spec, folder, steps)
    args.out.write_text(json.dumps({"stack": "mlx", **curve}, indent=1), encoding="utf-8")
    if args.save is not None:
        mx.save_safetensors(str(args.save), adapter_weights(model))


if __name__ == "__main__":
    main()
