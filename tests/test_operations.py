"""The vocabulary of operations: what its table says, and that the stacks have what it names."""

from __future__ import annotations

import pytest

from tracediff import operations
from tracediff.operations import base_name, canonical_operation, takes_scalar_operands


@pytest.mark.parametrize(
    ("stack", "name", "canonical"),
    [
        ("pytorch", "aten.mul.Tensor", "mul"),
        ("pytorch", "aten.mul_.Scalar", "mul"),
        ("pytorch", "aten._foreach_add_.List", "add"),
        ("pytorch", "aten.t.default", "transpose"),
        ("pytorch", "aten.mm.default", "matmul"),
        ("pytorch", "aten._to_copy.default", "cast"),
        ("pytorch", "aten._scaled_dot_product_flash_attention_for_cpu.default", "attention"),
        ("pytorch", "aten._scaled_dot_product_efficient_attention.default", "attention"),
        (
            "pytorch",
            "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
            "attention_backward",
        ),
        ("pytorch", "aten.histc.default", "histc"),
        ("pytorch", "mylib.fused.default", "mylib.fused"),
        ("pytorch", "flex_attention", "flex_attention"),
        ("mlx", "mlx.fast.rms_norm", "rms_norm"),
        ("mlx", "mlx.fast.scaled_dot_product_attention", "attention"),
        ("mlx", "mlx.multiply", "mul"),
        ("mlx", "mlx.random.bernoulli", "bernoulli"),
        ("mlx", "mlx_lm.swiglu", "swiglu"),
        ("mlx", "fused", "fused"),
        ("other", "matmul", "matmul"),
    ],
)
def test_canonical_names(stack: str, name: str, canonical: str) -> None:
    assert canonical_operation(stack, name) == canonical


def test_no_name_stands_twice_in_the_table() -> None:
    for column in (0, 1):
        seen = []
        for line in operations._TABLE.splitlines():
            if line.strip() and not line.startswith("#"):
                seen += line.partition(" ")[2].split("|")[column].split()
        assert len(seen) == len(set(seen))
        assert len(seen) > 80


def test_pytorch_has_every_operation_of_the_table() -> None:
    torch = pytest.importorskip("torch")
    known = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names()}
    known = {base_name("pytorch", f"aten.{name}") for name in known}
    unknown = operations._NAMES["pytorch"].keys() - known
    assert not unknown


def test_mlx_has_every_operation_of_the_table() -> None:
    pytest.importorskip("mlx.nn")
    pytest.importorskip("mlx_lm.models.llama")
    from tracediff.recorders.mlx_functions import (
        array_methods,
        compiled_functions,
        core_functions,
    )

    found = [*core_functions(), *array_methods(), *compiled_functions(("mlx", "mlx_lm"))]
    known = {base_name("mlx", function.name) for function in found}
    unknown = operations._NAMES["mlx"].keys() - known
    assert not unknown


def test_numbers_are_operands_where_tensors_could_be() -> None:
    assert takes_scalar_operands("mul")
    assert not takes_scalar_operands("rms_norm")
