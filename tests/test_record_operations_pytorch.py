"""Operations of PyTorch: what is recorded of functions small enough to work out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.op_traces import names, operations, sources  # noqa: E402
from tests.pytorch_jobs import (  # noqa: E402
    Function,
    Recording,
    X,
    fine_tune,
    forward,
    llama,
    recorder_into,
    recording,
)
from tracediff.events import Run  # noqa: E402
from tracediff.recorders.pytorch_arguments import function_of  # noqa: E402
from tracediff.recorders.pytorch_dataflow import DataFlow, look_of  # noqa: E402
from tracediff.recorders.pytorch_recorder import Recorder  # noqa: E402
from tracediff.recording import Policy, Tape, attached  # noqa: E402
from tracediff.trace import TraceWriter  # noqa: E402


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recording]:
    return recorder_into(tmp_path)


def test_a_product_and_a_sum(record: Callable[..., Recording]) -> None:
    trace = forward(record, lambda x, w: x @ w.diag() + w, X)
    assert names(trace) == ["diag_embed", "matmul", "add"]
    product, total = operations(trace)[-2:]
    assert (product.op, total.op) == ("aten.mm.default", "aten.add.Tensor")
    assert sources(trace, total) == ["matmul", "weight"]
    assert sources(trace, product)[0] == "x"
    assert str(total.site) == "0/forward/root@add#0:out"
    assert total.source.startswith("test_record_operations_pytorch.py:")
    np.testing.assert_array_equal(trace.trace.array(total), X.numpy() + 1)


def test_a_norm_written_by_hand(record: Callable[..., Recording]) -> None:
    def norm(x: Any, w: Any) -> Any:
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    trace = forward(record, norm, X)
    assert names(trace) == ["pow", "mean", "add", "rsqrt", "mul", "mul"]
    power, mean, added, root, scaled, out = operations(trace)
    assert power.attributes["operands"] == [None, 2]
    assert mean.attributes["args"] == {"dim": [-1], "keepdim": True}
    assert added.attributes["operands"] == [None, 1e-6]
    assert [sources(trace, e) for e in (power, mean, added, root)] == [
        ["x"],
        ["pow"],
        ["mean"],
        ["add"],
    ]
    assert sources(trace, scaled) == ["x", "rsqrt"]
    assert out.inputs[1] == scaled.order


def test_an_operation_in_place_is_what_is_read_afterwards(
    record: Callable[..., Recording],
) -> None:
    def function(x: Any, w: Any) -> Any:
        y = x * w
        y.relu_()
        return y + 1

    trace = forward(record, function, X)
    product, relu, total = operations(trace)
    assert (relu.op, relu.attributes["canonical"]) == ("aten.relu_.default", "relu")
    assert relu.attributes["inplace"] == product.order
    assert total.inputs == (relu.order,)
    assert (trace.trace.array(product) < 0).any()  # a copy, taken before it was changed
    np.testing.assert_array_equal(trace.trace.array(relu), np.maximum(X.numpy(), 0))


def test_a_tensor_changed_through_a_view_of_it(record: Callable[..., Recording]) -> None:
    def function(x: Any, w: Any) -> Any:
        y = x * w
        y.view(-1)[0:3].mul_(5)
        return y + 1

    trace = forward(record, function, X)
    product, view, part, changed, again, total = operations(trace)
    assert names(trace) == ["mul", "reshape", "slice", "mul", "alias", "add"]
    assert view.attributes["view_of"] == product.order
    assert part.attributes["view_of"] == view.order
    assert changed.attributes["inplace"] == part.order
    assert set(again.inputs) == {product.order, changed.order}
    assert total.inputs == (again.order,)
    expected = X.numpy().copy()
    expected[0] *= 5
    np.testing.assert_array_equal(trace.trace.array(again), expected)


def test_what_another_view_wrote_elsewhere_changes_nothing(
    record: Callable[..., Recording],
) -> None:
    def function(x: Any, w: Any) -> Any:
        y = x * w
        left, right = y[:1], y[1:]
        left.mul_(5)
        return right + 1

    trace = forward(record, function, X.detach())
    assert names(trace) == ["mul", "slice", "slice", "mul", "add"]
    assert operations(trace)[-1].inputs == (operations(trace)[2].order,)


def test_memory_is_no_value_before_something_is_written_to_it(
    record: Callable[..., Recording],
) -> None:
    def function(x: Any, w: Any) -> Any:
        order = torch.tensor([2, 0, 1])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(3)
        buffer = torch.empty(2, 6)[:, :3]
        return (buffer.copy_(x) * w.detach())[:, inverse]

    trace = forward(record, function, X)
    assert "empty" not in "".join(names(trace))
    placed, copied, product, out = (
        next(e for e in operations(trace) if e.attributes["canonical"] == name)
        for name in ("scatter", "copy", "mul", "index")
    )
    assert sources(trace, placed) == ["constant", "arange"]
    assert sources(trace, copied) == ["x"]
    assert product.inputs[0] == copied.order
    np.testing.assert_array_equal(trace.trace.array(out), X.numpy()[:, [1, 2, 0]])


def test_room_for_the_backward_pass_is_no_value(record: Callable[..., Recording]) -> None:
    """What oneDNN leaves in its workspace differs from run to run."""
    lstm = nn.LSTM(3, 4)
    trace = forward(record, lambda x, w: lstm((x * w)[:, None])[0], X)
    layers = [e for e in operations(trace) if e.op.startswith("aten.mkldnn_rnn_layer")]
    if not layers:
        pytest.skip("this build of PyTorch computes an LSTM otherwise")
    assert [e.site.port for e in layers] == ["out.0", "out.1", "out.2"]


@pytest.mark.parametrize(
    ("name", "scratch"),
    [
        ("mm", ()),
        ("native_dropout", ()),
        ("_cudnn_rnn", (4,)),
        ("_scaled_dot_product_flash_attention", (6, 7)),
        ("_scaled_dot_product_efficient_attention", (2, 3)),
        ("_scaled_dot_product_flash_attention_for_cpu", ()),
    ],
)
def test_results_that_mean_nothing(name: str, scratch: tuple[int, ...]) -> None:
    """By the schemas: seeds of kernels that draw nothing, and what cuDNN keeps for itself."""
    assert function_of(getattr(torch.ops.aten, name).default).scratch == scratch


def test_memory_that_is_used_again_is_not_mistaken(record: Callable[..., Recording]) -> None:
    def function(x: Any, w: Any) -> Any:
        for _ in range(5):
            (x * w).abs()  # freed each time, so that the next may have its address
        return x - 1

    trace = forward(record, function, X)
    assert names(trace) == ["mul", "abs"] * 5 + ["sub"]
    assert all(sources(trace, e)[0] == "x" for e in operations(trace)[::2])


def test_nothing_is_kept_of_memory_that_is_freed() -> None:
    """What is kept lies between the tensors, and tears up the room that they leave."""
    flow, tensor = DataFlow(), torch.ones(3)
    look = look_of(tensor)
    flow.hold(tensor, look, 7, written=False)
    view = tensor.view(1, 3)
    del tensor
    assert flow.current(look) == 7  # a view of it lives
    del view
    assert flow.held(look) is None


def test_dropout_draws(record: Callable[..., Recording]) -> None:
    trace = forward(record, lambda x, w: nn.functional.dropout(x * w, 0.5), X)
    drawing = [e.attributes["canonical"] for e in operations(trace) if e.attributes.get("rng")]
    assert drawing == ["bernoulli"]


def test_the_gradient_of_a_product(record: Callable[..., Recording]) -> None:
    model = Function(lambda x, w: x * w)
    x = X.clone().requires_grad_()

    def job() -> None:
        model(x).backward(torch.full((2, 3), 3.0))

    trace = record(job, "op")
    product = operations(trace, "forward")[0]
    of_w, of_x, summed = (e for e in operations(trace, "backward") if e.op != "aten.view.default")
    assert {of_x.op, of_w.op} == {"aten.mul.Tensor"}
    assert summed.op.startswith("aten.sum")
    for event in (of_x, of_w, summed):
        assert event.attributes["forward_order"] == product.order
        assert event.attributes["autograd_node"] == "MulBackward0"
        assert event.source == product.source
        assert event.site.path.startswith("root@")
    by_operand = {sources(trace, event)[1]: event for event in (of_x, of_w)}
    np.testing.assert_array_equal(trace.trace.array(by_operand["x"]), 3 * X.numpy())
    np.testing.assert_array_equal(trace.trace.array(summed), 3 * X.numpy().sum(0, keepdims=True))


ADAMW = ["mul", "lerp", "mul", "addcmul", "sqrt", "div", "add", "addcdiv"]
"""torch.optim.adamw without amsgrad, per parameter: decay, both moments, denominator, step."""


@pytest.mark.parametrize("foreach", [False, True])
def test_an_update_by_adamw(record: Callable[..., Recording], foreach: bool) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)

    def job() -> None:
        for _ in range(2):
            model(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = record(job, "op")
    for name in ("weight", "bias"):
        events = [
            e
            for e in operations(trace, "optimizer")
            if e.site.step == 1 and e.site.path.startswith(f"{name}@")
        ]
        assert sorted(e.attributes["canonical"] for e in events) == sorted(ADAMW)
        last = next(e for e in events if e.attributes["canonical"] == "addcdiv")
        np.testing.assert_array_equal(trace.trace.array(last), trace[f"1/optimizer/{name}:param"])
        moment = next(e for e in events if e.attributes["canonical"] == "lerp")
        assert sources(trace, moment)[0] == f"{name}:state.exp_avg"


def test_recording_changes_no_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    losses, weights = fine_tune(steps=1)
    torch.manual_seed(0)
    with recording(tmp_path / "run", "op"):
        recorded_losses, recorded = fine_tune(steps=1)
    assert losses == recorded_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, recorded, strict=True))


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that return floating-point tensors of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensor = result[0] if isinstance(result, tuple | list) else result
        named = func._schema.name.partition("::")[2]
        is_float = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        if is_float and not named.startswith("empty") and not self._same(tensor, args):
            self.seen[str(func)] += 1
        return result

    @staticmethod
    def _same(tensor: Any, args: Any) -> bool:
        """Whether an operation only handed through what it was given, as `detach` does."""
        given = args[0] if args else None
        return (
            isinstance(given, torch.Tensor)
            and tensor.data_ptr() == given.data_ptr()
            and (tensor.shape, tensor.stride()) == (given.shape, given.stride())
        )


def test_every_floating_point_operation_of_a_llama_is_there(
    record: Callable[..., Recording],
) -> None:
    model = llama()
    ids = torch.arange(10).reshape(2, 5)

    def job() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    with Counting() as counting:
        job()
    model.zero_grad()
    trace = record(job, "op")
    found = Counter(
        event.op
        for event in operations(trace)
        if event.dtype.startswith("float") and event.site.port in ("out", "out.0")
    )
    assert sum(counting.seen.values()) > 150
    assert not counting.seen - found
    norm = next(e for e in operations(trace) if e.attributes["canonical"] == "rsqrt")
    assert norm.source.startswith("modeling_llama.py:")
    assert norm.attributes["user_line"].startswith("test_record_operations_pytorch.py:")


def test_recorded_inputs_give_the_recorded_outputs(record: Callable[..., Recording]) -> None:
    """The graph is right where the operation, run again on its inputs' payloads, gives its own."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ids = torch.arange(10).reshape(2, 5)

    def job() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    trace = record(job, "op")
    by_order = {event.order: event for event in trace.events if event.site.step == 0}
    run = {"mul": torch.mul, "add": torch.add, "matmul": torch.matmul, "sub": torch.sub}
    checked: Counter[str] = Counter()
    for event in operations(trace):
        name = event.attributes["canonical"]
        if name not in run or len(event.inputs) != 2 or event.attributes.get("args"):
            continue
        a, b = (torch.tensor(trace.trace.array(by_order[order])) for order in event.inputs)
        assert torch.allclose(run[name](a, b), torch.tensor(trace.trace.array(event)), atol=1e-6)
        checked[event.site.phase] += 1
    assert checked["forward"] > 30
    assert checked["backward"] > 60


