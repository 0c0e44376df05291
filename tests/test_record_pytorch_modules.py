"""Ways in which a PyTorch module can run: compiled, checkpointed, hooked, failing."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_jobs import (
    Recording,
    llama,
    recorder_into,
    two_layers,
)
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recording]:
    return recorder_into(tmp_path)


@pytest.mark.parametrize("how", ["function", "before", "method", "submodule"])
def test_compiled_modules_run_eagerly_under_their_own_names(
    record: Callable[..., Recording], how: str
) -> None:
    model = two_layers()
    ran: list[Any] = []

    def compiler(graph: Any, _: Any) -> Any:
        ran.append(graph)
        return graph.forward

    early = torch.compile(model, backend=compiler)

    def job() -> None:
        compiled: nn.Module = early if how == "before" else model
        if how == "function":
            compiled = torch.compile(model, backend=compiler)
        elif how == "method":
            model.compile(backend=compiler)
        else:
            model[0] = torch.compile(model[0], backend=compiler)
        compiled(torch.randn(2, 3)).sum().backward()

    trace = record(job)
    assert not ran
    assert "0/forward/0#0:out" in trace.sites("forward")
    assert "0/loading/0.weight:param" in trace.sites("loading")
    assert "0/backward/0.weight#0:grad" in trace.sites("backward")
    assert not [site for e in trace.events if "_orig_mod" in (site := str(e.site))]
    assert trace.trace.run.notes == ("torch.compile ran eagerly while recording",)
    torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2))
    assert ran, "compiling works again once the recorder is detached"


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_records_what_runs_without_it(
    record: Callable[..., Recording], reentrant: bool
) -> None:
    ids = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(1))

    def job(checkpointing: bool) -> None:
        model = llama(use_cache=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if checkpointing:
            kwargs = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
            model.enable_input_require_grads()
        model.train()
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    plain = record(lambda: job(False))
    saved = record(lambda: job(True))
    assert any(site.endswith("layers.1.mlp.up_proj#1:grad_out") for site in plain.sites("backward"))
    for phase in ("forward", "backward", "optimizer"):
        digests = [{str(e.site): e.digest for e in t.of(phase)} for t in (plain, saved)]
        assert digests[1] == digests[0], phase
    assert len(saved.of("loss")) == len(plain.of("loss"))


def test_nested_checkpoints_and_the_same_block_twice(record: Callable[..., Recording]) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def inner(x: Any) -> Any:
        return checkpoint(block, x, use_reentrant=True)

    def job(checkpointing: bool) -> None:
        optimizer = torch.optim.SGD(block.parameters(), lr=0.0)
        x = torch.ones(2, 3, requires_grad=True)
        if checkpointing:
            out = checkpoint(lambda v: inner(inner(v)), x, use_reentrant=True)
        else:
            out = block(block(x))
        out.sum().backward()
        optimizer.step()

    plain, nested = record(lambda: job(False)), record(lambda: job(True))
    grads = [
        {str(e.site): e.digest for e in trace.of("backward") if e.site.port == "grad_out"}
        for trace in (plain, nested)
    ]
    assert len(grads[0]) == 6
    assert grads[1] == grads[0]
    assert plain.sites("forward") == nested.sites("forward")


def test_exception_inside_a_forward_leaves_the_tape_usable(
    record: Callable[..., Recording],
) -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Any, fail: bool = False) -> Any:
            y = self.layer(x)
            if fail:
                raise RuntimeError("on purpose")
            return y

    model = Fragile()

    def job() -> None:
        with pytest.raises(RuntimeError, match="on purpose"):
            model(torch.ones(1, 2), fail=True)
        model(torch.ones(1, 2)).sum().backward()

    trace = record(job)
    assert trace.sites("forward", 1)[-1] == "1/forward/root#0:out"
    assert trace.trace.find("1/forward/layer#0:in").inputs == (
        trace.trace.find("1/forward/root#0:in").order,
    )
    assert "1/backward/layer.weight#0:grad" in trace.sites("backward")


def test_outputs_are_what_the_caller_gets_and_unregistered_modules_have_a_path(
    record: Callable[..., Recording],
) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.others = [nn.Linear(2, 2)]

        def forward(self, x: Any) -> Any:
            return self.others[0](self.layer(x))

    model = Hidden()
    model.layer.register_forward_hook(lambda *_: torch.ones(1, 2))
    trace = record(lambda: model(torch.zeros(1, 2)))
    assert np.array_equal(trace["0/forward/layer#0:out"], [[1, 1]])
    assert np.array_equal(trace["0/forward/root.(Linear)#0:in"], [[1, 1]])


def test_what_is_recorded_is_saved_without_a_warning(record: Callable[..., Recording]) -> None:
    model, saved = nn.Linear(2, 2), io.BytesIO()

    def job() -> None:
        out = model(torch.ones(1, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that hooks of a tensor are not saved
            torch.save([out, *model.parameters()], saved)
        out.sum().backward()

    sites = record(job).sites("backward")
    assert {"0/backward/root#0:grad_out", "0/backward/weight#0:grad"} <= set(sites)
    saved.seek(0)
    found = torch.load(saved, weights_only=True)
    assert torch.equal(found[1], model.weight)


def test_operation_counters_of_the_user_do_not_see_the_recorder(
    record: Callable[..., Recording],
) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: list[int] = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            counts[-1] += 1
            return function(*args, **(kwargs or {}))

    def job() -> None:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters())
        counts.append(0)
        ids = torch.ones((1, 4), dtype=torch.long)
        with Counter():
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()

    job()
    record(job)
    assert counts[0] > 100
    assert counts[1] == counts[0]


def test_same_graph_differentiated_twice_and_without_parameters(
    record: Callable[..., Recording],
) -> None:
    model = two_layers()

    def job() -> None:
        out = model(torch.ones(1, 3, requires_grad=True))
        out.sum().backward(retain_graph=True)
        (2 * out).sum().backward()

    trace = record(job)
    once, again = trace["0/backward/3#0:grad_out"], trace["0/backward/3#0:grad_out@1"]
    assert np.array_equal(2 * once, again)
    assert np.array_equal(
        2 * trace["0/backward/0.weight#0:grad"], trace["0/backward/0.weight#1:grad"]
    )
