"""What an operation of PyTorch is given: tensors, numbers that stand for tensors, attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import torch

from tracediff.operations import base_name, canonical_operation, takes_scalar_operands
from tracediff.recorders.operation_events import Place
from tracediff.recorders.pytorch_dataflow import Look, look_of

_OVERWRITING: Final = frozenset(
    {
        *("copy", "fill", "zero", "normal", "uniform", "bernoulli", "exponential", "random"),
        *("geometric", "log_normal", "cauchy"),
    }
)
"""In-place operations that do not read what they replace."""

_OPERANDS: Final = frozenset(
    {"self", "other", "value", "exponent", "weight", "min", "max", "fill_value"}
)
"""Names of arguments that are numbers where they could be tensors."""

_SILENT: Final = frozenset(
    {"pin_memory", "non_blocking", "memory_format", "layout", "device", "copy", "implicit"}
)
"""Arguments that change where a result lies, not what it is."""

_SKIPPED_NAMESPACES: Final = frozenset({"profiler"})
_UNINITIALISED: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Their values are whatever was in memory."""
_SCRATCH_NAMES: Final = frozenset({"philox_seed", "philox_offset", "rng_state", "unused"})
_SCRATCH: Final = {
    "mkldnn_rnn_layer": 3,
    "_cudnn_rnn": 4,
    "miopen_rnn": 4,
    "cudnn_batch_norm": 3,
    "_batch_norm_with_update": 3,
}
"""Results that are room for the backward pass, or seeds that nothing is drawn with: by name, and by
place where they have none."""
_FILLED: Final = frozenset({"zeros", "ones", "full"})
"""Canonical names of what makes memory that extensions in C++ then write to."""
_OWN: Final = frozenset({"aten", "prim", "prims"})
_UNTOLD: Final = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
"""Operations of PyTorch that write to running statistics though their schema does not say so."""
_COLLECTIVES: Final = "c10d"
"""Namespace of what `torch.distributed` calls, whose schemas do not say what is written to."""
_RECEIVING: Final = frozenset(
    {"tensors", "output", "outputs", "output_tensor", "output_tensors", "output_lists"}
)
"""Names of arguments that collectives write to."""
_SENDING: Final = frozenset({"send", "barrier", "monitored_barrier", "check_for_nan"})
"""Those that write to none of them."""
_OVERWRITTEN: Final = frozenset({"recv", "recv_any_source"})
"""Those that do not read the `tensors` that they replace; others add to them, or send them."""
_MOST_FUNCTIONS: Final = 4096
_ON_LISTS: Final = ("_foreach", "_fused_ad", "_fused_sgd")

_NUMBER: Final = (bool, int, float)
_ATOMS: Final = frozenset({type(None), bool, int, float, str})
"""Types of which a list is JSON as it stands, and holds no tensors."""


class Argument(NamedTuple):
    """A tensor that an operation is given.

    Attributes:
        look: Which memory it looks at, and how, before the operation runs.
        read: Whether its value matters: not for `out=` and what is filled.
        written: Whether the operation changes it in place.
        listed: Whether it is one of a list, and its place there.
    """

    tensor: torch.Tensor
    look: Look | None
    read: bool
    written: bool
    listed: bool
    place: int


class Part(NamedTuple):
    """What is recorded as one operation.

    Attributes:
        arguments: Indices of its arguments.
        place: None for another parameter of a list than those that are recorded.
    """

    arguments: Sequence[int]
    place: Place | None


Output = tuple[torch.Tensor, Look | None]
"""A tensor that an operation returns or has written to, and its look afterwards."""


class Given(NamedTuple):
    """What an operation is given.

    Attributes:
        arguments: Tensors in the order of the schema, those of lists one by one.
        attributes: Other arguments, by name.
        operands: Data arguments in order, None for a tensor and for a list of them, a tuple for a
            list of numbers, where some are numbers; else ().
    """

    arguments: list[Argument]
    attributes: dict[str, Any]
    operands: Sequence[Any]


class Parameter(NamedTuple):
    """One parameter of an operation.

    Attributes:
        read: Whether its value matters: not that of `out=`, and of what is filled.
        written: Whether the operation changes it in place.
        operand: Whether a number given for it stands for a tensor.
        number: Whether it takes a number that is an attribute.
        silent: Whether it says nothing about the result.
    """

    name: str
    read: bool
    written: bool
    operand: bool
    number: bool
    silent: bool


