"""The reference: float64 NumPy formulas of the operations that all stacks share.

Needs no framework, so any trace can be judged on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from tracediff import replaying
from tracediff.compare.figures import is_complex
from tracediff.replayers import reference_attention as attention
from tracediff.replayers import reference_elementwise as elementwise
from tracediff.replayers import reference_experts as experts
from tracediff.replayers import reference_glue as glue
from tracediff.replayers import reference_losses as losses
from tracediff.replayers import reference_norms as norms
from tracediff.replayers import reference_products as products
from tracediff.replayers import reference_rope as rope
from tracediff.replayers.reference_gradients import gradient_of
from tracediff.replaying import Call, Operation, Replayed, Use


@dataclass(frozen=True, slots=True)
class _Formula:
    """A function and what it takes: a call with other inputs is of another operation."""

    function: Callable[[Call], Replayed | None]
    ports: frozenset[str] = frozenset({"in"})
    takes_params: bool = True
    further: frozenset[str] = frozenset()


_TWO: Final = frozenset({"in", "other"})


def _plain(function: Callable[[Call], Replayed | None]) -> _Formula:
    return _Formula(function, takes_params=False)


_FORMULAS: Final[tuple[tuple[re.Pattern[str], _Formula], ...]] = tuple(
    (re.compile(pattern), formula)
    for pattern, formula in (
        (r"(NonDynamicallyQuantizable|LoRA)?Linear", _Formula(products.linear)),
        (r"Conv1D", _Formula(products.conv1d)),
        (r"Embedding", _Formula(products.embedding)),
        (r"\w*RMSNorm|T5LayerNorm", _Formula(norms.rms_norm)),
        (r"LayerNorm", _Formula(norms.layer_norm)),
        (r"Qwen3MoeSparseMoeBlock", _Formula(experts.sparse_moe)),
        (
            r"(Qwen3Moe|Mixtral)Experts",
            _Formula(experts.routed_experts, frozenset({"in", *experts.ROUTED})),
        ),
        (r"RoPE", _plain(rope.rope)),
        (r"SiLU(Activation)?", _plain(elementwise.silu)),
        (r"(New|Fast)?GELU(Activation)?|GELUTanh|PytorchGELUTanh", _plain(elementwise.gelu)),
        (r"QuickGELU(Activation)?", _plain(elementwise.quick_gelu)),
        (r"ReLU", _plain(elementwise.relu)),
        (r"Tanh", _plain(elementwise.tanh)),
        (r"Sigmoid", _plain(elementwise.sigmoid)),
        (
            r"Identity|Dropout",
            _Formula(elementwise.handed_through, takes_params=False, further=frozenset({"mask"})),
        ),
        (
            r"cross_entropy",
            _Formula(losses.cross_entropy, frozenset({"in", "labels"}), takes_params=False),
        ),
        (
            r"attention",
            _Formula(
                attention.attention,
                frozenset({"in", "key", "value", "mask"}),
                takes_params=False,
            ),
        ),
        (r"copy", _plain(glue.copy)),
        (r"add", _Formula(glue.add, _TWO, takes_params=False)),
        (r"multiply", _Formula(glue.multiply, _TWO, takes_params=False)),
        (r"gated SiLU", _Formula(partial(glue.gated, activation=elementwise.silu), _TWO, False)),
        (r"gated GELU", _Formula(partial(glue.gated, activation=elementwise.gelu), _TWO, False)),
    )
)

_BY_ROWS: Final = (products.linear, products.conv1d, experts.sparse_moe)

_IMPLIED: Final[tuple[tuple[re.Pattern[str], Mapping[str, Any]], ...]] = (
    (re.compile(r"(Gemma\w*|Qwen3Next)RMSNorm"), {"offset": 1.0}),
    (re.compile(r"(New|Fast)GELU(Activation)?|GELUTanh|PytorchGELUTanh"), {"approximate": "tanh"}),
    (re.compile(r"GELUActivation"), {"approximate": "none"}),
)


class Replayer(replaying.Replayer):
    """Recomputes module calls and losses in float64, from formulas with their sources."""

    stack: ClassVar[str] = "reference"

    def supports(self, op: str) -> bool:
        return _formula(op) is not None

    def is_by_rows(self, op: str) -> bool:
        formula = _formula(op)
        return formula is not None and formula.function in _BY_ROWS

    def resolve(self, op: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        resolved = {**_implied(op), **settings}
        if op == "RoPE":
            resolved |= rope.resolve(settings)
        return resolved

    def conventions(self, op: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return rope.conventions(settings) if op == "RoPE" else {}

    def replay(self, call: Call) -> Replayed | None:
        formula = _formula(call.op)
        if formula is None or formula.ports != call.inputs.keys() - formula.further:
            return None
        if (call.params and not formula.takes_params) or _is_complex(call):
            return None
        return formula.function(call)

    def differentiates(self, op: str) -> bool:
        return gradient_of(op) is not None

    def gradient(
        self,
        call: Call,
        upstream: NDArray[Any],
        wrt: str,
        rows: NDArray[np.intp] | None = None,
    ) -> Replayed | None:
        function = gradient_of(call.op)
        formula = _formula(call.op)
        if function is None or formula is None or call.inputs.keys() != formula.ports:
            return None
        if _is_complex(call) or is_complex(upstream):
            return None
        if rows is not None and wrt == "weight" and self.is_by_rows(call.op):
            # A row of (out, in) is of one output, a row of Conv1D's (in, out) of one input.
            if call.op == "Conv1D":
                call = replace(call, inputs={"in": call.inputs["in"][..., rows]})
            else:
                upstream = upstream[..., rows]
            return function(call, upstream, wrt)
        found = function(call, upstream, wrt)
        if found is None or rows is None:
            return found
        return replace(found, value=found.value[rows], spread=found.spread[rows])

    # Most traces hold no single operations, and their formulas are half of the reference.

    def recompute(self, operation: Operation) -> Replayed | None:
        from tracediff.replayers.reference_catalogue import operations

        return operations.recompute(operation)

    def pull_back(self, uses: Sequence[Use], dtype: str) -> Replayed | None:
        from tracediff.replayers.reference_catalogue import vjp

        return vjp.pull_back(uses, dtype)


def _is_complex(call: Call) -> bool:
    """Formulas of calls are of real numbers."""
    return any(map(is_complex, (*call.inputs.values(), *call.params.values())))


@lru_cache
def _implied(op: str) -> Mapping[str, Any]:
    return next((given for pattern, given in _IMPLIED if pattern.fullmatch(op)), {})


@lru_cache
def _formula(op: str) -> _Formula | None:
    return next((formula for pattern, formula in _FORMULAS if pattern.fullmatch(op)), None)
