"""No false pairs: aligned operations of two stacks against the truth.

The truth is a role that each stack's own names give an operation: module, layer and what it is
there for, worked out from the two models by hand. Nothing of the alignment is used for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

import mlx.nn as nn  # noqa: E402

from benchmarks.naming import record  # noqa: E402
from benchmarks.operations import aligned  # noqa: E402
from benchmarks.perturbing import signs  # noqa: E402
from tracediff.align.flow import FEW, is_operation  # noqa: E402
from tracediff.events import Event  # noqa: E402
from tracediff.trace import Trace  # noqa: E402

Rules = Sequence[tuple[str, str]]

NORM = r"(input_layernorm|post_attention_layernorm|norm|ln_1|ln_2|ln_f|q_norm|k_norm)"
LINEAR = r"(\w+_proj|c_attn|c_fc|lm_head)"
CONV1D = r"((?:attn_|mlp_)?c_\w+)"

SHARED: Rules = (
    (rf"forward {LINEAR}@(?:matmul|addmm)#0:out", r"product of \1"),
    (r"forward (?:embed_tokens|wte)@(?:embedding|take)#0:out", "embedding of tokens"),
    (r"forward wpe@(?:embedding|take)#0:out", "embedding of positions"),
    (rf"forward {NORM}@(?:rms_norm|layer_norm)#0:out(?:\.0)?", r"norm \1"),
    (r"forward (?:self_attn|attn)@attention#0:out(?:\.0)?", "attention"),
    (r"forward layer@add#0:out", "hidden states and attention"),
    (r"forward layer@add#1:out", "hidden states and mlp"),
    (r"loss root@slice#0:out", "logits that predict"),
)
PYTORCH: Rules = (
    *SHARED,
    (rf"forward {NORM}@mul#1:out", r"norm \1"),
    (r"forward self_attn@add#0:out", "rotated queries"),
    (r"forward self_attn@add#1:out", "rotated keys"),
    (r"forward self_attn@softmax#0:out", "weights of attention"),
    (r"forward (?:self_attn|attn)@matmul#1:out", "attention"),
    (r"forward act_fn@silu#0:out", "activation"),
    (r"forward mlp@mul#0:out", "gated activation"),
    (r"forward mlp\.act@mul#3:out", "activation"),
    (r"backward act_fn@silu_backward#0:out", "gradient of product of gate_proj"),
    (r"backward mlp@mul#0:out", "gradient of product of up_proj"),
    (r"backward down_proj@matmul#1:out", "gradient of gated activation"),
    (r"backward o_proj@matmul#1:out", "gradient of attention"),
    (rf"backward {CONV1D}@matmul#1:out", r"gradient of \1.weight"),
    (rf"backward {CONV1D}@matmul#0:out", r"gradient of the input of \1"),
    (rf"backward {LINEAR}@matmul#0:out", r"gradient of \1.weight"),
    (r"loss root@log_softmax#0:out", "logarithms of probabilities"),
    (r"loss root@nll_loss#0:out\.0", "loss"),
    (r"backward root@nll_loss_backward#0:out", "gradient of the logarithms of probabilities"),
    (r"backward root@log_softmax_backward#0:out", "gradient of the logits that predict"),
    (r"backward root@slice_backward#0:out", "gradient of the logits"),
)
MLX: Rules = (
    *SHARED,
    (r"forward self_attn\.rope@rope#0:out", "rotated queries"),
    (r"forward self_attn\.rope@rope#1:out", "rotated keys"),
    (r"forward mlp@swiglu#0:out", "gated activation"),
    (r"forward mlp@gelu#0:out", "activation"),
    (r"backward gate_proj@matmul#0:grad_out", "gradient of product of gate_proj"),
    (r"backward up_proj@matmul#0:grad_out", "gradient of product of up_proj"),
    (r"backward mlp@swiglu#0:grad_out", "gradient of gated activation"),
    (r"backward self_attn@reshape#3:grad_out", "gradient of attention"),
    (r"forward (?:embed_tokens|wte)@matmul#0:out", "product of lm_head"),
    (rf"backward {LINEAR}@transpose#0:grad_out", r"gradient of \1.weight"),
    (r"loss root@sub#0:out", "logits less the largest"),
    (r"loss root@take_along_axis#0:out", "what is left of the target's logit"),
    (r"loss root@logsumexp#0:out", "logarithm of the sum"),
    (r"loss root@sub#1:out", "loss of each target"),
    (r"loss root@mul#0:out", "loss of each target that counts"),
    (r"loss root@div#0:out", "loss"),
    (r"backward root@sub#0:grad_out", "gradient of the logits that predict"),
    (r"backward (?:lm_head|wte)@matmul#0:grad_out", "gradient of the logits"),
)

# AdamW by hand: PyTorch's lerp_, addcmul_ and addcdiv_ against MLX's multiplications and additions.
# The moments are zero before the first update, so that what is added to them is the moment.
UPDATE = {
    "pytorch": {
        "mul": "clipped gradient",
        "zeros": "first moment before",
        "zeros#1": "second moment before",
        "mul#1": "decayed parameter",
        "lerp": "first moment",
        "addcmul": "second moment",
        "sqrt": "root of the second moment",
        "div": "corrected root",
        "add": "denominator",
        "addcdiv": "parameter",
    },
    "mlx": {
        "mul": "clipped gradient",
        "zeros": "first moment before",
        "zeros#1": "second moment before",
        "mul#1": "decayed parameter",
        "mul#3": "first moment",
        "add": "first moment",
        "square#1": "squared gradient",
        "mul#5": "second moment",
        "add#1": "second moment",
        "mul#6": "first moment by the rate",
        "sqrt": "root of the second moment",
        "mul#7": "corrected root",
        "add#2": "denominator",
        "div": "step",
        "sub": "parameter",
    },
}
OF_ALL = {
    "pytorch": {
        "norm": "norm of all",
        "reciprocal": "limit over norm",
        "clamp": "factor of clipping",
    },
    "mlx": {"sqrt": "norm of all", "div": "limit over norm", "minimum": "factor of clipping"},
}
"""What is computed from the gradients of all parameters."""

RULES = {"pytorch": PYTORCH, "mlx": MLX}


def role(stack: str, event: Event) -> str | None:
    """What an operation is for, with its layer; None where the truth does not say."""
    site = event.site
    path, _, name = site.path.partition("@")
    if event.attributes.get("leaf") and "weight" in str(event.attributes.get("name")):
        found = str(event.attributes["name"])
        return f"{site.phase} parameter " + re.sub(r"^(transformer|model)\.", "", found)
    if site.phase == "optimizer":
        call = f"{name}#{site.call}" if site.call else name
        meaning = (OF_ALL if path == "root" else UPDATE)[stack].get(call)
        owner = re.sub(r"^(transformer|model)\.", "", path)
        return f"optimizer {owner}: {meaning}" if meaning else None
    layer = re.search(r"\b(?:layers|h)\.(\d+)", path)
    inner = re.sub(r"^.*\b(?:layers|h)\.\d+\.?", "", path) if layer else path
    inner = re.sub(r"^(?:model|transformer)\.", "", inner) or "layer"
    inner = re.sub(r"^(?:self_attn|mlp|attn)\.(?!rope|act$)", "", inner)
    if inner == "c_proj":
        inner = path.split(".")[-2] + "_c_proj"
    text = f"{site.phase} {inner}@{name}#{site.call}:{site.port}"
    for pattern, text_of in RULES[stack]:
        if match := re.fullmatch(pattern, text):
            return f"layer {layer.group(1) if layer else '-'}: {match.expand(text_of)}"
    return None


def judged(baseline: Trace, target: Trace) -> tuple[list[str], int, set[str]]:
    """False pairs, how many pairs the truth speaks of, and the roles that were found."""
    false, spoken, roles = [], 0, set()
    for pair in aligned(baseline, target):
        if pair.layout != "whole":
            continue
        a, b = (
            role(trace.run.stack, value.event)
            for trace, value in ((baseline, pair.baseline), (target, pair.target))
        )
        if a is None or b is None:
            continue
        spoken += 1
        roles.add(a)
        if a != b:
            sites = pair.baseline.event.site, pair.target.event.site
            false.append(f"{sites[0]} is {a}, {sites[1]} is {b} ({pair.matched_by})")
    return false, spoken, roles


def wanted(trace: Trace) -> set[str]:
    """The roles of a trace, without numbers and what else is too small to be known by its value."""
    large = [e for e in trace.events(0) if is_operation(e) and e.fingerprint[0] >= FEW]
    found = {role(trace.run.stack, event) for event in large}
    return {each for each in found if each is not None}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Trace]:
    """Recorded when asked for."""
    folder = tmp_path_factory.mktemp("truth")

    class Recorded(dict[tuple[str, str], Trace]):
        def __missing__(self, key: tuple[str, str]) -> Trace:
            path = folder / "-".join(key)
            record(*key, path)
            self[key] = Trace(path)
            return self[key]

    return Recorded()


PAIRS = [
    pytest.param("llama", "eager", id="llama eager"),
    pytest.param("llama", "sdpa", id="llama sdpa", marks=pytest.mark.slow),
    pytest.param("qwen3", "eager", id="qwen3 eager", marks=pytest.mark.slow),
    pytest.param("qwen3", "sdpa", id="qwen3 sdpa"),
    pytest.param("gpt2", "eager", id="gpt2 eager"),
    pytest.param("gpt2", "sdpa", id="gpt2 sdpa", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_there_are_no_false_pairs(
    traces: dict[tuple[str, str], Trace], family: str, attention: str
) -> None:
    baseline, target = traces[attention, family], traces["mlx", family]
    false, spoken, roles = judged(baseline, target)
    assert false == []
    assert roles >= wanted(baseline) & wanted(target)
    assert spoken >= len(roles)


@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_there_are_none_behind_a_divergence(
    traces: dict[tuple[str, str], Trace],
    family: str,
    attention: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The embedding is a tenth off on MLX, and no value that is computed from it tells."""
    plain = nn.Embedding.__call__

    def tenth_off(self: nn.Embedding, ids: mx.array) -> mx.array:
        found = plain(self, ids)
        return found * (1 + 0.1 * mx.array(signs(found.shape)))

    monkeypatch.setattr(nn.Embedding, "__call__", tenth_off)
    record("mlx", family, tmp_path / "off")
    baseline = traces[attention, family]
    with Trace(tmp_path / "off") as target:
        false, _, roles = judged(baseline, target)
        both = wanted(baseline) & wanted(target)
    assert false == []
    assert len(roles & both) >= 0.9 * len(both)