@dataclass(frozen=True, slots=True)
class Function:
    """An operation, whoever calls it: to find this takes longer than most operations.

    Attributes:
        name: What it is called: `aten.mul.Tensor`.
        parameters: None for a higher-order operator, which has no schema.
        writes: Whether it changes arguments in place.
        draws: Whether it draws from a generator, unless a probability of dropout says otherwise.
        dropout: That probability where none is given; None where it takes none.
        skipped: Whether it is not recorded.
        uninitialised: Whether the values of its results are whatever was in memory.
        scratch: Places of the results of which that is so.
        on_lists: Whether it works on lists, element by element (`_foreach_add_`).
        doubtful: Whether the memory of its tensors may be written to by what is not recorded, or
            by itself though its schema does not say so (`native_batch_norm`).
        fills: Whether that goes for its results only, which are new memory.
        collective: Whether other processes take part in it. What it writes is there once the
            program has waited for it.
    """

    name: str
    parameters: tuple[Parameter, ...] | None
    writes: bool
    draws: bool
    dropout: float | None
    skipped: bool
    uninitialised: bool
    scratch: tuple[int, ...]
    on_lists: bool
    doubtful: bool
    fills: bool
    collective: bool


@dataclass(slots=True)
class Call:
    """An operation that is to run.

    Attributes:
        node: Numbers of the nodes of the autograd graph that differentiate it.
    """

    func: Any
    function: Function
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    node: range

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)


_FUNCTIONS: Final[dict[int, tuple[Any, Function]]] = {}
"""By the operator's identity, as to hash one is a call of Python; each is kept alive."""


def function_of(func: Any) -> Function:
    """What is known about an operator as dispatch hands it over."""
    known = _FUNCTIONS.get(id(func))
    if known is None:
        if len(_FUNCTIONS) >= _MOST_FUNCTIONS:
            _FUNCTIONS.clear()
        known = _FUNCTIONS[id(func)] = func, _function_of(func)
    return known[1]


def _function_of(func: Any) -> Function:
    name = str(func)
    schema = getattr(func, "_schema", None)
    namespace, base = getattr(func, "namespace", ""), base_name("pytorch", name)
    collective = namespace == _COLLECTIVES
    parameters = None if schema is None else _parameters(name, schema, collective)
    writes = any(each.written for each in parameters or ())
    is_filled = canonical_operation("pytorch", name) in _FILLED
    return Function(
        name=name,
        parameters=parameters,
        writes=writes,
        draws=torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()),
        dropout=_default(schema, "dropout_p"),
        skipped=namespace in _SKIPPED_NAMESPACES,
        uninitialised=base in _UNINITIALISED,
        scratch=() if schema is None else _scratch(base, schema),
        on_lists=name.partition(".")[2].startswith(_ON_LISTS),
        doubtful=is_filled or namespace not in _OWN or base in _UNTOLD,
        fills=is_filled and not writes,
        collective=collective,
    )


def _default(schema: Any, name: str) -> Any:
    arguments = getattr(schema, "arguments", ())
    return next((each.default_value for each in arguments if each.name == name), None)


def _parameters(name: str, schema: Any, collective: bool) -> tuple[Parameter, ...]:
    overwrites = base_name("pytorch", name) in _OVERWRITING
    takes_numbers = takes_scalar_operands(canonical_operation("pytorch", name))
    found = []
    for argument in schema.arguments:
        kind, alias = str(argument.type), argument.alias_info
        written = alias is not None and alias.is_write
        read = not (written and (overwrites or argument.is_out))
        if collective:
            written, read = _exchanged(name, argument.name)
        number = takes_numbers and kind == "number"
        tensor = takes_numbers and "Tensor" in kind
        found.append(
            Parameter(
                name=argument.name,
                read=read,
                written=written,
                operand=tensor or (number and argument.name in _OPERANDS),
                number=number and argument.name not in _OPERANDS,
                silent=argument.name in _SILENT,
            )
        )
    return tuple(found)


def _scratch(base: str, schema: Any) -> tuple[int, ...]:
    """Places of results whose values mean nothing."""
    return tuple(
        place
        for place, result in enumerate(schema.returns)
        if result.name in _SCRATCH_NAMES or place == _SCRATCH.get(base)
    )


def _exchanged(name: str, argument: str) -> tuple[bool, bool]:
    """Whether a collective writes to an argument, and whether it reads it."""
    base = name.split(".")[1].rstrip("_")
    written = argument in _RECEIVING and base not in _SENDING
    return written, not written or (argument == "tensors" and base not in _OVERWRITTEN)


