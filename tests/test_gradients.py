"""Gradients recomputed in float64: against automatic differentiation, and their spreads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tracediff import stacks
from tracediff.replaying import Call, Replayed

torch = pytest.importorskip("torch")
functional = torch.nn.functional

Array = NDArray[Any]

REFERENCE = stacks.load_replayer("reference")()
WIDTH, OUT, ROWS = 16, 12, (3, 5)


def array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def gradient(
    op: str,
    x: Array,
    upstream: Array,
    wrt: str,
    params: Mapping[str, Array] | None = None,
    dtype: str = "float32",
    **settings: Any,
) -> Replayed:
    resolved = REFERENCE.resolve(op, settings)
    call = Call(op=op, inputs={"in": x}, params=params or {}, settings=resolved, dtype=dtype)
    found = REFERENCE.gradient(call, upstream, wrt)
    assert found is not None
    return found


def peft_lora(x: Any, p: Mapping[str, Any]) -> Any:
    down = x @ p["lora_A.default.weight"].T
    return x @ p["base_layer.weight"].T + 2.0 * down @ p["lora_B.default.weight"].T


def mlx_lora(x: Any, p: Mapping[str, Any]) -> Any:
    return x @ p["linear.weight"].T + 2.0 * (x @ p["lora_a"]) @ p["lora_b"]


Forward = Callable[[Any, Mapping[str, Any]], Any]
CASES: dict[str, tuple[str, Forward, dict[str, Array], dict[str, Any]]] = {
    "Linear": (
        "Linear",
        lambda x, p: functional.linear(x, p["weight"], p["bias"]),
        {"weight": array(OUT, WIDTH, seed=1), "bias": array(OUT, seed=2)},
        {},
    ),
    "Conv1D": (
        "Conv1D",
        lambda x, p: x @ p["weight"] + p["bias"],
        {"weight": array(WIDTH, OUT, seed=1), "bias": array(OUT, seed=2)},
        {},
    ),
    "adapter of peft": (
        "Linear",
        peft_lora,
        {
            "base_layer.weight": array(OUT, WIDTH, seed=1),
            "lora_A.default.weight": array(2, WIDTH, seed=2),
            "lora_B.default.weight": array(OUT, 2, seed=3),
        },
        {"scale": 2.0},
    ),
    "adapter of mlx-lm": (
        "LoRALinear",
        mlx_lora,
        {
            "linear.weight": array(OUT, WIDTH, seed=1),
            "lora_a": array(WIDTH, 2, seed=2),
            "lora_b": array(2, OUT, seed=3),
        },
        {"scale": 2.0},
    ),
    "RMSNorm": (
        "LlamaRMSNorm",
        lambda x, p: functional.rms_norm(x, (WIDTH,), p["weight"], 1e-2),
        {"weight": array(WIDTH, seed=1)},
        {"eps": 1e-2},
    ),
    "RMSNorm of Gemma": (
        "GemmaRMSNorm",
        lambda x, p: functional.rms_norm(x, (WIDTH,), 1 + p["weight"], 1e-2),
        {"weight": array(WIDTH, seed=1)},
        {"eps": 1e-2},
    ),
    "LayerNorm": (
        "LayerNorm",
        lambda x, p: functional.layer_norm(x, (WIDTH,), p["weight"], p["bias"], 1e-2),
        {"weight": array(WIDTH, seed=1), "bias": array(WIDTH, seed=2)},
        {"eps": 1e-2},
    ),
    "SiLU": ("SiLU", lambda x, p: functional.silu(x), {}, {}),
    "GELU": ("GELUActivation", lambda x, p: functional.gelu(x), {}, {}),
    "GELU by tanh": (
        "NewGELUActivation", lambda x, p: functional.gelu(x, approximate="tanh"), {}, {}
    ),
    "quick GELU": ("QuickGELUActivation", lambda x, p: x * torch.sigmoid(1.702 * x), {}, {}),
    "ReLU": ("ReLU", lambda x, p: functional.relu(x), {}, {}),
    "Tanh": ("Tanh", lambda x, p: torch.tanh(x), {}, {}),
    "Sigmoid": ("Sigmoid", lambda x, p: torch.sigmoid(x), {}, {}),
}  # fmt: skip


def by_autograd(
    forward: Forward, x: Array, params: Mapping[str, Array], upstream: Array, dtype: Any
) -> dict[str, Array]:
    leaves = {"in": x, **params}
    tensors = {k: torch.tensor(v, dtype=dtype, requires_grad=True) for k, v in leaves.items()}
    forward(tensors["in"], tensors).backward(torch.tensor(upstream, dtype=dtype))
    return {
        name: tensor.grad.to(torch.float64).numpy()
        for name, tensor in tensors.items()
        if tensor.grad is not None
    }


def upstream_of(name: str) -> Array:
    op = CASES[name][0]
    return array(*ROWS, OUT if op in ("Linear", "LoRALinear", "Conv1D") else WIDTH, seed=9)


@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_autograd_in_float64(name: str) -> None:
    op, forward, params, settings = CASES[name]
    x, upstream = array(*ROWS, WIDTH), upstream_of(name)
    right = by_autograd(forward, x, params, upstream, torch.float64)
    trained = {n for n in params if n not in ("base_layer.weight", "linear.weight")}
    for wrt in {"in", *trained}:
        found = gradient(op, x, upstream, wrt, params, **settings)
        np.testing.assert_allclose(found.value, right[wrt], rtol=1e-10, atol=1e-12, err_msg=wrt)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_spreads_hold_the_errors_of_torch(name: str, dtype: str) -> None:
    """And are not more than a hundred times their size, which would hide faults."""
    op, forward, params, settings = CASES[name]
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = array(40, 20, WIDTH).astype(kind)
    upstream = array(40, 20, upstream_of(name).shape[-1], seed=9).astype(kind)
    narrow = {n: p.astype(kind) for n, p in params.items()}
    wide = {n: p.astype(np.float32) for n, p in narrow.items()}
    got = by_autograd(
        forward, x.astype(np.float32), wide, upstream.astype(np.float32), getattr(torch, dtype)
    )
    trained = {n for n in params if n not in ("base_layer.weight", "linear.weight")}
    for wrt in {"in", *trained}:
        found = gradient(op, x, upstream, wrt, narrow, dtype, **settings)
        error = np.abs(got[wrt] - found.value) / found.spread
        assert error.max() < 6, wrt
        assert np.sqrt(np.mean(error**2)) < 2, wrt
        assert op == "ReLU" or np.sqrt(np.mean(error**2)) > 0.01, wrt


def test_the_gradient_of_an_embedding_adds_up_the_places_of_each_token() -> None:
    ids, upstream = np.array([[2, 0, 2]]), np.array([[[1, 2], [3, 4], [5, 6]]], np.float32)
    found = gradient("Embedding", ids, upstream, "weight", {"weight": array(4, 2)})
    assert found.value.tolist() == [[3, 4], [0, 0], [6, 8], [0, 0]]


@pytest.mark.parametrize("traditional", [False, True])
def test_the_gradient_of_a_rotation_is_the_rotation_back(traditional: bool) -> None:
    x = array(2, 3, 7, 8)
    settings = {"base": 100.0, "traditional": traditional}
    call = Call(op="RoPE", inputs={"in": x}, settings=settings)
    turned = REFERENCE.replay(call)
    assert turned is not None
    back = gradient("RoPE", x, turned.value.astype(np.float32), "in", **settings)
    np.testing.assert_allclose(back.value, x, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_a_cross_entropy(dtype: str) -> None:
    labels, upstream = np.array([3, 0, 999]), array(3, seed=5)
    z = torch.tensor(array(3, 1000), dtype=getattr(torch, dtype), requires_grad=True)
    each = functional.cross_entropy(z, torch.tensor(labels), reduction="none")
    each.backward(torch.tensor(upstream, dtype=each.dtype))
    logits, g = z.detach().float().numpy(), torch.tensor(upstream).to(each.dtype).float().numpy()
    call = Call(
        op="cross_entropy",
        inputs={"in": logits.astype(getattr(ml_dtypes, dtype, dtype)), "labels": labels},
        dtype=dtype,
    )
    found = REFERENCE.gradient(call, g, "in")
    assert found is not None
    wide = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    functional.cross_entropy(wide, torch.tensor(labels), reduction="none").backward(
        torch.tensor(g, dtype=torch.float64)
    )
    np.testing.assert_allclose(found.value, wide.grad.numpy(), rtol=1e-10, atol=1e-15)
    error = np.abs(z.grad.float().numpy() - found.value) / found.spread
    assert 0.01 < error.max() < 6


def test_what_has_no_formula_is_not_guessed() -> None:
    x = array(4, WIDTH)
    dropped = Call(
        op="LoRALinear",
        inputs={"in": x},
        params=CASES["adapter of mlx-lm"][2],
        settings={"scale": 2.0, "dropout.p": 0.1},
    )
    assert REFERENCE.gradient(dropped, array(4, OUT), "in") is None
    assert REFERENCE.gradient(Call(op="Linear", inputs={"in": x}), array(4, OUT), "in") is None
    assert not REFERENCE.differentiates("LlamaAttention")
    assert REFERENCE.differentiates("Linear")