# ---- selection ----------------------------------------------------------------------------------


def select(path: Path, job: Callable[[], Any], **policy: Any) -> Recording:
    writer = TraceWriter(path, Run(stack="pytorch", level="op"))
    tape = Tape(writer, Policy(level="op", **policy))
    with tape, attached(Recorder(tape)):
        job()
    return Recording(path)


@pytest.mark.parametrize("only", ["model.layers.1.mlp", "model.layers.1.m*"])
def test_only_one_module(tmp_path: Path, only: str) -> None:
    model = llama()
    ids = torch.arange(10).reshape(2, 5)

    def job() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    trace = select(tmp_path / "run", job, only=only)
    paths = {event.site.path.partition("@")[0] for event in operations(trace, leaves=True)}
    inside = "model.layers.1.mlp"
    assert paths == {f"{inside}{rest}" for rest in ("", ".gate_proj", ".up_proj", ".down_proj")} | {
        f"{inside}.act_fn"
    }
    assert {event.site.phase for event in operations(trace)} == {"forward", "backward"}
    entering = next(e for e in operations(trace, leaves=True) if e.attributes.get("name") == "in")
    np.testing.assert_array_equal(trace.trace.array(entering), trace[f"0/forward/{inside}#0:in"])
    kept = {event.site.path.partition("@")[0] for event in trace.events if event.payload}
    kept -= {event.site.path for event in trace.events if event.kind != "tensor"}
    assert all(path.startswith(inside) for path in kept)


@pytest.mark.parametrize("foreach", [False, True])
def test_only_one_parameter_of_an_update(tmp_path: Path, foreach: bool) -> None:
    """Updates of all parameters at once hold nothing of the others, not even their values."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)

    def job() -> None:
        model(X).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()

    trace = select(tmp_path / "run", job, only="1.weight")
    found = operations(trace, "optimizer", leaves=True)
    shared = [event for event in found if not event.site.path.startswith("1.weight@")]
    assert all(event.attributes["name"] == "constant" and not event.shape for event in shared)
    assert "addcdiv" in {event.attributes["canonical"] for event in found}


def test_only_some_steps(tmp_path: Path) -> None:
    model = Function(lambda x, w: x * w)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def job() -> None:
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()

    trace = select(tmp_path / "run", job, steps=[range(1, 2)])
    assert {event.site.step for event in operations(trace)} == {1}
