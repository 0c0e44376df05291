"""What is kept of a tensor is the same wherever it lies.

There is no GPU here. What runs is the code for one: its kernels in Triton's interpreter, on tensors
of the host that are treated as if they lay on a device. Triton's compiler makes code for GPUs of
them, which is not run.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tracediff
from tests.kernel_values import needs_c
from tracediff import kernels
from tracediff.deferred import Deferred
from tracediff.kernels import parts, unpacked
from tracediff.recorders import pytorch_recorder
from tracediff.recorders.pytorch_device import DeviceReader
from tracediff.recorders.pytorch_tensors import to_numpy
from tracediff.summaries import Found
from tracediff.trace import Trace
from tracediff.trace.summary import digest, summary

pytest.importorskip("triton", reason="Triton has no wheels for this platform")
triton_kernels = importlib.import_module("tracediff.recorders.triton_kernels")
pytestmark = needs_c

NOTES: list[str] = []


def reading(note: Callable[[str], None] = NOTES.append) -> DeviceReader:
    return DeviceReader(note, is_elsewhere=lambda tensor: True, smallest=1)


@pytest.fixture(scope="module")
def reader() -> DeviceReader:
    """One for all: it takes a while to be trusted, interpreted."""
    return reading()


def read(reader: DeviceReader, tensor: torch.Tensor) -> Any:
    found, shard = reader.read_part(tensor)
    assert shard == ""
    return reader.arrived([found.array])[0] if isinstance(found, Deferred) else found


def assert_same(found: Any, tensor: torch.Tensor) -> None:
    """That what was found is what the host finds of the tensor."""
    array = to_numpy(tensor)
    assert array is not None
    packed = np.ascontiguousarray(array).reshape(array.shape)
    sketch = np.empty(parts.SKETCH_SIZE)
    of_bytes, statistics = summary(packed, brief=True, buckets=sketch)
    assert isinstance(found, Found)
    assert found.shape == tuple(tensor.shape)
    assert found.summary.dtype == array.dtype.name
    assert found.summary.digest == of_bytes == digest(packed)
    np.testing.assert_array_equal(unpacked(found.summary.statistics), unpacked(statistics))
    np.testing.assert_array_equal(found.summary.sketch, sketch)


def some(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(size) * 10.0 ** generator.integers(-6, 5, size)
    values[generator.random(size) < 0.05] = 0.0
    return torch.from_numpy(values).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_device_finds_what_the_host_finds(reader: DeviceReader, dtype: torch.dtype) -> None:
    for size in (256, 1023, 32_769):
        tensor = some(size, dtype, seed=size)
        assert_same(read(reader, tensor), tensor)
    assert not NOTES


def test_elements_that_are_no_numbers(reader: DeviceReader) -> None:
    tensor = some(3000, torch.float32)
    for values in ([np.nan], [np.inf, -np.inf], [-0.0, 1e-42], [np.nan] * 3000):
        tensor[: len(values)] = torch.tensor(values)
        assert_same(read(reader, tensor), tensor)


def test_any_layout(reader: DeviceReader) -> None:
    flat = some(4099, torch.bfloat16)
    for tensor in (
        flat[1:],  # bytes that are not where eight of them would be read
        flat[:4096].view(64, 64).T,
        flat[:4096].view(4, 32, 32)[:, ::2],
        flat[:1024].view(1, 1024).expand(3, 1024),
        flat[:2048].view(2, 1, 1024),
    ):
        assert_same(read(reader, tensor), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(1000),
        torch.linspace(0, 1, 1000, dtype=torch.float64),
        torch.zeros(0, 3),
        torch.tensor(1.5),
        torch.ones(9, dtype=torch.bfloat16),
        torch.complex(torch.ones(300), torch.zeros(300)).conj(),
        torch.eye(20).to_sparse(),
    ],
    ids=["integers", "float64", "empty", "scalar", "few", "conjugated", "sparse"],
)
def test_what_is_copied_instead(reader: DeviceReader, tensor: torch.Tensor) -> None:
    found, wanted = read(reader, tensor), to_numpy(tensor)
    assert isinstance(found, np.ndarray)
    assert wanted is not None
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(found, wanted)


def test_what_was_read_does_not_change_any_more(reader: DeviceReader) -> None:
    large, few = some(5000, torch.float32), torch.ones(5)
    before = large.clone()
    waiting = [reader.read_part(tensor)[0].array for tensor in (large, few)]
    large.zero_()
    few.zero_()
    found = reader.arrived(waiting)
    assert_same(found[0], before)
    np.testing.assert_array_equal(found[1], np.ones(5))


# ---- recordings ---------------------------------------------------------------------------------


class Net(nn.Module):
    """A model that changes what a module returned, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden.mul_(2)
        return self.second(torch.relu(hidden))


def train(path: Path, fault: float = 0.0, level: str = "digest") -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(12, 24)
    with tracediff.record(path, stack="pytorch", level=level, overwrite=True):
        for step in range(3):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            if step == 1:
                assert model.second.weight.grad is not None
                model.second.weight.grad[0, 0] += fault
            optimizer.step()


