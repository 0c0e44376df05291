"""What a trace is made of: sites, events, runs, and pairs of events.

Plain frozen records with no behaviour beyond printing and parsing, so that every other module can
share them without sharing anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar, dataclass_transform

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_T = TypeVar("_T")

STAGES: Final = (
    "environment",
    "rendering",
    "loading",
    "rng",
    "forward",
    "loss",
    "backward",
    "optimizer",
    "trajectory",
)
"""The rungs of the ladder, in the order in which a training step passes them."""


class _Ranks(dict[str, int]):
    def __missing__(self, stage: str) -> int:
        return len(self)


STAGE_RANK: Final[Mapping[str, int]] = _Ranks((stage, rank) for rank, stage in enumerate(STAGES))
"""Place of a stage on the ladder; one that a trace names and the ladder has not comes last."""

EXACT_KINDS: Final = frozenset({"text", "ids", "labels", "mask", "state"})
"""Kinds compared bit for bit; tensors and scalars are held to a bound, settings by value."""

KINDS: Final = EXACT_KINDS | {"tensor", "scalar", "setting"}

CALLED_STAGES: Final = frozenset({"forward", "loss", "backward", "trajectory"})
"""Stages whose sites are reached by a call, and are therefore printed with `#call`."""

ROOT: Final = "root"
"""Path of the first root module itself; its submodules keep their own names."""

_SITE = re.compile(
    r"(?P<step>\d+)/(?P<phase>[a-z]+)/(?P<path>.*?)(?:#(?P<call>\d+))?(?::(?P<port>[^:#]+))?\Z",
    re.DOTALL,
)


_SAMPLE = re.compile(r"sample\[(0|[1-9]\d{0,17})\]\.(.+)", re.DOTALL)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _value(*, order: bool = False, kw_only: bool = False) -> Callable[[type[_T]], type[_T]]:
    """A dataclass that is frozen for the type checker, and only for it.

    A run makes an `Event` and a `Site` for each value, and to set the fields of an instance that
    Python keeps frozen takes four times as long.
    """
    return dataclass(slots=True, unsafe_hash=True, order=order, kw_only=kw_only)


def sample_step(path: str) -> tuple[int, str] | None:
    """Index and step of a rendered sample, from a path such as `sample[17].text`; else None."""
    match = _SAMPLE.fullmatch(path)
    return (int(match[1]), match[2]) if match else None


@_value(order=True)
class Site:
    """Where a value is recorded, printed `step/phase/path#call:port`.

    `#call` is left out where the stage has no calls (a parameter is loaded, not called) and the
    call is the first; `:port` is left out for rendering steps, which have one value each.
    """

    step: int
    phase: str
    path: str
    call: int = 0
    port: str = "out"

    def __str__(self) -> str:
        call = f"#{self.call}" if self.call or self.phase in CALLED_STAGES else ""
        port = "" if self.phase == "rendering" and self.port == "out" else f":{self.port}"
        return f"{self.step}/{self.phase}/{self.path}{call}{port}"

    @classmethod
    def parse(cls, text: str) -> Site:
        """Reads what `str(site)` printed.

        Raises:
            ValueError: `text` is not of the form `step/phase/path#call:port`.
        """
        match = _SITE.match(text)
        if match is None:
            raise ValueError(f"{text!r} is no site: expected step/phase/path#call:port")
        parts = match.groupdict()
        return cls(
            step=int(parts["step"]),
            phase=parts["phase"],
            path=parts["path"],
            call=int(parts["call"] or 0),
            port=parts["port"] or "out",
        )


@_value(kw_only=True)
class Event:
    """One recorded value. The payload is not a field: `trace.read(event)` fetches it.

    Attributes:
        order: Place in the execution order of the step, from 0.
        kind: One of `KINDS`.
        op: Class of the module, or canonical name of the operation, that produced the value.
        source: `file:line` of the user's code, or "".
        dtype: Logical dtype by its NumPy or ml_dtypes name (`float32`, `bfloat16`), "" for text.
        shape: Shape of the tensor, () for text, scalars and settings.
        dims: Names of the dimensions, as many as `shape` has, or () where unknown.
        shard: Which part of a distributed tensor the value is, as docs/trace-format.md describes;
            "" for a value that is whole.
        digest: xxh3-128 of the canonical bytes, 16 bytes.
        fingerprint: Layout-invariant statistics, float64, see `trace.summary.FINGERPRINT_FIELDS`;
            () for what is no tensor.
        sketch: 256 float64 buckets, or the 32 of a short one; None where none was kept.
        inputs: Orders of the events of the same step that this value was computed from, as far as
            the recorder knows.
        payload: Where the payload lies inside the segment, or None where none was kept.
        value: The value itself of a text, scalar or setting; None for tensors.
        attributes: What else the recorder knew, JSON types only.
        view: How the value is read out of another event's; None for one that was recorded so.
    """

    site: Site
    order: int
    kind: str = "tensor"
    op: str = ""
    source: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    dims: tuple[str, ...] = ()
    shard: str = ""
    digest: bytes = b""
    fingerprint: tuple[float, ...] = ()
    sketch: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)
    inputs: tuple[int, ...] = ()
    payload: str | None = None
    value: Any = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    view: View | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A value that was not recorded by itself: a part of another, or its rows in another order.

    Attributes:
        whole: The event whose payload it is read from.
        take: From the array of `whole` to the array of the view.
        alone: Only values of the one module are read so, what is computed around it is not.
    """

    whole: Event
    take: Callable[[NDArray[Any]], NDArray[Any]]
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run manifest: what was executed, by what, and how it ended.

    Attributes:
        status: `recording` while it runs (or if it was killed), then `finished` or `failed`.
        error: One line about the script's own exception, where `status` is `failed`.
        notes: What a reader must know to judge the trace, such as "torch.compile ran eagerly".
    """

    stack: str
    argv: tuple[str, ...] = ()
    level: str = "module"
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    source_digest: str = ""
    started: str = ""
    status: str = "recording"
    error: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two events taken for the same cross-check point.

    Attributes:
        matched_by: The pass that paired them: `rule`, `name`, `alias`, `order` or `parts`.
        layout: How to lay the target's payload over the baseline's: `same` or `transposed`.
    """

    baseline: Event
    target: Event
    matched_by: str
    layout: str = "same"
