"""What a bisection concludes. Plain frozen records; `as_json` gives the object of `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

OUTCOMES: Final = ("identical", "equivalent", "diverged", "incomparable", "not exercised")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFigures:
    """How far two tensors are apart, over the elements that count.

    Attributes:
        max_abs: Largest absolute difference, in the tensor's own unit.
        rel_l2: Norm of the difference over the norm of the baseline.
        max_rel: Largest difference of an element over max(its magnitude, the tensor's RMS).
        max_ulp: Largest difference in units in the last place of the coarser dtype; None where
            the dtypes have no common lattice.
        differing: Fraction of elements that are not bit-equal.
        estimated: The figures come from sketches or fingerprints, not from the values.
    """

    max_abs: float = 0.0
    rel_l2: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | None = 0
    differing: float = 0.0
    estimated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The largest error that rounding can explain at a place, with its derivation in words."""

    rel_l2: float
    derivation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One element that deviates: its index in the baseline's layout, and both values.

    Of a complex number it is one of the parts, and the index ends with 0 (real) or 1 (imaginary).
    """

    index: tuple[int, ...]
    baseline: Any
    target: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOperation:
    """One operation of a span.

    Attributes:
        where: Line of code that issued it, "" where unknown.
        error: Its error against its float64 formula on its own inputs (L2, relative), None where
            it has no formula.
        bound: What rounding explains of that error.
        errs: Whether the error is beyond what rounding explains.
    """

    site: str
    op: str
    where: str
    shape: tuple[int, ...]
    dtype: str
    error: float | None = None
    bound: float | None = None
    errs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSpan:
    """The smallest pair of operation spans whose inputs agree and whose outputs do not.

    Attributes:
        baseline, target: The operations of each side, in the order of execution.
        inputs: What both start from: the baseline's and the target's site.
        matched_by: The pass that paired the outputs.
        layout: How the target's output lies over the baseline's: same, reshape, transpose, head
            split, half or part; "" where it does not.
    """

    baseline: tuple[SpanOperation, ...]
    target: tuple[SpanOperation, ...]
    inputs: tuple[tuple[str, str], ...] = ()
    matched_by: str = ""
    layout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One site at which the two runs part.

    Attributes:
        site: The baseline's site as printed.
        kind: value, dtype, shape, missing, extra, order, nonfinite, text, ids, labels or setting.
        pattern: The shape of the error, or None: scaled, sign, transposed, permuted, shifted ...
        detail: The estimates that name the pattern, such as `{"factor": 4.0}`.
        meaning: One sentence on what such an error usually means, or "".
        origin: introduced, inherited or undecided.
        blame: baseline, target, both or undecided.
        deviations: The largest deviations, largest first.
        settings: Settings that differ and bear on this site: name, baseline's, target's value.
        where: Source line on each side, "" where unknown.
        span: The operations around it, where both traces hold operations.
    """

    stage: str
    step: int
    site: str
    path: str
    port: str
    kind: str
    call: int = 0
    order: int = 0
    target_site: str = ""
    op: Mapping[str, str] = field(default_factory=dict)
    pattern: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    meaning: str = ""
    origin: str = "introduced"
    blame: str = "undecided"
    error: ErrorFigures = field(default_factory=ErrorFigures)
    bound: Bound | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    deviations: tuple[Deviation, ...] = ()
    settings: tuple[tuple[str, Any, Any], ...] = ()
    span: OperationSpan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A compared site next to the first divergent one in execution order.

    `mark` is identical, equivalent or diverged; `error` is the relative L2 difference.
    """

    site: str
    op: str
    mark: str
    error: float
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """One rung of the ladder. `unmatched` counts (baseline-only, target-only) events.

    Attributes:
        differing: How many of the compared events are not bit-equal.
        diverged: How many of them are beyond their bound.
        worst: Largest relative L2 difference among the compared tensors.
    """

    stage: str
    outcome: str
    compared: int = 0
    differing: int = 0
    diverged: int = 0
    unmatched: tuple[int, int] = (0, 0)
    worst: float = 0.0
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """A group of events that only one side has, and why: they are counted, never dropped."""

    side: str
    example: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    bytes_read: int = 0
    bytes_stored: int = 0
    events: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay by substitution decided in the forward pass.

    Attributes:
        decided: Sites of which it says anything.
        introduced: Sites that err on the baseline's own inputs, in the order of execution.
        inherited: How many divergent sites do not.
    """

    trace: str
    decided: int = 0
    introduced: tuple[str, ...] = ()
    inherited: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of `bisect`: outcome, first divergence and the evidence around it.

    Attributes:
        coverage: Fraction of the events, of the side that has fewer, that were compared.
        neighbours: Sites around the first divergent one in execution order; it is among them.
        environment: Settings that differ: name, baseline's value, target's value.
        next_command: The command that a user would run next, or "".
        trajectory: Learning-curve rows: step, name, baseline's value, target's value.
        rank: Of runs of several processes, the rank that all of this is about; None otherwise.
    """

    outcome: str
    reason: str
    baseline: str
    target: str
    first: Divergence | None = None
    last_agreeing: str | None = None
    stages: tuple[StageResult, ...] = ()
    also: tuple[Divergence, ...] = ()
    coverage: float = 1.0
    matched_by: Mapping[str, int] = field(default_factory=dict)
    unmatched: tuple[Unmatched, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    environment: tuple[tuple[str, Any, Any], ...] = ()
    trajectory: tuple[tuple[int, str, float, float], ...] = ()
    warnings: tuple[str, ...] = ()
    next_command: str = ""
    replayed: Replayed | None = None
    rank: int | None = None
    cost: Cost = field(default_factory=Cost)

    @property
    def exit_code(self) -> int:
        """0 agree, 1 diverged, 125 incomparable, as `git bisect run` wants them."""
        return {"identical": 0, "equivalent": 0, "diverged": 1}.get(self.outcome, 125)
