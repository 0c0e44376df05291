"""Models whose attention is computed by two kernels differ by rounding, whatever rounding turns;
with one thing broken besides, that thing is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tracediff  # noqa: E402
from tracediff.bisection import bisect  # noqa: E402
from tracediff.verdict import Verdict  # noqa: E402

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2ForCausalLM": ("Qwen2Config", SIZES),
    "MixtralForCausalLM": ("MixtralConfig", SIZES | {"num_local_experts": 4}),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        SIZES
        | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "DeepseekV3ForCausalLM": (  # which chooses among the best groups of experts
        "DeepseekV3Config",
        SIZES
        | {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8}
        | {"num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
        | {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
        | {"qk_nope_head_dim": 16},
    ),
    "PhiForCausalLM": ("PhiConfig", SIZES | {"resid_pdrop": 0.0}),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, "resid_pdrop": 0.0}
        | {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", PLAIN | {"hidden_dropout": 0.0}),
    "OPTForCausalLM": (
        "OPTConfig",
        {"vocab_size": 256, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "dropout": 0.0, "word_embed_proj_dim": 64}
        | ENDS,
    ),
    "BertForMaskedLM": (
        "BertConfig",
        PLAIN | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Olmo2ForCausalLM": ("Olmo2Config", SIZES | ENDS),
    "FalconForCausalLM": (
        "FalconConfig",
        PLAIN | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | ENDS,
    ),
    "XLNetLMHeadModel": (
        "XLNetConfig",
        {"vocab_size": 256, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}
        | {"dropout": 0.0}
        | ENDS,
    ),
}

Break = Callable[[Any, int], None]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about a loss of power."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def record(
    path: Path, name: str, attention: str, dtype: Any, level: str, steps: int, broken: Break
) -> None:
    """Trains a small model; `broken(model, step)` may change something before a step."""
    config, sizes = (MODELS | OTHERS)[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**sizes, attn_implementation=attention)
    model = getattr(transformers, name)(made).to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randint(3, 256, (8, 4, 16), generator=torch.Generator().manual_seed(1))
    with tracediff.record(path, stack="pytorch", level=level):
        for step in range(steps):
            broken(model, step)
            ids = batches[step % 8]
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def compared(
    folder: Path,
    name: str,
    dtype: Any,
    level: str,
    broken: Break = lambda model, step: None,
    baseline: str = "sdpa",
) -> Verdict:
    """What is said of a run and another one by other kernels, a thing of which may be broken."""
    steps = {"digest": 5, "module": 3, "op": 2}[level]
    paths = folder / "a.zarr", folder / "b.zarr"
    record(paths[0], name, baseline, dtype, level, steps, lambda model, step: None)
    record(paths[1], name, "eager", dtype, level, steps, broken)
    return bisect(*paths, every_step=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", ["digest", "module"])
@pytest.mark.parametrize("name", MODELS)
def test_other_kernels_are_silent(tmp_path: Path, name: str, level: str, dtype: str) -> None:
    """Among what they turn: which experts a router takes, and all of the gradient of the bias of
    attention's keys, which is zero but for rounding, and of what Adam makes of it."""
    verdict = compared(tmp_path, name, getattr(torch, dtype), level)
    assert verdict.outcome == "equivalent", verdict.reason
    assert verdict.first is None


@pytest.mark.parametrize(
    "name",
    ["OPTForCausalLM", "DeepseekV3ForCausalLM", "Olmo2ForCausalLM", "FalconForCausalLM"],
)
def test_operations_of_other_kernels_are_silent(tmp_path: Path, name: str) -> None:
    """Among them: gradients so small that Adam's `eps` counts, memory that is filled part by part,
    and queries and keys that are scaled instead of their product."""
    verdict = compared(tmp_path, name, torch.float32, "op")
    assert verdict.outcome == "equivalent", verdict.reason


def test_a_model_whose_batch_is_the_second_dimension(tmp_path: Path) -> None:
    def broken(model: Any, step: int) -> None:
        with torch.no_grad():
            model.transformer.layer[1].ff.layer_1.weight.mul_(1.01 if step == 1 else 1.0)

    verdict = compared(tmp_path, "XLNetLMHeadModel", torch.float32, "module", broken, "eager")
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.path) == (1, "transformer.layer.1.ff.layer_1")


