"""Operations of PyTorch that run elsewhere than in a plain forward pass, or on other tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.op_traces import names, operations, sources  # noqa: E402
from tests.pytorch_jobs import Function, Recording, X, forward, recorder_into  # noqa: E402


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recording]:
    return recorder_into(tmp_path)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_repeats_is_recorded_once(
    record: Callable[..., Recording], reentrant: bool
) -> None:
    def inner(x: Any, w: Any) -> Any:
        return torch.tanh(x * w) * 2

    def outer(x: Any, w: Any) -> Any:
        return checkpoint(inner, x, w, use_reentrant=reentrant)

    found = []
    for function in (inner, outer):
        model = Function(function)
        x = X.clone().requires_grad_()

        def job(model: Any = model, x: Any = x) -> None:
            model(x).sum().backward()

        trace = record(job, "op")
        assert names(trace, "forward") == ["mul", "tanh", "mul"]
        by_order = {event.order: event for event in operations(trace)}
        found.append(
            sorted(
                (event.op, by_order[event.attributes["forward_order"]].op)
                for event in operations(trace, "backward")
                if "forward_order" in event.attributes and "view" not in event.op
            )
        )
    assert found[0] == found[1]
    assert ("aten.tanh_backward.default", "aten.tanh.default") in found[0]


def test_a_thread_of_the_model_is_seen(record: Callable[..., Recording]) -> None:
    def function(x: Any, w: Any) -> Any:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(torch.exp(x)))
        thread.start()
        thread.join()
        return results[0] * w

    trace = forward(record, function, X)
    assert names(trace) == ["exp", "mul"]
    assert sources(trace, operations(trace)[1]) == ["exp", "weight"]


def test_an_operation_of_the_users_own(record: Callable[..., Recording]) -> None:
    @torch.library.custom_op("tracediff_tests::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    trace = forward(record, lambda x, w: double(x) + w.detach(), X)
    assert names(trace) == ["tracediff_tests.double", "add"]
    np.testing.assert_array_equal(trace.trace.array(operations(trace)[0]), 2 * X.numpy())


def test_a_second_derivative(record: Callable[..., Recording]) -> None:
    model = Function(lambda x, w: (x * w) ** 3)
    x = X.clone().requires_grad_()

    def job() -> None:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.sum().backward()

    trace = record(job, "op")
    by_order = {event.order: event for event in operations(trace)}
    of = {
        by_order[event.attributes["forward_order"]].site.phase
        for event in operations(trace, "backward")
        if "forward_order" in event.attributes
    }
    assert "backward" in of


def test_a_higher_order_operator_is_one_operation(record: Callable[..., Recording]) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def function(x: Any, w: Any) -> Any:
        heads = (x * w).detach().reshape(1, 1, 2, 3)
        return flex_attention(heads, heads, heads)

    trace = forward(record, function, X)
    assert names(trace)[:2] == ["mul", "reshape"]
    assert "flex_attention" in names(trace)
    attention = next(e for e in operations(trace) if e.op == "flex_attention")
    heads = torch.tensor(X.numpy()).reshape(1, 1, 2, 3)
    expected = nn.functional.scaled_dot_product_attention(heads, heads, heads)
    np.testing.assert_allclose(trace.trace.array(attention), expected, rtol=1e-5, atol=1e-6)


def test_a_compiled_model_runs_eagerly(record: Callable[..., Recording]) -> None:
    model = Function(lambda x, w: torch.tanh(x * w))

    def job() -> None:
        torch.compile(model)(X)

    trace = record(job, "op")
    assert names(trace) == ["mul", "tanh"]
    assert trace.trace.run.notes == ("torch.compile ran eagerly while recording",)


def test_tensors_out_of_the_ordinary_are_computed_as_ever(
    record: Callable[..., Recording],
) -> None:
    results = []

    def function(x: Any, w: Any) -> Any:
        free = x.detach()
        mapped = torch.func.vmap(lambda row: row.sin() * w.detach())(free)
        slope = torch.func.grad(lambda t: (t**2).sum())(free)
        sparse = free.relu().to_sparse()
        summed = (sparse + sparse).to_dense()
        spectrum = torch.fft.fft(free)
        power = (spectrum * spectrum.conj()).real
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) * 2
        codes = torch.quantize_per_tensor(free, 0.1, 0, torch.qint8).dequantize()
        meta = torch.empty(3, device="meta") + 1
        with torch.inference_mode():
            inferred = free * 3
            inferred.t_()
        written = torch.add(free, 1, out=torch.empty(2, 3))
        grown = x.new_zeros(5).resize_(3, 2)[:2].zero_()
        empty = torch.cat([torch.empty(0), torch.empty(0)])
        assert meta.device.type == "meta"
        assert empty.numel() == 0
        parts = [mapped, slope, summed, power, codes, inferred.t(), written, nested[0][0] + free]
        results.append(sum(parts) + grown.sum())
        return results[-1] * w

    model = Function(function)
    model(X)
    trace = record(lambda: model(X), "op")
    assert torch.equal(*results)
    assert {"fft_r2c", "_fft_r2c"} & {e.attributes["canonical"] for e in operations(trace)}
    assert any("without plain values" in note for note in trace.trace.run.notes)
    orders = {event.order for event in operations(trace, leaves=True)}
    assert all(set(event.inputs) <= orders for event in operations(trace))
