"""Level `op-digest` on PyTorch: the digests of level `op`, and nothing else."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from pytorch_jobs import Recording, llama, recording  # noqa: E402
from test_record_operations_pytorch import Function, X, operations  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tracediff import kernels  # noqa: E402
from tracediff.summaries import SAMPLED, Summary, _Known  # noqa: E402


def test_digests_of_operations_without_their_payloads(tmp_path: Path) -> None:
    model = llama()
    traces = []
    for level in ("op", "op-digest"):
        with recording(tmp_path / level, level):
            model(input_ids=torch.arange(10).reshape(2, 5)).logits.sum().backward()
        model.zero_grad()
        traces.append(Recording(tmp_path / level))
    whole, short = traces
    assert whole.digests == short.digests
    assert len(list(operations(short))) > 100
    assert any(event.payload for event in operations(whole))
    assert not any(event.payload for event in short.events if event.kind == "tensor")


def test_a_view_has_the_digest_that_its_memory_has_by_then(tmp_path: Path) -> None:
    """At level op every value is hashed; at op-digest those of views are known."""

    def function(x: Any, w: Any) -> Any:
        y = x * w
        flat, turned, first = y.view(-1), y.t(), y[0]
        y.t().mul_(3)
        again, row = y.view(-1), y[:1]  # the memory of `first`, in another shape
        y.detach()[0].add_(1)
        return again.view(2, 3) + turned.t() + flat.view(1, 2, 3).squeeze(0) + first + row

    traces = []
    for level in ("op", "op-digest"):
        with recording(tmp_path / level, level):
            Function(function)(X)
        traces.append(Recording(tmp_path / level))
    assert traces[0].digests == traces[1].digests
    assert len({event.digest for event in operations(traces[1])}) >= 5


class Marked(torch.autograd.Function):  # type: ignore[misc]
    """Doubles what it is given, in place, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.mul_(2)


