"""What an operation of PyTorch is given: tensors, numbers that stand for tensors, attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from tracediff.operations import base_name, canonical_operation, takes_scalar_operands

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


class Argument(NamedTuple):
    """A tensor that an operation is given.

    Attributes:
        read: Whether its value matters: not for `out=` and what is filled.
        written: Whether the operation changes it in place.
        listed: Whether it is one of a list, and its place there.
    """

    tensor: torch.Tensor
    read: bool
    written: bool
    listed: bool
    place: int


class Share(NamedTuple):
    """What is recorded as one operation: indices of its arguments, and its outputs."""

    arguments: Sequence[int]
    outputs: Sequence[torch.Tensor]


class Parameter(NamedTuple):
    """One parameter of an operation.

    Attributes:
        read: Whether its value matters: not that of `out=`, and of what is filled.
        written: Whether the operation changes it in place.
        operand: Whether a number given for it stands for a tensor.
        number: Whether it takes a number that is an attribute.
    """

    name: str
    read: bool
    written: bool
    operand: bool
    number: bool


@lru_cache(maxsize=4096)
def name_of(func: Any) -> str:
    """What an operation is called: `aten.mul.Tensor`."""
    return str(func)


@lru_cache(maxsize=4096)
def _parameters(func: Any) -> tuple[Parameter, ...] | None:
    """Those of its schema, which takes longer to read than most operations; None for a
    higher-order operator, which has none."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return None
    overwrites = base_name("pytorch", name_of(func)) in _OVERWRITING
    takes_numbers = takes_scalar_operands(canonical_operation("pytorch", name_of(func)))
    found = []
    for argument in schema.arguments:
        kind, alias = str(argument.type), argument.alias_info
        written = alias is not None and alias.is_write
        number = takes_numbers and kind == "number"
        tensor = takes_numbers and "Tensor" in kind
        found.append(
            Parameter(
                name=argument.name,
                read=not (written and (overwrites or argument.is_out)),
                written=written,
                operand=tensor or (number and argument.name in _OPERANDS),
                number=number and argument.name not in _OPERANDS,
            )
        )
    return tuple(found)


def _given(
    parameters: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Parameter, Any]]:
    for place, parameter in enumerate(parameters):
        if place < len(args):
            yield parameter, args[place]
        elif parameter.name in kwargs:
            yield parameter, kwargs[parameter.name]


def tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Argument]:
    """Tensor arguments in the order of the schema, those of lists one by one."""
    parameters = _parameters(func)
    if parameters is None:
        for index, tensor in enumerate(flat([*args, *kwargs.values()])):
            yield Argument(tensor, True, False, False, index)
        return
    for parameter, value in _given(parameters, args, kwargs):
        listed = not isinstance(value, torch.Tensor)
        for index, tensor in enumerate(flat(value)):
            yield Argument(tensor, parameter.read, parameter.written, listed, index)


def shares(
    func: Any, arguments: Sequence[Argument], outputs: Sequence[torch.Tensor]
) -> Iterator[Share]:
    """An operation as one, or one for each tensor where it works on lists (`_foreach_add_`)."""
    name = name_of(func).partition(".")[2]
    if not name.startswith(("_foreach", "_fused_ad", "_fused_sgd")):
        yield Share(range(len(arguments)), outputs)
        return
    count = 1 + max((a.place for a in arguments if a.listed), default=-1)
    written = [i for i, argument in enumerate(arguments) if argument.written]
    for place in range(count):
        own = [i for i, a in enumerate(arguments) if not a.listed or a.place == place]
        if written:
            yield Share(own, [arguments[i].tensor for i in own if arguments[i].written])
        else:
            yield Share(own, outputs[place : place + 1])


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a result or argument, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in flat(item)]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in flat(item)]
    return []


def plain_arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Any]]:
    """Arguments that are no tensors: attributes by name, and the operands where one is a number."""
    attributes: dict[str, Any] = {}
    operands: list[Any] = []
    for parameter, value in _given(_parameters(func) or (), args, kwargs):
        is_number = isinstance(value, bool | int | float)
        if isinstance(value, torch.Tensor):
            operands.append(None)
        elif is_number and parameter.operand:
            operands.append(value)
        elif is_number and parameter.number:
            attributes[parameter.name] = value
        elif (
            parameter.name not in _SILENT
            and not flat(value)
            and (plain := _plain(value)) is not None
        ):
            attributes[parameter.name] = plain
    return attributes, operands if any(operand is not None for operand in operands) else []


def _plain(value: Any) -> Any:
    """A JSON value, or None for what says nothing about the result (device, memory format)."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None
