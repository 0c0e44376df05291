"""What MLX computes with: functions of `mlx.core`, operators and methods of arrays."""

from __future__ import annotations

import gc
import re
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

_SUBMODULES: Final = ("", "fast", "linalg", "fft", "random", "distributed")

_NO_OPERATIONS: Final = frozenset(
    {
        *("eval", "async_eval", "grad", "value_and_grad", "vjp", "jvp", "vmap", "compile"),
        *("checkpoint", "disable_compile", "enable_compile", "save", "save_gguf", "savez"),
        *("save_safetensors", "savez_compressed", "load", "export_function", "export_to_dot"),
        *("exporter", "import_function", "empty", "empty_like", "from_dlpack", "depends"),
        *("metal_kernel", "cuda_kernel", "precompiled_cuda_kernel", "init", "is_available"),
        *("seed", "broadcast_shapes", "result_type", "einsum_path", "issubdtype", "isdtype"),
        *("can_cast", "stream", "synchronize", "printoptions"),
    }
)
"""Functions that compute no array, or whose result is no function of their arguments."""

_MANAGEMENT: Final = ("_", "get_", "set_", "reset_", "clear_", "new_", "default_", "device_")
"""Beginnings of the names of functions that manage memory, streams and devices."""

_OPERATORS: Final = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "div": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "neg": "negative",
    "abs": "abs",
    "invert": "bitwise_invert",
    "getitem": "getitem",
    "setitem": "setitem",
}

_IN_PLACE: Final = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("lshift", "rshift"),
)

_METHODS: Final = (
    *("abs", "all", "any", "argmax", "argmin", "astype", "conj", "cos", "cummax", "cummin"),
    *("cumprod", "cumsum", "diag", "diagonal", "exp", "flatten", "log", "log10", "log1p", "log2"),
    *("logcumsumexp", "logsumexp", "max", "mean", "min", "moveaxis", "prod", "reciprocal"),
    *("reshape", "round", "rsqrt", "sin", "split", "sqrt", "square", "squeeze", "std", "sum"),
    *("swapaxes", "transpose", "var", "view"),
)

_PROPERTIES: Final = {"T": "transpose", "mT": "swapaxes", "real": "real", "imag": "imag"}

_COMPILED: Final = type(mx.compile(lambda: None))

_PARAMETER: Final = re.compile(r"(?:^|,)\s*(\w+)\s*(?=[:,=)]|$)")


@dataclass(frozen=True, slots=True)
class Function:
    """One way to call an operation.

    Attributes:
        owner, attribute: Where it is found, for operators, methods and properties.
        original: What is there.
        name: The operation's name, such as `mlx.fast.rms_norm` or `mlx.add`.
        parameters: Names of its positional arguments, as far as they are known.
        variadic: Name of the argument that takes all further ones (`reshape(2, -1)`), or "".
        reflected: Whether the operands come in reverse (`__rsub__`).
        in_place: Whether the first argument is changed.
    """

    owner: Any
    attribute: str
    original: Any
    name: str
    parameters: tuple[str, ...] = ()
    variadic: str = ""
    reflected: bool = False
    in_place: bool = False

    def named(self, args: Sequence[Any]) -> list[tuple[str, Any]]:
        """Positional arguments with their names."""
        count = len(self.parameters)
        found = list(zip(self.parameters, args, strict=False))
        rest = args[count:]
        if rest and self.variadic:
            found.append((self.variadic, rest[0] if len(rest) == 1 else list(rest)))
        elif rest:
            found += [(f"arg{count + i}", value) for i, value in enumerate(rest)]
        return found


def core_functions() -> Iterator[Function]:
    """Functions of `mlx.core` and its submodules."""
    for submodule in _SUBMODULES:
        owner = getattr(mx, submodule) if submodule else mx
        prefix = f"mlx.{submodule}." if submodule else "mlx."
        for attribute, value in vars(owner).items():
            if type(value) is type(mx.add) and _computes(attribute):
                name = prefix + getattr(value, "__name__", attribute)
                yield Function(owner, attribute, value, name, *_parameters(value))


def _computes(name: str) -> bool:
    return not name.startswith(_MANAGEMENT) and name not in _NO_OPERATIONS


def array_methods() -> Iterator[Function]:
    """Operators, methods and properties of `mlx.core.array`."""
    cls: Any = mx.array
    for stem, operation in _OPERATORS.items():
        for prefix in ("", "r", "i"):
            attribute = f"__{prefix}{stem}__"
            original = getattr(cls, attribute, None)
            if original is None or (prefix == "i" and stem not in _IN_PLACE):
                continue
            in_place = prefix == "i" or stem == "setitem"
            yield Function(
                cls,
                attribute,
                original,
                f"mlx.{operation}",
                reflected=prefix == "r",
                in_place=in_place,
            )
    for attribute in _METHODS:
        original = getattr(cls, attribute)
        yield Function(cls, attribute, original, f"mlx.{attribute}", *_parameters(original))
    for attribute, operation in _PROPERTIES.items():
        yield Function(cls, attribute, vars(cls)[attribute], f"mlx.{operation}")


def compiled_functions(libraries: tuple[str, ...]) -> Iterator[Function]:
    """Functions that libraries compiled when they were imported, such as activations."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").split(".")[0] not in libraries:
            continue
        for attribute, value in list(vars(module).items()):
            if type(value) is _COMPILED and (inner := _inside(value)) is not None:
                package = inner.__module__.split(".")[0]
                if package in libraries:
                    name, code = f"{package}.{inner.__name__}", inner.__code__
                    parameters = code.co_varnames[: code.co_argcount]
                    yield Function(module, attribute, value, name, parameters)


def _inside(compiled: Any) -> types.FunctionType | None:
    found = (each for each in gc.get_referents(compiled) if isinstance(each, types.FunctionType))
    return next(found, None)


def _parameters(function: Any) -> tuple[tuple[str, ...], str]:
    """Positional parameters by the first signature that MLX documents, and the name of `*args`."""
    signature = getattr(function, "__nb_signature__", None)
    if not signature:
        return (), ""
    text = signature[0][0]
    inside = text[text.index("(") + 1 : text.rindex(")")]
    while (flat := re.sub(r"\[[^\[\]]*\]", "", inside)) != inside:
        inside = flat
    positional, _, rest = inside.partition("*")
    variadic = re.match(r"\w*", rest)
    return tuple(_PARAMETER.findall(positional)), variadic[0] if variadic else ""
