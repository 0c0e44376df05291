"""Scripts of long runs on both stacks, with dropout and shuffling; shared by the tests.

Arguments: number of steps, then faults: `draw=137` draws one extra number before that step, and
`flip=137` lets the first mask of that step come out otherwise, the generator going on as it would.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tracediff.events import Run
from tracediff.session import record_script

_HEAD: Final = """
import sys
steps = int(sys.argv[1])
faults = dict(f.split("=") for f in sys.argv[2:])
extra, flip = int(faults.get("draw", -1)), int(faults.get("flip", -1))
"""

_PYTORCH: Final = (
    _HEAD
    + """
import peft, torch, transformers

def model():
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2))
    return peft.get_peft_model(llama, peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
"""
)

_MLX: Final = (
    _HEAD
    + """
import types
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers

def model():
    mx.random.seed(0)
    np.random.seed(0)
    llama = Model(ModelArgs(
        model_type="llama", hidden_size=16, num_hidden_layers=2, intermediate_size=24,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=50))
    llama.freeze()
    linear_to_lora_layers(llama, 2, {
        "rank": 4, "scale": 2.0, "dropout": 0.1, "keys": ["self_attn.q_proj", "self_attn.v_proj"]})
    return llama
"""
)

SCRIPTS: Final[Mapping[str, str]] = {
    "pytorch": _PYTORCH
    + """
dropout = torch.nn.functional.dropout

def flipped(x, *options):
    torch.nn.functional.dropout = dropout
    with torch.utils._python_dispatch._disable_current_modes():  # no recorder sees it
        dropout(x.detach(), *options)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    result = dropout(x, *options)
    torch.set_rng_state(after)
    return result

model = model()
loader = torch.utils.data.DataLoader(torch.randint(0, 50, (16, 8)), batch_size=2, shuffle=True)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
step, losses = 0, []
while step < steps:
    for ids in loader:
        if step == extra:
            torch.rand(1)
        if step == flip:
            torch.nn.functional.dropout = flipped
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print("loss", step, loss.item())
        step += 1
        if step % 5 == 0:
            torch.save(model.state_dict(), f"{sys.argv[0]}.pt")
        if step == steps:
            break
""",
    "trainer": _PYTORCH
    + """
model = model()
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (16, 8))]
options = transformers.TrainingArguments(
    output_dir=f"{sys.argv[0]}.out", max_steps=steps, per_device_train_batch_size=1,
    gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1, report_to=[],
    save_strategy="steps", save_steps=5, save_total_limit=1, eval_strategy="steps", eval_steps=4,
    use_cpu=True, disable_tqdm=True)
transformers.Trainer(model=model, args=options, train_dataset=data, eval_dataset=data[:2]).train()
""",
    "mlx": _MLX
    + """
bernoulli = mx.random.bernoulli

def flipped(*options):
    mx.random.bernoulli = bernoulli
    first, second = np.array(mx.random.split(mx.random.state[0])[0]).tolist()
    mx.random.seed(1)
    result = bernoulli(*options)
    mx.random.seed(first << 32 | second)
    return result

def main(model):  # in globals, MLX would keep the optimizer alive beyond the script
    data = np.random.randint(0, 50, (16, 8))
    optimizer = optim.AdamW(optim.linear_schedule(1e-2, 5e-3, 100))
    gradient = nn.value_and_grad(model, lambda ids: nn.losses.cross_entropy(
        model(ids[:, :-1]), ids[:, 1:], reduction="mean"))
    step = 0
    model.train()
    while step < steps:
        for rows in np.random.permutation(16).reshape(8, 2):
            if step == extra:
                mx.random.uniform()
            if step == flip:
                mx.random.bernoulli = flipped
            loss, grads = gradient(mx.array(data[rows]))
            grads, _ = optim.clip_grad_norm(grads, 1.0)
            optimizer.update(model, grads)
            mx.eval(model.parameters(), optimizer.state)
            print("loss", step, loss.item())
            step += 1
            if step % 5 == 0:
                model.save_weights(f"{sys.argv[0]}.safetensors")
            if step == steps:
                break

main(model())
""",
    "mlx_lm": _MLX
    + """
from mlx_lm.tuner.trainer import TrainingArgs, train

class Rows:
    def __init__(self, count):
        self.rows = np.random.randint(1, 50, (count, 9)).tolist()
    def __getitem__(self, index):
        return (self.rows[index], 0)
    def __len__(self):
        return len(self.rows)

def main(model):
    options = TrainingArgs(
        batch_size=2, iters=steps, val_batches=1, steps_per_report=1, steps_per_eval=6,
        steps_per_save=5, max_seq_length=16, adapter_file=f"{sys.argv[0]}.safetensors")
    train(model=model, optimizer=optim.Adam(1e-2), train_dataset=Rows(16), val_dataset=Rows(2),
          args=options)

main(model())
""",
}


def write(folder: Path, name: str) -> str:
    """Writes a script into a folder; returns its path."""
    path = folder / f"{name}.py"
    path.write_text(SCRIPTS[name], encoding="utf-8")
    return str(path)


def stack_of(name: str) -> str:
    return "mlx" if name.startswith("mlx") else "pytorch"


def record(script: str, output: Path, *arguments: str, **options: Any) -> Run:
    """Records a script at level `digest` unless another is asked for."""
    gc.collect()  # an optimizer of an earlier run would count as existing
    stack = stack_of(Path(script).stem)
    options = {"level": "digest", "stack": stack} | options
    return record_script(script, arguments, output=output, **options)
