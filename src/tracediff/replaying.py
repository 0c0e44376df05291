"""The Replayer contract: what recomputes one call from the values that a trace holds of it.

A replayer says which operations it can recompute; given the recorded inputs, parameters and
settings of a call, it returns the output together with how far rounding may have taken a correct
implementation away from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one operation, as far as a trace holds it.

    Attributes:
        op: Class of the module, or name of the operation, as the recorder wrote it.
        inputs: Port (`in`, `labels`, `in.mask`) -> array as recorded.
        params: Name below the module (`weight`, `lora_A.default.weight`) -> array as recorded.
        settings: Name below the module (`eps`, `base`), or of the configuration
            (`config.rope_theta`) -> value.
        dtype: Dtype of the recorded output, which decides its last rounding.
        value_only: Nobody asks for the spread: it may be left at zero where it is costly.
    """

    op: str
    inputs: Mapping[str, NDArray[Any]]
    params: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    value_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation, as far as a trace of level `op` holds it.

    Attributes:
        canonical: Its name in the vocabulary that all stacks share: `mul`, `rms_norm`.
        op: The stack's own name: `aten.mul.Tensor`, `mlx.fast.rms_norm`.
        inputs: Tensor arguments in order.
        operands: Data arguments in order, None for a tensor, where some are numbers; else ().
        args: Arguments that are no data, by the stack's own names.
        output: Which of its outputs is asked for, where there are several.
        outputs: How many there are.
        shape: Shape of that output as recorded.
        dtype: Dtype of that output, which decides its last rounding.
    """

    canonical: str
    op: str = ""
    inputs: tuple[NDArray[Any], ...]
    operands: tuple[Any, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    output: int = 0
    outputs: int = 1
    shape: tuple[int, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One place at which an operation reads a value, and what the backward pass brought there.

    Attributes:
        operation: The operation, with the forward pass's own inputs.
        place: Which of its tensor arguments the value is.
        cotangents: Gradient of the loss with respect to each of its outputs, None where an output
            has none.
    """

    operation: Operation
    place: int
    cotangents: tuple[NDArray[Any] | None, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The recomputed output, and what rounding does to a correct implementation of it.

    Attributes:
        value: float64, of the output's shape.
        spread: float64, of the same shape: standard deviation of the rounding error of each
            element, first order in the unit roundoff.
        derivation: Where the spread comes from, for people: `Linear K=576 float32`.
        reach: float64, of the same shape: the largest error of each element in any correct
            implementation, or None where the formula does not know all their roundings.
        once: The same of an implementation that rounds nothing but its result, where that is worth
            telling apart.
    """

    value: Floats
    spread: Floats
    derivation: str
    reach: Floats | None = None
    once: Floats | None = None


class Replayer(ABC):
    """Recomputes calls. One class per stack, exported as `Replayer`.

    Attributes:
        stack: Name of the stack, as in `<stack>_replayer.py`.
    """

    stack: ClassVar[str]

    @abstractmethod
    def supports(self, op: str) -> bool:
        """Whether calls of `op` can be recomputed, given all that they need."""

    def is_by_rows(self, op: str) -> bool:
        """Whether `op` is costly and treats all but the last dimension of `in` as so many rows that
        do not depend on each other, so that a few of them can stand for the rest."""
        return False

    def resolve(self, op: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings of a call under the names that `replay` reads, defaults of its class and
        of the configuration filled in, so that two stacks' settings can be told apart by name."""
        return settings

    def conventions(self, op: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Settings of `op` that the kind of model fixes, as the configuration names it: checkpoints
        of that kind were trained with them. Empty where that is not known."""
        return {}

    @abstractmethod
    def replay(self, call: Call) -> Replayed | None:
        """Recomputes the output of a call.

        Returns:
            None where the trace does not hold what the output depends on: a parameter, the random
            numbers of a dropout that is on, a setting of another kind than the formula knows.
        """

    def differentiates(self, op: str) -> bool:
        """Whether gradients of calls of `op` can be recomputed."""
        return False

    def gradient(
        self,
        call: Call,
        upstream: NDArray[Any],
        wrt: str,
        rows: NDArray[np.intp] | None = None,
    ) -> Replayed | None:
        """Recomputes what one call contributes to the gradient of its input or of a parameter.

        Args:
            call: As for `replay`; `dtype` is that of the gradient.
            upstream: Gradient of the loss with respect to the call's output.
            wrt: `in`, or the name of a parameter.
            rows: Rows of the parameter's first axis that are wanted, or None for all.
        """
        return None

    def recompute(self, operation: Operation) -> Replayed | None:
        """Recomputes one output of one operation; None where its formula is not known."""
        return None

    def pull_back(self, uses: Sequence[Use], dtype: str) -> Replayed | None:
        """The gradient of a value from those of all that was computed from it: the sum of the
        vector-Jacobian products of its uses.

        Args:
            uses: Every use of the value whose results have gradients, one or more.
            dtype: Of the gradient as recorded.

        Returns:
            Of the value's shape; None where an operation's derivative is not known.
        """
        return None
