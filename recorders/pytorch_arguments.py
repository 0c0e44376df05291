"""What an operation of PyTorch is given: tensors, numbers that stand for tensors, attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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


@dataclass(frozen=True, slots=True)
class Argument:
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


@dataclass(frozen=True, slots=True)
class Share:
    """What is recorded as one operation: indices of its arguments, and its outputs."""

    arguments: Sequence[int]
    outputs: Sequence[torch.Tensor]


def tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Argument]:
    """Tensor arguments in the order of the schema, those of lists one by one."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        for index, tensor in enumerate(flat([*args, *kwargs.values()])):
            yield Argument(tensor, True, False, False, index)
        return
    overwrites = base_name("pytorch", str(func)) in _OVERWRITING
    for place, argument in enumerate(schema.arguments):
        if place < len(args):
            value = args[place]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        written = argument.alias_info is not None and argument.alias_info.is_write
        read = not (written and (overwrites or argument.is_out))
        listed = not isinstance(value, torch.Tensor)
        for index, tensor in enumerate(flat(value)):
            yield Argument(tensor, read, written, listed, index)


def shares(
    func: Any, arguments: Sequence[Argument], outputs: Sequence[torch.Tensor]
) -> Iterator[Share]:
    """An operation as one, or one for each tensor where it works on lists (`_foreach_add_`)."""
    schema = getattr(func, "_schema", None)
    name = schema.name.partition("::")[2] if schema is not None else ""
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
    schema = getattr(func, "_schema", None)
    if schema is None:
        return {}, []
    takes_numbers = takes_scalar_operands(canonical_operation("pytorch", str(func)))
    attributes: dict[str, Any] = {}
    operands: list[Any] = []
    for place, argument in enumerate(schema.arguments):
        given = place < len(args) or argument.name in kwargs
        if not given:
            continue
        value = args[place] if place < len(args) else kwargs[argument.name]
        is_number = isinstance(value, bool | int | float)
        if isinstance(value, torch.Tensor):
            operands.append(None)
        elif is_number and takes_numbers and "Tensor" in str(argument.type):
            operands.append(value)
        elif is_number and takes_numbers and str(argument.type) == "number":
            if argument.name in _OPERANDS:
                operands.append(value)
            else:
                attributes[argument.name] = value
        elif (
            argument.name not in _SILENT
            and not flat(value)
            and (plain := _plain(value)) is not None
        ):
            attributes[argument.name] = plain
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