@pytest.mark.parametrize("level", ["digest", "module"])
def test_choices_that_rounding_turns_are_told(tmp_path: Path, level: str) -> None:
    verdict = compared(tmp_path, "MixtralForCausalLM", torch.bfloat16, level)
    assert verdict.outcome == "equivalent"
    told = [text for text in verdict.warnings if "rounding turned choices" in text]
    assert len(told) == 1
    assert "mlp.gate#0:out.2" in told[0]
    assert ("by a margin of at most" in told[0]) == (level == "module")


def router_that(choose: Callable[[Any], Any]) -> Break:
    """Replaces the indices of the second layer's router from the third step on."""

    def broken(model: Any, step: int) -> None:
        if step == 2:
            gate = model.model.layers[1].mlp.gate
            gate.register_forward_hook(lambda module, given, out: (*out[:-1], choose(out[-1])))

    return broken


def turned_round(chosen: Any) -> Any:
    return 3 - chosen


def one_other(chosen: Any) -> Any:
    """The first token takes an expert that comes last by its scores, or nearly so."""
    changed = chosen.clone()
    changed[0, 0] = next(e for e in (3, 2, 1, 0) if e not in chosen[0])
    return changed


@pytest.mark.parametrize(
    ("level", "choose"),
    [("digest", turned_round), ("module", turned_round), ("module", one_other)],
    ids=["all, digest", "all, module", "one token, module"],
)
def test_a_router_that_errs_is_named(
    tmp_path: Path, level: str, choose: Callable[[Any], Any]
) -> None:
    broken = router_that(choose)
    verdict = compared(tmp_path, "MixtralForCausalLM", torch.float32, level, broken)
    assert verdict.first is not None
    assert verdict.first.site == "2/forward/model.layers.1.mlp.gate#0:out.2"


@pytest.mark.parametrize("level", ["digest", "module"])
def test_a_router_that_favours_an_expert_is_named(tmp_path: Path, level: str) -> None:
    def broken(model: Any, step: int) -> None:
        if step == 2:
            model.model.layers[1].mlp.gate.e_score_correction_bias[5] += 1.0

    verdict = compared(tmp_path, "DeepseekV3ForCausalLM", torch.bfloat16, level, broken)
    assert verdict.first is not None
    assert verdict.first.step == 2
    assert verdict.first.path == "model.layers.1.mlp.gate"


def test_an_expert_that_errs_is_named_beside_choices_that_rounding_turns(tmp_path: Path) -> None:
    def broken(model: Any, step: int) -> None:
        if step == 2:
            experts = model.model.layers[1].mlp.experts
            experts.register_forward_hook(lambda module, given, out: out * 1.05)

    verdict = compared(tmp_path, "Qwen3MoeForCausalLM", torch.bfloat16, "module", broken)
    assert verdict.first is not None
    assert verdict.first.site == "2/forward/model.layers.1.mlp.experts#0:out"
    assert verdict.first.blame == "target"
    assert any("rounding turned choices" in text for text in verdict.warnings)


def scaled_gradient(path: str, factor: float) -> Break:
    def broken(model: Any, step: int) -> None:
        if step == 3:
            model.get_parameter(path).register_hook(lambda grad: grad * factor)

    return broken


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("OPTForCausalLM", "model.decoder.layers.1.self_attn.q_proj.bias"),
        ("GPT2LMHeadModel", "transformer.h.1.attn.c_attn.bias"),
        ("Qwen2ForCausalLM", "model.layers.1.self_attn.v_proj.weight"),
    ],
)
def test_a_gradient_that_does_not_cancel_is_still_held_to_its_bound(
    tmp_path: Path, name: str, path: str
) -> None:
    """At level `digest`, where no formula of the optimizer or of the chain rule is applied."""
    verdict = compared(tmp_path, name, torch.float32, "digest", scaled_gradient(path, 1.01))
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.path) == (3, path)
    assert verdict.first.stage in ("backward", "optimizer")
