"""Level `op-digest` on PyTorch: the digests of level `op`, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pytorch_jobs import Recording, llama, recording  # noqa: E402
from test_record_operations_pytorch import Function, X, operations  # noqa: E402


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