def given(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given:
    """Takes the arguments of a call apart, before it runs."""
    arguments: list[Argument] = []
    if function.parameters is None:
        for index, tensor in enumerate(flat([*args, *kwargs.values()])):
            arguments.append(Argument(tensor, look_of(tensor), True, False, False, index))
        return Given(arguments, {}, ())
    attributes: dict[str, Any] = {}
    operands: list[Any] = []
    has_numbers = False
    for parameter, value in _pairs(function.parameters, args, kwargs):
        if isinstance(value, torch.Tensor):
            operands.append(None)
            _, read, written, *_ = parameter
            arguments.append(Argument(value, look_of(value), read, written, False, 0))
        elif isinstance(value, _NUMBER) and parameter.operand:
            operands.append(value)
            has_numbers = True
        elif isinstance(value, _NUMBER) and parameter.number:
            attributes[parameter.name] = value
        elif function.on_lists and isinstance(value, list | tuple) and _is_json(value):
            operands.append(tuple(value))
            has_numbers = True
        elif value is not None:
            taken = _take(parameter, value, arguments, attributes)
            if function.on_lists and taken:
                operands.append(None)
    return Given(arguments, attributes, operands if has_numbers else ())


def operands_of(operands: Sequence[Any], place: int) -> Sequence[Any]:
    """Those of one element of the lists that an operation works on."""
    return [each[place] if isinstance(each, tuple) else each for each in operands]


def _pairs(
    parameters: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterable[tuple[Parameter, Any]]:
    positional = zip(parameters, args, strict=False)
    if not kwargs:
        return positional
    rest = parameters[len(args) :]
    named = [(each, kwargs[each.name]) for each in rest if each.name in kwargs]
    return chain(positional, named)


def _take(
    parameter: Parameter, value: Any, arguments: list[Argument], attributes: dict[str, Any]
) -> bool:
    """Adds a list of tensors to the arguments, or what is neither tensor nor number; says whether
    there were tensors."""
    tensors = [] if _is_json(value) else flat(value)
    for index, tensor in enumerate(tensors):
        arguments.append(
            Argument(tensor, look_of(tensor), parameter.read, parameter.written, True, index)
        )
    if not (tensors or parameter.silent) and (plain := _plain(value)) is not None:
        attributes[parameter.name] = plain
    return bool(tensors)


def shares(function: Function, arguments: Sequence[Argument]) -> list[Sequence[int]]:
    """Indices of the arguments of what is recorded as one operation: of all, or of each element of
    the lists that it works on."""
    if not function.on_lists:
        return [range(len(arguments))]
    common: list[int] = []
    count = 1 + max((argument.place for argument in arguments if argument.listed), default=-1)
    own: list[list[int]] = [[] for _ in range(count)]
    for index, argument in enumerate(arguments):
        (own[argument.place] if argument.listed else common).append(index)
    return [sorted((*common, *indices)) for indices in own]


def outputs_of(
    function: Function,
    arguments: Sequence[Argument],
    parts: Sequence[Part],
    outputs: Sequence[Output],
) -> list[Sequence[Output]]:
    """The outputs of each part: what it writes to, or else what it returns.

    Args:
        outputs: Those of the operation.
    """
    if not function.on_lists:
        return [outputs]
    written = [i for i, argument in enumerate(arguments) if argument.written]
    if not written:
        return [outputs[index : index + 1] for index in range(len(parts))]
    output_at = dict(zip(written, outputs, strict=True))
    return [[output_at[i] for i in part.arguments if i in output_at] for part in parts]


def blank_of(function: Function, result: Any) -> Sequence[torch.Tensor]:
    """The tensors of a result whose values are whatever was in memory."""
    if function.uninitialised:
        return flat(result)
    return flat([result[place] for place in function.scratch]) if function.scratch else ()


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a result or argument, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in flat(item)]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in flat(item)]
    return []


def _is_json(value: Any) -> bool:
    """Whether a value is no tensor and holds none, where that is easily seen."""
    if isinstance(value, list | tuple):
        return set(map(type, value)) <= _ATOMS
    return type(value) in _ATOMS


def _plain(value: Any) -> Any:
    """A JSON value, or None for what says nothing about the result (device, memory format)."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return list(value) if _is_json(value) else [_plain(item) for item in value]
    return None