class Layers(nn.Module):
    """Modules whose tensors are changed, viewed and computed again between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.same = nn.Identity()

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        h.detach()[3].mul_(3)  # between the output of one module and the input of the next
        h = self.same(h.view(2, -1, WIDTH)).view(-1, WIDTH)
        h = Marked.apply(self.second(h))
        h = self.same(h.t()).t()
        h = checkpoint(self.third, h, use_reentrant=False)
        h = checkpoint(self.third, h, use_reentrant=True)
        return self.same(h.transpose(0, 1)[::2])


WIDTH = 160
LARGE = torch.linspace(-1, 1, 160 * WIDTH).reshape(160, WIDTH)  # 100 KB


def at_both_levels(
    folder: Path, make: Callable[[], nn.Module], job: Callable[[Any], Any]
) -> tuple[Recording, Recording]:
    found = []
    for level in ("op", "op-digest"):
        model = make()
        with recording(folder / level, level):
            job(model)
        found.append(Recording(folder / level))
    return found[0], found[1]


def test_values_of_modules_have_the_digest_of_their_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    of = _Known.of

    def counted(self: _Known, array: Any, sketched: bool) -> Summary:
        hashed[-1] += array.nbytes >= SAMPLED
        return of(self, array, sketched)

    def job(model: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(LARGE).square().sum().backward()
            optimizer.step()
        hashed.append(0)

    monkeypatch.setattr(_Known, "of", counted)
    hashed.append(0)
    with kernels.using("numpy"):  # where it can be counted
        whole, short = at_both_levels(tmp_path, Layers, job)
    assert whole.digests == short.digests
    assert [e.fingerprint[:7] for e in whole.events] == [e.fingerprint[:7] for e in short.events]
    modules = [e for e in short.events if e.site.port.startswith(("in", "out", "grad_out"))]
    large = [e for e in modules if not e.attributes.get("level") and math.prod(e.shape) > 16384]
    views = [e for e in operations(short) if "view_of" in e.attributes]
    assert len(large) > 30
    assert hashed[0] - hashed[1] > 0.8 * len(large) + len(views) / 2


@pytest.mark.parametrize("foreach", [True, False])
def test_what_an_update_works_on_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreach: bool
) -> None:
    hashed: Counter[bytes] = Counter()
    of = _Known.of

    def linear() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(WIDTH, WIDTH)

    def counted(self: _Known, array: Any, sketched: bool) -> Summary:
        found = of(self, array, sketched)
        hashed[found.digest] += 1
        return found

    def job(model: Any) -> None:
        hashed.clear()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
        for _ in range(4):
            optimizer.zero_grad()
            model(LARGE).square().sum().backward()
            optimizer.step()

    monkeypatch.setattr(_Known, "of", counted)
    with kernels.using("numpy"):  # where it can be counted
        whole, short = at_both_levels(tmp_path, linear, job)
    assert whole.digests == short.digests
    of_weight = [e for e in short.of("optimizer", step=3) if e.site.path == "weight"]
    for event in of_weight:
        if event.site.port in ("grad", "param"):
            assert hashed[event.digest] == 1
            assert event.sketch is not None  # which operations of this step have none of
    assert {e.site.port for e in of_weight} >= {"grad", "param"}


def behind_the_back(kind: str, y: Any) -> None:
    """Writes to memory in ways that are no operations, to one element or to all."""
    match kind:
        case "numpy":
            y.detach().numpy()[5, 5] = 7
        case "dlpack":
            np.from_dlpack(y.detach())[5, 5] = 7
        case "to_dlpack":
            torch.from_dlpack(torch.utils.dlpack.to_dlpack(y.detach())).numpy()[5, 5] = 7
        case "collective":
            dist.all_gather([y.detach()], torch.full_like(y, 7).detach())
        case "address":
            ctypes.memset(y.data_ptr(), 1, 4 * y.numel())
        case "operator":
            torch.ops.digests.seven(y.detach())
        case "extension":
            z = torch.zeros_like(y.detach())
            ctypes.memset(z.data_ptr() + 1000, 1, 4)
            nn.functional.relu_(y.detach())
            z.view(-1)
        case "zeroed":
            torch._foreach_zero_([y.detach()])
            ctypes.memset(y.data_ptr() + 1000, 1, 4)


def _seven(x: Any) -> None:
    x[5].fill_(7)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process only, and an operator whose schema does not say that it writes."""
    library = torch.library.Library("digests", "DEF")
    library.define("seven(Tensor x) -> ()")
    library.impl("seven", _seven, "CPU")
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    library._destroy()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "kind",
    [
        *("numpy", "dlpack", "to_dlpack", "collective"),
        *("address", "operator", "extension", "zeroed"),
    ],
)
def test_memory_that_no_operation_wrote_to(tmp_path: Path, kind: str) -> None:
    """Neither its views nor modules that are given it have the digest that it had before."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.same = nn.Identity()

        def forward(self, x: Any) -> Any:
            y = x * self.weight
            behind_the_back(kind, y)
            return self.same(y.view(-1)).view(2, -1)

    whole, short = at_both_levels(tmp_path, Writing, lambda model: model(LARGE))
    assert whole.digests == short.digests
    product = next(e for e in operations(short) if e.op == "aten.mul.Tensor")
    assert all(e.digest != product.digest for e in short.of("forward") if e.site.path == "same")


def test_calls_of_one_layer_have_the_line_of_each(tmp_path: Path) -> None:
    """The operations are PyTorch's own code: which line issued them is known from around."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

        def forward(self, x: Any) -> Any:
            x = self.layer(x)
            x = self.layer(x)
            return nn.functional.relu(x)

    model = Twice()
    with recording(tmp_path / "a", "op-digest"):
        for _ in range(2):
            model(X).sum().backward()
    found = [e for e in operations(Recording(tmp_path / "a")) if e.site.step == 1]
    first = Twice.forward.__code__.co_firstlineno
    forward = {}
    for event in found:
        if event.op in ("aten.addmm.default", "aten.relu.default"):
            forward[event.order] = int(event.source.rpartition(":")[2]) - first
            assert event.source.startswith("test_operation_digests.py:")
    assert list(forward.values()) == [1, 1, 2, 2, 3]
    for event in found:  # a gradient has the line of what it differentiates
        of = event.attributes.get("forward_order")
        if of in forward and event.site.phase == "backward":
            assert int(event.source.rpartition(":")[2]) - first == forward[of]
