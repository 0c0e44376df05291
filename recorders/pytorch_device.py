"""Tensors on other devices: where no payloads are kept, what is kept is found where they lie; else
they are copied.

Events do not wait for the device one by one. Kernels are queued behind those that make a value,
before any that change it; what they find comes to pinned memory of the host meanwhile. The events
are written once it is there: at the end of the step, or where somebody asks for a norm.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tracediff.deferred import Deferred, Waiting
from tracediff.kernels import parts, unpacked
from tracediff.recorders.pytorch_tensors import (
    ORDINARY,
    from_numpy,
    has_values,
    out_of_sight,
    read_part,
    to_numpy,
)
from tracediff.recording import Tape
from tracediff.summaries import Found, Summary
from tracediff.trace.summary import summary

MOST_WAITING: Final = 64 << 20
"""Bytes of the host that may wait for a device."""
_SMALL: Final = 1 << 16
"""Bytes of a tensor below which it is copied as it is: three kernels cost more."""
_DTYPES: Final = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_PROBE: Final = 70_001
"""Elements of a tensor that shows whether a device finds what the host does: more than one block of
each kind, and a part of one."""


@dataclass(frozen=True, slots=True)
class Pending:
    """What is on its way to the host.

    Attributes:
        host: The elements, or what was found of their parts, see `parts.Places`.
        is_found: Which of the two.
    """

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    host: torch.Tensor
    is_found: bool

    def arrive(self) -> NDArray[Any] | Found | None:
        """What the tape is given; the device must have ended what it was asked."""
        if not self.is_found:
            return to_numpy(self.host)
        elements = int(np.prod(self.shape, dtype=np.int64))
        words = self.host.numpy().view(np.uint64)
        nbytes = elements * self.dtype.itemsize
        digest, statistics, sketch = parts.put_together(words, elements, nbytes)
        if digest is None:
            raise RuntimeError("the C kernels were switched off while a recording used them")
        return Found(self.shape, Summary(digest, _DTYPES[self.dtype], statistics, sketch))


class DeviceReader:
    """Reads tensors as `to_numpy` does, but those on a device later.

    A device is trusted once it has found the same bits as the host of one tensor of the dtype; else
    tensors are copied to the host.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        is_elsewhere: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda,
        smallest: int = _SMALL,
    ) -> None:
        """
        Args:
            note: Adds a sentence to the trace.
            is_elsewhere: Whether a tensor lies on a device that this is for.
            smallest: Bytes from which a tensor is summarised where it lies.
        """
        self._note = note
        self._is_elsewhere = is_elsewhere
        self._smallest = max(smallest, parts.SHORTEST)
        self._agrees: dict[tuple[torch.device, torch.dtype], bool] = {}

    def read_part(self, tensor: torch.Tensor) -> tuple[NDArray[Any] | Deferred | None, str]:
        """As `pytorch_tensors.read_part`, with what stands for the array of a tensor on a device
        until `arrived` is asked for it."""
        return read_part(tensor, self._read if self._is_elsewhere(tensor) else None)

    def _read(self, tensor: torch.Tensor) -> NDArray[Any] | Deferred | None:
        if not (
            type(tensor) in ORDINARY
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.numel()
            and has_values(tensor)
        ):
            return to_numpy(tensor)
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            self._note("Values inside a CUDA graph cannot be read: they are not in the trace")
            return None
        device: Any = torch.cuda.device_of  # does nothing for a tensor of the host
        with out_of_sight(), device(tensor):
            plain = tensor.detach().contiguous()
            if plain.storage_offset() * plain.itemsize % 8:
                plain = plain.clone()  # it is hashed eight bytes at a time
            is_found = plain.nbytes >= self._smallest and self._is_trusted(plain)
            host = _to_host(_launched(plain) if is_found else plain)
        pending = Pending(plain.device, plain.dtype, tuple(plain.shape), host, is_found)
        return Deferred(pending, host.nbytes)

    def wait_on(self, waiting: Waiting[Any]) -> None:
        """Lets a tape's values wait for devices."""
        waiting.read, waiting.limit = self.arrived, MOST_WAITING

    def arrived(self, waiting: Sequence[Pending]) -> list[NDArray[Any] | Found | None]:
        """What was read, once it is here.

        Raises:
            RuntimeError: A device failed.
        """
        for device in {pending.device for pending in waiting}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return [pending.arrive() for pending in waiting]

    def _is_trusted(self, tensor: torch.Tensor) -> bool:
        key = device, dtype = tensor.device, tensor.dtype
        if dtype not in _DTYPES:
            return False
        if key not in self._agrees:
            self._agrees[key] = False
            try:
                self._agrees[key] = self._probed(device, dtype)
                reason = "its kernels find other bits than the host's"
            except Exception as error:  # whatever a compiler or a driver raises
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if not self._agrees[key]:
                self._note(f"Tensors on {device} are copied and summarised on the host: {reason}")
        return self._agrees[key]

    def _probed(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a device finds what the host does."""
        host = _probe(dtype)
        words = _to_host(_launched(host.to(device)))
        (found,) = self.arrived([Pending(device, dtype, tuple(host.shape), words, True)])
        array = to_numpy(host)
        if array is None or not isinstance(found, Found):
            return False
        sketch = np.empty(parts.SKETCH_SIZE)
        digest, statistics = summary(array, brief=True, buckets=sketch)
        known = found.summary
        pairs: Any = (unpacked(known.statistics), unpacked(statistics)), (known.sketch, sketch)
        is_equal = [np.array_equal(there, here, equal_nan=True) for there, here in pairs]
        return known.digest == digest and all(is_equal)


def device_reader(tape: Tape) -> DeviceReader | None:
    """What a recording reads tensors on CUDA devices with; None where operations are recorded, each
    of which is on the tape before the next."""
    if tape.policy.operations or not torch.cuda.is_available():
        return None
    keeps_payloads = tape.policy.level != "digest"
    return DeviceReader(tape.note, smallest=sys.maxsize if keeps_payloads else _SMALL)


def _launched(tensor: torch.Tensor) -> torch.Tensor:
    """Has a device find what there is of the parts of a contiguous tensor; see `parts.Places`."""
    from tracediff.recorders import triton_kernels as kernels

    count, size, flat = tensor.numel(), tensor.nbytes, tensor.reshape(-1)
    at, octets = parts.places(count, size), flat.view(torch.uint8)
    words = torch.empty(at.tail.stop, dtype=torch.int64, device=tensor.device)
    if blocks := at.hashed.stop // 8:
        grid = (-(-blocks // kernels.HASHED_AT_ONCE.value),)
        data = octets[: parts.HASHED * blocks].view(torch.int64)
        kernels.hashed[grid](data, _secret(tensor.device), words, blocks)
    values = flat.view(torch.int16) if tensor.dtype is torch.bfloat16 else flat
    for kernel, place, width in (
        (kernels.moments, at.moments, len(parts.FOUND)),
        (kernels.buckets, at.buckets, parts.SKETCH_SIZE),
    ):
        out = words[place].view(torch.float64)
        kernel[(len(out) // width,)](values, out, count)
    tail = octets[-parts.TAIL :]
    words[at.tail].view(torch.uint8)[: len(tail)].copy_(tail)
    return words


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, which is complete when the device has ended what it was asked so far."""
    return tensor.to("cpu", non_blocking=True, copy=True)


@functools.lru_cache
def _secret(device: torch.device) -> torch.Tensor:
    return from_numpy(np.frombuffer(parts.SECRET, "<i8"), device)


def _probe(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all sizes, zeros of both signs, subnormal ones, a NaN and infinities."""
    generator = np.random.default_rng(0)
    low, high = np.log10([torch.finfo(dtype).tiny / 100, torch.finfo(dtype).max / 10])
    values = generator.choice([-1, 1], _PROBE) * 10.0 ** generator.uniform(low, high, _PROBE)
    values[::7] = 0.0
    values[1::97] = -0.0
    values[[5, 40_000, _PROBE - 1]] = np.nan, np.inf, -np.inf
    return torch.from_numpy(values).to(dtype)
