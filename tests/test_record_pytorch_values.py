"""What the PyTorch recorder writes down: values, gradients, losses, updates and settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_jobs import (
    Recording,
    fine_tune,
    llama,
    lora_llama,
    recorder_into,
    two_layers,
)
from torch import nn
from torch.nn import functional as F

from tracediff.events import Run
from tracediff.recorders.pytorch_recorder import Recorder
from tracediff.recorders.pytorch_tensors import to_numpy
from tracediff.recording import Policy, Tape
from tracediff.trace import TraceWriter
from tracediff.trace.summary import digest


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recording]:
    return recorder_into(tmp_path)


# ---- values -------------------------------------------------------------------------------------


def test_in_place_operation_after_a_module_does_not_change_its_record(
    record: Callable[..., Recording],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    x = torch.randn(4, 3)
    trace = record(lambda: model(x).sum().backward())
    expected = (x @ model[0].weight.T + model[0].bias).detach().numpy()
    recorded = trace["0/forward/0#0:out"]
    assert (recorded < 0).any()
    assert np.allclose(recorded, expected, atol=1e-6)
    assert np.array_equal(trace["0/forward/1#0:out"], np.maximum(recorded, 0))
    passed = (model[2].weight.detach().numpy() * (recorded > 0)).astype(np.float32)
    assert np.allclose(trace["0/backward/0#0:grad_out"], passed)


@pytest.mark.parametrize("level", ["digest", "module"])
def test_a_change_between_two_modules_that_torch_does_not_count_is_seen(
    record: Callable[..., Recording], level: str
) -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            version = hidden._version
            hidden.data.mul_(2)
            assert hidden._version == version
            return self.second(hidden)  # type: ignore[no-any-return]

    model = Changed()
    trace = record(lambda: model(torch.ones(2, 3)), level)
    digests = dict(trace.digests)
    given = model.first(torch.ones(2, 3)).detach().numpy()
    assert digests["0/forward/first#0:out"] == digest(given)
    assert digests["0/forward/second#0:in"] == digest(2 * given)


def test_memory_can_be_resized_after_it_was_recorded(record: Callable[..., Recording]) -> None:
    model, outputs = nn.Linear(3, 2), []
    trace = record(lambda: outputs.append(model(torch.ones(1, 3)).detach()))
    outputs[0].resize_(5, 5)
    assert outputs[0].shape == (5, 5)
    assert trace["0/forward/root#0:out"].shape == (1, 2)


def test_tied_weights_are_loaded_once_with_their_other_names(
    record: Callable[..., Recording],
) -> None:
    model = llama(tie_word_embeddings=True)
    ids = torch.ones((1, 4), dtype=torch.long)
    trace = record(lambda: model(input_ids=ids, labels=ids).loss.backward())
    tied = trace.trace.find("0/loading/model.embed_tokens.weight:param")
    assert tied.attributes == {"trainable": True, "aliases": ["lm_head.weight"]}
    assert not [site for site in trace.sites("loading") if "lm_head" in site]
    grads = [e for e in trace.of("backward") if e.site.path.endswith("embed_tokens.weight")]
    assert len(grads) == 1
    assert np.array_equal(trace.trace.array(grads[0]), model.model.embed_tokens.weight.grad.numpy())


def test_buffers_strides_and_module_settings_are_recorded_as_loaded(
    record: Callable[..., Recording],
) -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4, eps=1e-3), nn.GELU(approximate="tanh")
    )
    model[0].weight = nn.Parameter(torch.randn(3, 4).T)
    model[1].register_buffer("cache", torch.arange(3), persistent=False)
    trace = record(lambda: model(torch.randn(5, 3)))
    assert trace.trace.find("0/loading/0.weight:param").attributes["strides"] == [1, 4]
    assert np.array_equal(trace["0/loading/0.weight:param"], model[0].weight.detach().numpy())
    assert np.array_equal(trace["0/loading/1.running_mean:buffer"], np.zeros(4, np.float32))
    assert trace.trace.find("0/loading/1.cache:buffer").attributes["persistent"] is False
    assert trace.settings()["2.eps"] == 1e-3
    assert trace.settings()["3.approximate"] == "tanh"


def test_tuples_dictionaries_and_model_outputs(record: Callable[..., Recording]) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 2, batch_first=True)
            self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

        def forward(self, x: Any, options: Any = None, *, scale: Any) -> Any:
            out, (h, _) = self.rnn(x)
            mixed, weights = self.attention(out, out, out)
            return {"weights": weights, "logits": mixed * scale, "state": [h, None], "n": 3}

    model = Many()
    x, scale = torch.randn(2, 5, 3), torch.tensor(2.0)

    def job() -> None:
        model(x, {"mask": torch.ones(2)}, scale=scale)["logits"].sum().backward()

    trace = record(job)
    sites = trace.sites("forward")
    assert [s.split("#0:")[1] for s in sites if "/root#" in s] == [
        "in",
        "in.options.mask",
        "in.scale",
        "out",
        "out.weights",
        "out.state.0",
    ]
    assert [s.split("#0:")[1] for s in sites if "/rnn#" in s] == [
        "in",
        "out",
        "out.1.0",
        "out.1.1",
    ]
    assert np.array_equal(trace["0/forward/root#0:in"], x.numpy())
    assert "0/backward/attention#0:grad_out" in trace.sites("backward")


def test_rotary_embedding_is_recorded_as_a_module(record: Callable[..., Recording]) -> None:
    model = llama()
    ids = torch.tensor([[5, 6, 7]])
    trace = record(lambda: model(input_ids=ids, labels=ids).loss.backward())
    path = "model.layers.0.self_attn"
    query = trace[f"0/forward/{path}.q_proj#0:out"].reshape(1, 3, 4, 4).transpose(0, 2, 1, 3)
    assert np.array_equal(trace[f"0/forward/{path}.rope#0:in"], query)
    assert trace[f"0/forward/{path}.rope#1:in"].shape == (1, 2, 3, 4)
    rotated = trace[f"0/forward/{path}.rope#0:out"]
    angle = np.arange(3)[:, None] * 10000.0 ** -np.array([0.0, 0.5])
    low, high = query[..., :2], query[..., 2:]
    expected = np.concatenate(
        [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)],
        axis=-1,
    )
    assert np.allclose(rotated, expected, atol=1e-6)
    event = trace.trace.find(f"0/forward/{path}.rope#0:out")
    assert (event.op, event.dims) == ("RoPE", ("batch", "heads", "sequence", "head_dim"))
    assert f"0/backward/{path}.rope#1:grad_out" in trace.sites("backward")
    hidden = trace.trace.find(f"0/forward/{path}#0:in")
    assert hidden.dims == ("batch", "sequence", "hidden")


def test_bfloat16_runs_keep_their_bits(record: Callable[..., Recording]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    def job() -> None:
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    trace = record(job)
    for site, tensor in {
        "0/loading/weight:param": before,
        "0/optimizer/weight:param": model.weight,
        "0/optimizer/weight:update": model.weight.detach() - before,
        "0/optimizer/weight:state.exp_avg": optimizer.state[model.weight]["exp_avg"],
    }.items():
        assert trace.trace.find(site).dtype == "bfloat16"
        bits = tensor.detach().view(torch.int16).numpy()
        assert np.array_equal(trace[site].view(np.int16), bits), site


def test_to_numpy_reads_every_layout_and_refuses_what_has_no_values() -> None:
    complex_tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert np.array_equal(to_numpy(complex_tensor.conj()), [1 - 2j, 3 + 4j])
    assert np.array_equal(to_numpy(complex_tensor.conj().imag), [-2, 4])
    eye = torch.eye(2)
    assert np.array_equal(to_numpy(eye.to_sparse()), np.eye(2))
    assert np.array_equal(to_numpy(eye.to_sparse_csr()), np.eye(2))
    strided = torch.arange(6.0).reshape(2, 3).T
    array = to_numpy(strided)
    assert array is not None
    assert array.ctypes.data == strided.data_ptr()
    assert not array.flags.writeable
    assert np.array_equal(array, [[0, 3], [1, 4], [2, 5]])
    assert np.array_equal(to_numpy(torch.ones(2, 1).expand(2, 3)[:, ::2]), np.ones((2, 2)))
    assert to_numpy(torch.empty(0, 3)).shape == (0, 3)
    assert to_numpy(torch.tensor(2.5, requires_grad=True)) == 2.5
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int64):
        assert to_numpy(torch.ones(3, dtype=dtype)).dtype.name == str(dtype).removeprefix("torch.")
    eighth = torch.tensor(0.125)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16):
        array = to_numpy(eighth.to(dtype))
        assert array is not None
        assert (array.dtype.name, float(array)) == (str(dtype).removeprefix("torch."), 0.125)
    assert to_numpy(torch.empty(2, device="meta")) is None
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert to_numpy(nested) is None
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    assert to_numpy(freed) is None


def test_an_array_outlives_its_tensor_and_leaves_it_as_it_was() -> None:
    array = to_numpy(torch.arange(1000.0))
    torch.full((1000,), 7.0)  # in the memory that a freed tensor would have left
    assert np.array_equal(array, np.arange(1000))
    tensor = torch.ones(3)
    assert to_numpy(tensor) is not None
    assert tensor.untyped_storage().resizable()


def test_hooks_of_the_user_on_what_a_module_returns_work_as_ever(
    record: Callable[..., Recording],
) -> None:
    """Those that were there before ours, those that come after it, and those that are removed."""
    seen: list[str] = []

    class Hooked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = 2 * x
            y.register_hook(lambda grad: seen.append("before") or 3 * grad)
            return y

    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    model = nn.Sequential(nn.Linear(2, 2), Hooked(), Plain())

    def job() -> None:
        out = model(torch.ones(1, 2))
        out.register_hook(lambda grad: seen.append("after") or 5 * grad)
        out.register_hook(lambda grad: seen.append("removed")).remove()
        assert out.grad_fn is not None
        out.sum().backward()

    trace = record(job)
    assert seen == ["after", "before"]
    assert trace["0/backward/2#0:grad_out"].tolist() == [[1, 1]]
    assert trace["0/backward/1#0:grad_out"].tolist() == [[30, 30]]
    assert trace["0/backward/0#0:grad_out"].tolist() == [[60, 60]]


# ---- losses, optimizers, generators, settings ---------------------------------------------------


def test_loss_is_recorded_once_with_what_it_divides_by(
    record: Callable[..., Recording],
) -> None:
    model = nn.Linear(3, 5)
    labels = torch.tensor([1, -100, 4, -100])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    x = torch.randn(4, 3)
    results: list[Any] = []

    def job() -> None:
        with torch.device("cpu"):  # a function mode calls the wrapped loss a second time
            results.append(criterion(model(x), labels))
        results[0].backward()

    trace = record(job)
    assert trace.sites("loss") == [
        "0/loss/loss.cross_entropy#0:in",
        "0/loss/loss.cross_entropy#0:labels",
        "0/loss/loss.cross_entropy#0:out",
        "0/loss/loss#0:out",
    ]
    out = trace.trace.find("0/loss/loss.cross_entropy#0:out")
    assert out.attributes == {
        "reduction": "mean",
        "ignore_index": -100,
        "label_smoothing": 0.1,
        "denominator": 2,
    }
    assert trace.trace.find("0/loss/loss.cross_entropy#0:labels").kind == "labels"
    final = trace.trace.find("0/loss/loss#0:out")
    assert final.inputs == (out.order,)
    assert trace["0/loss/loss#0:out"] == results[0].detach().numpy()
    assert trace["0/trajectory/loss#0:out"] == results[0].detach().numpy()


def test_optimizer_is_given_the_clipped_gradients_and_says_its_rates(
    record: Callable[..., Recording],
) -> None:
    model = two_layers()
    groups = [
        {"params": [model[0].weight], "lr": 0.5, "weight_decay": 0.25},
        {"params": [model[3].weight, nn.Parameter(torch.ones(2))]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.001))
    norms: list[Any] = []

    def job() -> None:
        for _ in range(2):
            (100 * model(torch.ones(1, 3)).sum() + groups[1]["params"][1].sum()).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()

    trace = record(job)
    sites = trace.sites("optimizer", 0)
    assert sites[0] == "0/optimizer/clip_grad_norm:out"
    assert trace["0/optimizer/clip_grad_norm:out"] == norms[0].numpy()
    assert trace.trace.find(sites[0]).attributes == {"max_norm": 0.5}
    assert sites[1:5] == [
        "0/optimizer/0.weight:grad",
        "0/optimizer/0.weight:hyper",
        "0/optimizer/3.weight:grad",
        "0/optimizer/3.weight:hyper",
    ]
    assert "0/optimizer/param[2]:update" in sites
    hyper = trace["0/optimizer/0.weight:hyper"]
    assert (hyper["lr"], hyper["weight_decay"], hyper["step"]) == (0.5, 0.25, 1)
    assert hyper["bias_correction"] is True
    hyper = trace["1/optimizer/3.weight:hyper"]
    assert (hyper["lr"], hyper["weight_decay"], hyper["step"]) == (0.001, 0.01, 2)
    grads = [trace[s] for s in sites if s.endswith(":grad")]
    expected = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads))
    assert trace["0/trajectory/grad_norm#0:out"] == pytest.approx(expected, rel=1e-12)
    assert trace["0/trajectory/lr#0:out"] == 0.5
    state = trace["0/optimizer/0.weight:state.exp_avg"]
    assert np.allclose(state, 0.1 * trace["0/optimizer/0.weight:grad"], rtol=1e-5)
    assert not [s for s in sites if s.endswith("state.step")]


def test_state_that_an_optimizer_brings_along_is_recorded_as_loaded(
    record: Callable[..., Recording],
) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    step()
    momentum = optimizer.state[model[3].weight]["momentum_buffer"].clone()
    trace = record(step)
    assert np.array_equal(trace["0/loading/3.weight:state.momentum_buffer"], momentum.numpy())


def test_closures_are_one_step(record: Callable[..., Recording]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.ones(2, 2)), torch.zeros(2, 1))
        loss.backward()
        return loss

    trace = record(lambda: optimizer.step(closure))
    assert trace.trace.steps == [0]
    assert len([s for s in trace.sites("forward") if s.endswith(":out")]) > 1
    assert np.array_equal(trace["0/optimizer/weight:param"], model.weight.detach().numpy())


def test_generator_states_are_recorded_at_each_step(record: Callable[..., Recording]) -> None:
    model = two_layers(dropout=0.5)
    states: list[Any] = []

    def job() -> None:
        for _ in range(2):
            states.append(torch.get_rng_state())
            model(torch.ones(1, 3))

    trace = record(job)
    for step, state in enumerate(states):
        event = trace.trace.find(f"{step}/rng/torch.cpu:state")
        assert np.array_equal(trace.trace.array(event), state.numpy())
        assert event.attributes["touched"] is (step > 0)


def test_resolved_configuration_and_adapter_scale_are_settings(
    record: Callable[..., Recording],
) -> None:
    model = lora_llama()
    ids = torch.ones((1, 3), dtype=torch.long)
    settings = record(lambda: model(input_ids=ids)).settings()
    layer = "base_model.model.model.layers.0"
    assert settings[f"{layer}.self_attn.q_proj.scale"] == 2.0
    assert settings[f"{layer}.self_attn.q_proj.lora_dropout.default.p"] == 0.1
    assert settings[f"{layer}.input_layernorm.eps"] == 1e-6
    assert settings["config.rope_theta"] == 10000.0
    assert settings["config.rope_parameters.rope_theta"] == 10000.0
    assert settings["config.num_key_value_heads"] == 2
    assert settings["torch.attn_implementation"] == "sdpa"


def test_digest_level_keeps_summaries_and_no_payload(record: Callable[..., Recording]) -> None:
    full, cheap = record(fine_tune), record(fine_tune, "digest")
    assert cheap.digests == full.digests
    kept = {e.kind for e in cheap.events if e.payload is not None}
    assert "tensor" not in kept
    assert "ids" in kept


def test_environment_and_versions_say_what_can_change_a_result(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run.zarr", Run(stack="pytorch")) as writer:
        recorder = Recorder(Tape(writer, Policy()))
        settings, versions = recorder.environment(), recorder.versions()
    assert settings["torch.num_threads"] == torch.get_num_threads()
    assert settings["torch.default_dtype"] == "float32"
    assert torch.__version__.startswith(versions["torch"])
    assert {"transformers", "peft"} <= set(versions)
