"""The float64 reference: its formulas and its spreads."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from tests.formulas import OUT, REFERENCE, WIDTH, array, in_bfloat16, linear, replay
from tracediff import stacks
from tracediff.errors import StackError
from tracediff.replaying import Call

# ---- formulas, against values worked by hand or by other means -----------------------------------


def test_products_by_hand() -> None:
    x = np.array([[1, 2]], np.float32)
    weight = np.array([[1, 0], [0, 3], [1, 1]], np.float32)
    bias = np.array([0, 0, 10], np.float32)
    assert replay("Linear", x, {"weight": weight, "bias": bias}).value.tolist() == [[1, 6, 13]]
    assert replay("Conv1D", x, {"weight": weight.T, "bias": bias}).value.tolist() == [[1, 6, 13]]
    ids = np.array([2, 0])
    assert replay("Embedding", ids, {"weight": weight}).value.tolist() == [[1, 1], [1, 0]]


def test_both_layouts_of_lora_by_hand() -> None:
    x = np.array([[1, 2]], np.float32)
    base, down, up = np.eye(2, dtype=np.float32), np.array([[1, 1]]), np.array([[1], [2]])
    down, up = down.astype(np.float32), up.astype(np.float32)
    peft = {"base_layer.weight": base, "lora_A.default.weight": down, "lora_B.default.weight": up}
    mlx = {"linear.weight": base, "lora_a": down.T, "lora_b": up.T}
    for params, op in ((peft, "Linear"), (mlx, "LoRALinear")):  # x + 2 (1 + 2) (1, 2)
        assert replay(op, x, params, scale=2.0).value.tolist() == [[7, 14]]
    dropped = Call(
        op="LoRALinear", inputs={"in": x}, params=mlx, settings={"scale": 2.0, "dropout.p": 0.1}
    )
    assert REFERENCE.replay(dropped) is None


def test_norms_by_hand() -> None:
    x = np.array([[3, 4]], np.float32)
    weight = np.array([1, 2], np.float32)
    root = math.sqrt(12.5 + 0.5)
    plain = replay("LlamaRMSNorm", x, {"weight": weight}, eps=0.5).value
    np.testing.assert_allclose(plain, [[3 / root, 8 / root]], rtol=1e-15)
    settings = REFERENCE.resolve("GemmaRMSNorm", {"eps": 0.5})
    offset = replay("GemmaRMSNorm", x, {"weight": weight}, **settings).value
    np.testing.assert_allclose(offset, [[6 / root, 12 / root]], rtol=1e-15)
    params = {"weight": weight, "bias": np.array([10, 0], np.float32)}
    layer = replay("LayerNorm", x, params, eps=0.75).value  # mean 3.5, variance 0.25 + eps
    np.testing.assert_allclose(layer, [[9.5, 1.0]], rtol=1e-15)


def test_what_is_exactly_zero_has_no_rounding_to_hide_a_fault_behind() -> None:
    x = np.array([0.0, 0.5, 3.0], np.float32)
    found = replay("SiLU", x, dtype="bfloat16")
    np.testing.assert_allclose(found.value, x / (1 + np.exp(-x)), rtol=1e-6)
    assert found.reach is not None
    assert found.reach[0] < 1e-30
    # bfloat16 has 8 significant bits: half of their spacing at 0.31 and at 2.9.
    assert found.reach[1] >= 2.0**-10
    assert found.reach[2] >= 2.0**-7


@pytest.mark.parametrize("traditional", [False, True])
def test_rope_is_a_rotation_of_complex_numbers(traditional: bool) -> None:
    x = array(2, 3, 7, 8)
    pairs = (x[..., 0::2], x[..., 1::2]) if traditional else (x[..., :4], x[..., 4:])
    numbers = pairs[0].astype(np.float64) + 1j * pairs[1]
    turned = np.stack(
        [
            numbers[..., position, :] * np.exp(1j * position * 100.0 ** (-np.arange(4) / 4))
            for position in range(7)
        ],
        axis=-2,
    )
    got = replay("RoPE", x, base=100.0, traditional=traditional).value
    halves = (got[..., 0::2], got[..., 1::2]) if traditional else (got[..., :4], got[..., 4:])
    np.testing.assert_allclose(halves[0] + 1j * halves[1], turned, atol=1e-14)


def test_positions_may_count_from_an_offset() -> None:
    x = array(1, 1, 9, 8)
    whole = replay("RoPE", x, base=100.0).value
    rest = replay("RoPE", x[..., 5:, :], base=100.0, offset=5).value
    np.testing.assert_allclose(rest, whole[..., 5:, :], atol=1e-14)


@pytest.mark.parametrize(
    ("op", "points"),
    [
        ("SiLU", {0.0: 0.0, 1.0: 0.7310585786300049, -20.0: -4.122307235558548e-08}),
        ("GELUActivation", {1.0: 0.8413447460685429, -1.0: -0.15865525393145707}),
        ("NewGELUActivation", {1.0: 0.8411919906082768, -1.0: -0.15880800939172324}),
        ("ReLU", {-2.0: 0.0, 2.0: 2.0}),
        ("Tanh", {0.5: 0.46211715726000973}),
    ],
)
def test_activations_at_known_points(op: str, points: Mapping[float, float]) -> None:
    x = np.array(list(points), np.float32)
    got = replay(op, x, **REFERENCE.resolve(op, {})).value
    np.testing.assert_allclose(got, list(points.values()), rtol=1e-8)


def test_cross_entropy_by_hand_leaves_ignored_labels_out() -> None:
    logits = np.log(np.array([[1, 3], [1, 1], [9, 1]], np.float64)).astype(np.float32)
    labels = np.array([0, -100, 0])
    settings = {"reduction": "mean", "ignore_index": -100}
    call = Call(op="cross_entropy", inputs={"in": logits, "labels": labels}, settings=settings)
    found = REFERENCE.replay(call)
    assert found is not None
    assert float(found.value) == pytest.approx((math.log(4) + math.log(10 / 9)) / 2, rel=1e-6)


def test_formulas_agree_with_torch_in_float64() -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    x, weight, bias = array(3, 5, 16), array(8, 16, seed=1), array(8, seed=2)
    gain, shift = array(16, seed=3), array(16, seed=4)
    t = {k: torch.tensor(v).double() for k, v in locals().items() if isinstance(v, np.ndarray)}
    cases = [
        (replay("Linear", x, {"weight": weight, "bias": bias}),
         functional.linear(t["x"], t["weight"], t["bias"])),
        (replay("RMSNorm", x, {"weight": gain}, eps=1e-3),
         functional.rms_norm(t["x"], (16,), t["gain"], 1e-3)),
        (replay("LayerNorm", x, {"weight": gain, "bias": shift}, eps=1e-3),
         functional.layer_norm(t["x"], (16,), t["gain"], t["shift"], 1e-3)),
        (replay("SiLU", x), functional.silu(t["x"])),
        (replay("GELU", x), functional.gelu(t["x"])),
        (replay("GELU", x, approximate="tanh"), functional.gelu(t["x"], approximate="tanh")),
        (replay("QuickGELUActivation", x), t["x"] * torch.sigmoid(1.702 * t["x"])),
    ]  # fmt: skip
    for found, right in cases:
        np.testing.assert_allclose(found.value, right.numpy(), rtol=1e-12, atol=1e-14)


def test_what_the_trace_does_not_hold_is_not_guessed() -> None:
    x = array(4, WIDTH)
    assert REFERENCE.replay(Call(op="Linear", inputs={"in": x})) is None
    norm = Call(op="RMSNorm", inputs={"in": x}, params={"weight": array(WIDTH)})
    assert REFERENCE.replay(norm) is None  # no eps
    assert REFERENCE.replay(Call(op="Dropout", inputs={"in": x}, settings={"p": 0.1})) is None
    assert not REFERENCE.supports("LlamaAttention")
    scaled = REFERENCE.resolve(
        "RoPE", {"config.rope_theta": 1e4, "config.rope_parameters.rope_type": "llama3"}
    )
    assert REFERENCE.replay(Call(op="RoPE", inputs={"in": x}, settings=scaled)) is None
    with pytest.raises(StackError, match="replayer 'abacus' is unknown"):
        stacks.load_replayer("abacus")


# ---- spreads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_spread_of_a_product_is_the_size_of_its_errors(outlier: float, offset: float) -> None:
    x, weight = array(64, 512) + np.float32(offset), array(128, 512, seed=1) + np.float32(offset)
    x[:, 3] *= outlier  # a massive activation
    found = replay("Linear", x, {"weight": weight})
    error = (linear(x, weight) - found.value) / found.spread
    assert np.abs(error).max() < 6
    assert 0.3 < np.sqrt(np.mean(error**2)) < 2


@pytest.mark.parametrize("parts", [1, 2])
def test_16_bit_products_may_store_their_result_and_their_partial_sums(parts: int) -> None:
    x = in_bfloat16(array(64, WIDTH))
    weight = in_bfloat16(array(OUT, WIDTH, seed=1))
    found = replay("Linear", x, {"weight": weight}, dtype="bfloat16")
    sums = [
        in_bfloat16(a @ b.T)
        for a, b in zip(np.split(x, parts, 1), np.split(weight, parts, 1), strict=True)
    ]
    error = (in_bfloat16(sum(sums)) - found.value) / found.spread
    assert np.abs(error).max() < 4
    assert 0.4 < np.sqrt(np.mean(error**2)) < 1.05
