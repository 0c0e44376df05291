"""Fine-tune SmolLM2 on clinical questions with LoRA, on PyTorch (transformers and peft)."""

import argparse
import json
import math
import random
import tomllib
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
IGNORED = -100  # the label that cross-entropy leaves out


def read_records(path: Path) -> list[dict]:
    """Read one JSON object per line."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def render(record: dict, tokenizer: PreTrainedTokenizerBase, data: dict) -> dict:
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
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt_length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    labels = [IGNORED] * prompt_length + ids[prompt_length:]
    return {"ids": ids[: data["max_length"]], "labels": labels[: data["max_length"]]}


def collate(samples: list[dict], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad samples on the right to one batch of shape (samples, longest)."""
    shape = len(samples), max(len(sample["ids"]) for sample in samples)
    input_ids = torch.full(shape, pad_id)
    labels = torch.full(shape, IGNORED)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    for row, sample in enumerate(samples):
        length = len(sample["ids"])
        input_ids[row, :length] = torch.tensor(sample["ids"])
        labels[row, :length] = torch.tensor(sample["labels"])
        attention_mask[row, :length] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def make_batches(
    records: list[dict], tokenizer: PreTrainedTokenizerBase, spec: dict
) -> list[dict[str, torch.Tensor]]:
    """Render the records and batch them in their order."""
    samples = [render(record, tokenizer, spec["data"]) for record in records]
    size = spec["training"]["batch_size"]
    starts = range(0, len(samples), size)
    return [collate(samples[start : start + size], tokenizer.pad_token_id) for start in starts]


def load_model(folder: Path, adapter: dict) -> PeftModel:
    """Load the base model, wrap its projections in LoRA, and start from the shared weights."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(
        r=adapter["rank"],
        lora_alpha=adapter["alpha"],
        lora_dropout=adapter["dropout"],
        target_modules=adapter["targets"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    tensors = load_file(folder / adapter["init"])
    for key, parameter in adapter_weights(model).items():
        parameter.data.copy_(tensors[key])
    return model


def adapter_weights(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by the names they have in the shared file."""
    return {
        name.removeprefix("base_model.model.model.").removesuffix(".default.weight"): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def learning_rate_factor(step: int, schedule: dict) -> float:
    """Give the fraction of the full learning rate at a step: linear warm-up, then a cosine."""
    warmup, total = schedule["warmup_steps"], schedule["total_steps"]
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / (total - warmup))
    return 0.5 * (1.0 + math.cos(math.pi * progress))


@torch.no_grad()
def evaluate(model: PeftModel, batches: list[dict[str, torch.Tensor]]) -> float:
    """Return the mean cross-entropy over the answers' tokens of all batches."""
    model.eval()
    total, tokens = 0.0, 0
    for batch in batches:
        count = int((batch["labels"][:, 1:] != IGNORED).sum())
        total += model(**batch).loss.item() * count
        tokens += count
    model.train()
    return total / tokens


def train(spec: dict, folder: Path, steps: int) -> tuple[PeftModel, dict]:
    """Run the job for a number of steps; return the model and its learning curve."""
    random.seed(spec["seed"])
    np.random.seed(spec["seed"])
    torch.manual_seed(spec["seed"])

    tokenizer = AutoTokenizer.from_pretrained(folder)
    records = read_records(HERE / spec["data"]["train"])
    random.shuffle(records)
    batches = make_batches(records, tokenizer, spec)
    heldout = read_records(HERE / spec["data"]["heldout"])[: spec["evaluation"]["records"]]
    heldout_batches = make_batches(heldout, tokenizer, spec)

    model = load_model(folder, spec["adapter"])
    model.train()
    parameters = list(adapter_weights(model).values())
    settings = spec["optimizer"]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings["learning_rate"],
        betas=tuple(settings["betas"]),
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, spec["schedule"])
    )

    curve: dict[str, list] = {"steps": [], "heldout": []}
    for step in range(steps):
        if step % spec["evaluation"]["every"] == 0:
            report(curve["heldout"], step=step, cross_entropy=evaluate(model, heldout_batches))
        batch = batches[step % len(batches)]
        loss = model(**batch).loss
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, settings["clip_norm"])
        learning_rate = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report(
            curve["steps"],
            step=step,
            loss=loss.item(),
            learning_rate=learning_rate,
            grad_norm=grad_norm.item(),
            tokens=int(batch["attention_mask"].sum()),
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
    args.out.write_text(json.dumps({"stack": "pytorch", **curve}, indent=1), encoding="utf-8")
    if args.save is not None:
        weights = adapter_weights(model)
        save_file({name: value.detach() for name, value in weights.items()}, args.save)


if __name__ == "__main__":
    main()