def read_by(monkeypatch: pytest.MonkeyPatch, reader: DeviceReader) -> None:
    monkeypatch.setattr(pytorch_recorder, "device_reader", lambda tape: reader)


def told(path: Path) -> list[list[tuple[Any, ...]]]:
    """All that a trace says of each event of each step, as far as it is computed."""
    with Trace(path) as trace:
        return [
            [
                (
                    str(event.site), event.kind, event.dtype, event.shape, event.dims,
                    event.digest, repr(event.fingerprint), event.inputs,
                    None if event.sketch is None else event.sketch.tobytes(),
                )
                for event in trace.events(step) if event.site.phase not in ("environment", "rng")
            ]
            for step in trace.steps
        ]  # fmt: skip


def test_a_recording_says_the_same_and_a_fault_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reader: DeviceReader
) -> None:
    train(tmp_path / "host")
    read_by(monkeypatch, reader)
    launched: list[torch.Tensor] = []
    launch = triton_kernels.moments

    class Counted:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def call(x: torch.Tensor, *args: Any) -> None:
                launched.append(x)
                launch[grid](x, *args)

            return call

    monkeypatch.setattr(triton_kernels, "moments", Counted())
    train(tmp_path / "device")
    assert len(launched) > 3 * 12  # weights, gradients, states, activations
    assert told(tmp_path / "host") == told(tmp_path / "device")
    with Trace(tmp_path / "device") as trace:
        assert not [note for note in trace.run.notes if "on the host" in note]
    train(tmp_path / "faulty", fault=1e-2)
    assert tracediff.bisect(tmp_path / "host", tmp_path / "device").first is None
    verdict = tracediff.bisect(tmp_path / "host", tmp_path / "faulty")
    assert verdict.first is not None
    assert verdict.first.site == "1/optimizer/second.weight:grad"


def test_payloads_are_those_of_the_moment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train(tmp_path / "host", level="module")
    copying = DeviceReader(NOTES.append, is_elsewhere=lambda tensor: True, smallest=sys.maxsize)
    read_by(monkeypatch, copying)
    train(tmp_path / "device", level="module")
    assert told(tmp_path / "host") == told(tmp_path / "device")
    with Trace(tmp_path / "host") as host, Trace(tmp_path / "device") as device:
        for step in host.steps:
            for a, b in zip(host.events(step), device.events(step), strict=True):
                assert a.payload == b.payload
                if a.payload is not None and a.dtype:
                    assert host.array(a).tobytes() == device.array(b).tobytes()


def wrong(grid: Any) -> Callable[..., None]:
    return lambda x, out, count: out.zero_()


def failing(grid: Any) -> Callable[..., None]:
    raise RuntimeError("no kernel image is available\nfor this device")


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (wrong, "its kernels find other bits than the host's"),
        (failing, "RuntimeError: no kernel image is available"),
    ],
    ids=["wrong", "failing"],
)
def test_a_device_that_cannot_be_trusted_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, launch: Any, reason: str
) -> None:
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: launch(grid)})()
    monkeypatch.setattr(triton_kernels, "buckets", kernel)
    notes: list[str] = []
    reader = reading(notes.append)
    for _ in range(2):
        tensor = some(1000, torch.float32)
        np.testing.assert_array_equal(read(reader, tensor), tensor.numpy())
    (note,) = notes
    assert note.startswith("Tensors on cpu are copied and summarised on the host: ")
    assert note.endswith(reason)


def test_without_the_c_kernels_tensors_are_copied() -> None:
    notes: list[str] = []
    with kernels.using("numpy"):
        tensor = some(1000, torch.float32)
        np.testing.assert_array_equal(read(reading(notes.append), tensor), tensor.numpy())
    assert len(notes) == 1


# ---- compilers ----------------------------------------------------------------------------------


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from tracediff.recorders import triton_kernels

words = {"words": "*i64", "secret": "*i64", "out": "*i64", "blocks": "i32"}
sources = [("hashed", words)] + [
    (name, {"x": f"*{dtype}", "out": "*fp64", "count": "i32"})
    for name in ("moments", "buckets")
    for dtype in ("fp32", "i16", "fp16")
]
for name, types in sources:
    source = ASTSource(getattr(triton_kernels, name), types, constexprs={})
    made = compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
    assert "ftz" not in made.asm["ptx"], "subnormal numbers are lost"
    print(name, len(made.asm["cubin"]))
"""


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernels_compile_for_gpus(architecture: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    made = subprocess.run(
        [sys.executable, "-c", COMPILE, str(architecture)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert [line.split()[0] for line in made.stdout.splitlines()] == [
        "hashed", *["moments"] * 3, *["buckets"] * 3
    ]  # fmt: skip


def test_the_secret_is_that_of_the_specification() -> None:
    source = Path(kernels.__file__).parent / "native" / "hash.c"
    written = source.read_text().split("hash_secret[192] = {")[1].split("}")[0]
    assert bytes(int(octet, 16) for octet in written.replace("\n", "").split(",")) == parts.SECRET
