"""Alignment of operations without names: values, passes, robustness, and cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tracediff.align.fingerprints import distance, fused, same_elements, tolerance
from tracediff.align.flow import Flow
from tracediff.align.matching import ValuePair
from tracediff.align.names import Rename, Rules
from tracediff.align.operations import align_operations
from tracediff.compare.layouts import find_layout
from tracediff.events import Event, Site
from tracediff.trace.summary import digest, fingerprint

STACKS = ("pytorch", "mlx")
Array = NDArray[Any]


class Run:
    """Operation events of one side, built by hand."""

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        self.events: list[Event] = []
        self._noise, self._random = noise, np.random.default_rng(seed)

    def add(self, place: str, array: Array, inputs: Sequence[int] = (), **attributes: Any) -> int:
        """Records `array`, with relative noise where it is floating point; `place` is
        `module@name`."""
        if array.dtype.kind == "f" and self._noise:
            array = (array * (1 + self._noise * self._random.standard_normal(array.shape))).astype(
                array.dtype
            )
        call = sum(event.site.path == place for event in self.events)
        event = Event(
            site=Site(0, "forward", place, call),
            order=len(self.events),
            op=place.rpartition("@")[2],
            dtype=array.dtype.name,
            shape=array.shape,
            digest=digest(array),
            fingerprint=fingerprint(array),
            inputs=tuple(inputs),
            attributes={"level": "op", "canonical": place.rpartition("@")[2], **attributes},
        )
        self.events.append(event)
        return event.order


def names(pairs: Sequence[ValuePair]) -> set[tuple[str, str]]:
    return {(str(p.baseline.event.site), str(p.target.event.site)) for p in pairs}


def align(a: Run, b: Run, rules: Rules | None = None) -> list[ValuePair]:
    """The pairs of values, without what is only on the way to one."""
    found = align_operations(a.events, b.events, STACKS, rules=rules)[2]
    return [pair for pair in found if pair.layout != "part"]


def floats(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- fingerprints -------------------------------------------------------------------------------


def test_layouts_of_one_tensor_are_the_same_elements() -> None:
    x = floats(4, 6, 5)
    assert same_elements(fingerprint(x), fingerprint(x.transpose(2, 0, 1).reshape(10, 12)))
    assert not same_elements(fingerprint(x), fingerprint(-x))
    y = x.copy()
    y[1, 2, 3] *= 1 + 1e-6
    assert not same_elements(fingerprint(x), fingerprint(y))


def test_distance_is_that_of_the_elements() -> None:
    x = floats(64, 64)
    moved = x + np.float32(1e-3) * (np.sqrt(np.mean(x**2)) + np.abs(x))
    apart = distance(fingerprint(x), fingerprint(moved))
    assert 1e-4 < apart <= 1.01e-3  # every element is within 1e-3 (rms + |x|): never further
    assert distance(fingerprint(x), fingerprint(x[:-1])) == float("inf")


def test_tolerance_is_half_of_the_digits() -> None:
    assert tolerance(["float32"]) == pytest.approx(2.0**-12)
    assert tolerance(["float32", "bfloat16"]) == pytest.approx(2.0**-4.5, rel=0.5)
    assert tolerance(["int64"]) == 0.0


def test_two_halves_together_have_the_fingerprint_of_the_whole() -> None:
    x = floats(8, 10)
    both = fused(fingerprint(x[:, :5]), fingerprint(x[:, 5:]))
    assert distance(fingerprint(x), both) < 1e-6


# ---- values -------------------------------------------------------------------------------------


def test_a_value_holds_all_its_layouts() -> None:
    run, x = Run(), floats(2, 12, 32)
    leaf = run.add("m@leaf", x, leaf=True)
    product = run.add("m@matmul", x * 2, [leaf])
    view = run.add("m@reshape", (x * 2).reshape(2, 12, 4, 8), [product])
    run.add("m@transpose", (x * 2).reshape(2, 12, 4, 8).transpose(0, 2, 1, 3), [view])
    flow = Flow(run.events)
    assert [len(value.members) for value in flow.values] == [1, 3]


def test_a_leaf_with_the_bits_of_an_earlier_value_is_that_value() -> None:
    run, x = Run(), floats(2, 32)
    made = run.add("m@mul", x)
    lost = run.add("m.activation@leaf", x, leaf=True)
    flow = Flow(run.events)
    assert flow.of_order[made] is flow.of_order[lost]


# ---- passes -------------------------------------------------------------------------------------


def norm(run: Run, module: str, x: Array, source: int, fused_kernel: bool) -> int:
    """RMSNorm as six operations, or as one."""
    scale = 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)
    if fused_kernel:
        return run.add(f"{module}@rms_norm", x * scale, [source])
    square = run.add(f"{module}@pow", x**2, [source])
    mean = run.add(f"{module}@mean", np.mean(x**2, -1, keepdims=True), [square])
    root = run.add(f"{module}@rsqrt", scale, [mean])
    return run.add(f"{module}@mul", x * scale, [source, root])


def chain(
    run: Run, fused_kernel: bool, layers: int = 3, fault: int = -1, error: float = 0.0
) -> None:
    """Layers of a product and a norm; `error` is added in one of them, in relative terms."""
    x = floats(16, 32, seed=2)
    last = run.add("root@leaf", x, leaf=True)
    for layer in range(layers):
        module = f"model.layers.{layer}"
        weight = floats(32, 32, seed=10 + layer)
        w = run.add(f"{module}.proj@leaf", weight if fused_kernel else weight.T, leaf=True)
        x = x @ weight
        if layer == fault:
            x = x * (1 + error * floats(16, 32, seed=99))
        last = run.add(f"{module}.proj@matmul", x, [last, w])
        last = norm(run, f"{module}.norm", x, last, fused_kernel)
        x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)


def test_a_fused_norm_is_paired_with_the_last_operation_of_the_chain() -> None:
    a, b = Run(noise=1e-7), Run(noise=1e-7, seed=5)
    chain(a, fused_kernel=False)
    chain(b, fused_kernel=True)
    pairs = align(a, b)
    for layer in range(3):
        found = next(
            p for p in pairs if p.target.event.site.path == f"model.layers.{layer}.norm@rms_norm"
        )
        assert found.baseline.event.site.path == f"model.layers.{layer}.norm@mul"
        assert found.matched_by == "fingerprint"
    assert len(pairs) == len(Flow(b.events).values)


def test_what_is_on_the_way_belongs_to_the_result() -> None:
    """An update by `mul, addcmul` and one by `square, mul, mul, add`, the moment being zero."""
    a, b, g = Run(), Run(), floats(8, 8)
    for run, names_of in ((a, ("mul", "addcmul")), (b, ("mul", "add"))):
        grad = run.add("w@leaf", g, leaf=True)
        zero = run.add("w@zeros", 0 * g, leaf=True)
        given = [run.add(f"w@{names_of[0]}", 0 * g, [zero]), grad]
        if run is b:
            square = run.add("w@square", g**2, [grad])
            given[1] = run.add("w@mul", g**2 * np.float32(0.5), [square])
        moment = run.add(f"w@{names_of[1]}", g**2 * np.float32(0.5), given)
        run.add("w@sqrt", abs(g), [moment])
    pairs = align_operations(a.events, b.events, STACKS)[2]
    parts = [(p.baseline.event.op, p.target.event.op) for p in pairs if p.layout == "part"]
    assert parts == [("addcmul", "square")]


def test_what_starts_from_other_values_is_on_no_way() -> None:
    a, b, g = Run(), Run(), floats(8, 8)
    for run in (a, b):
        grad = run.add("w@leaf", g, leaf=True)
        other = run.add("v@leaf", floats(8, 8, seed=3), leaf=True)
        given = [grad] if run is a else [run.add("w@mul", g * other, [grad, other])]
        run.add("w@exp", np.exp(g), given)
    pairs = align_operations(a.events, b.events, STACKS)[2]
    assert [p for p in pairs if p.layout == "part"] == []


@pytest.mark.parametrize("error", [1e-5, 1e-3, 1e-1, 10.0])
@pytest.mark.parametrize("fault", [0, 1])
def test_what_follows_a_divergence_is_still_aligned(error: float, fault: int) -> None:
    clean, broken = Run(noise=1e-7), Run(noise=1e-7, seed=5)
    chain(clean, fused_kernel=False, layers=4)
    chain(broken, fused_kernel=True, layers=4, fault=fault, error=error)
    pairs = align(clean, broken)
    found = {p.target.event.site.path: p.baseline.event.site.path for p in pairs}
    for layer in range(4):
        module = f"model.layers.{layer}"
        assert found[f"{module}.proj@matmul"] == f"{module}.proj@matmul"
        assert found[f"{module}.norm@rms_norm"] == f"{module}.norm@mul"


def test_masks_that_repeat_are_paired_in_order() -> None:
    a, b = Run(), Run()
    mask = np.triu(np.full((8, 8), -np.inf, np.float32), 1)
    for run, name in ((a, "where"), (b, "add")):
        for layer in range(3):
            run.add(f"m.{layer}@{name}", mask)
            run.add(f"m.{layer}@mul", floats(8, 8, seed=layer))
    found = names(align(a, b))
    for layer in range(3):
        assert (f"0/forward/m.{layer}@where#0:out", f"0/forward/m.{layer}@add#0:out") in found


def test_extra_missing_and_reordered_operations() -> None:
    a, b = Run(), Run()
    for seed in (1, 2, 3, 4):
        a.add(f"m@op{seed}", floats(4, 8, seed=seed))
    for seed in (4, 1, 5, 3):  # 2 is missing, 5 is extra, 4 comes first
        b.add(f"m@other{seed}", floats(8, 4, seed=seed) if seed == 5 else floats(4, 8, seed=seed).T)
    found = {(p.baseline.event.op, p.target.event.op) for p in align(a, b)}
    assert found == {("op1", "other1"), ("op3", "other3"), ("op4", "other4")}


def test_values_that_cannot_be_told_apart_are_not_forced() -> None:
    a, b = Run(), Run()
    x = floats(4, 8)
    for index in range(3):
        a.add(f"m@a{index}", x)
    for index in range(2):
        b.add(f"m@b{index}", x)
    assert align(a, b) == []


def test_a_fused_projection_is_paired_with_its_halves() -> None:
    a, b, weight = Run(), Run(), floats(16, 8)
    a.add("m.mlp@leaf", weight, leaf=True)
    b.add("m.mlp.gate@leaf", weight[:8], leaf=True)
    b.add("m.mlp.up@leaf", weight[8:], leaf=True)
    assert [p.layout for p in align(a, b)] == ["half", "half"]


def test_the_update_of_a_fused_parameter_is_paired_with_those_of_its_halves() -> None:
    a, b, weight, two = Run(), Run(), floats(16, 8), np.float32(2)
    for run, parts in ((a, [weight]), (b, [weight[:8], weight[8:]])):
        for number, part in enumerate(parts):
            leaf = run.add(f"m.{number}@leaf", part, leaf=True)
            square = run.add(f"m.{number}@square", part**2, [leaf]) if run is b else leaf
            run.add(f"m.{number}@addcmul", part**2 * two, [square])
    found = [(p.layout, p.target.event.op) for p in align_operations(a.events, b.events, STACKS)[2]]
    assert (
        sorted(found)
        == [("half", "addcmul")] * 2 + [("half", "leaf")] * 2 + [("part", "square")] * 2
    )


def test_the_moments_of_halves_before_the_first_update_belong_to_the_update() -> None:
    a, b, grad, half = Run(), Run(), floats(16, 8), np.float32(0.5)
    for run, parts in ((a, [grad]), (b, [grad[:8], grad[8:]])):
        for number, part in enumerate(parts):
            leaf = run.add(f"m.{number}@leaf", part, leaf=True)
            moment = run.add(f"m.{number}@zeros", 0 * part, [leaf])
            if run is a:
                run.add(f"m.{number}@lerp", half * part, [moment, leaf])
            else:
                decayed = run.add(f"m.{number}@mul", 0 * part, [moment])
                added = run.add(f"m.{number}@mul", half * part, [leaf])
                run.add(f"m.{number}@add", half * part, [decayed, added])
    pairs = align_operations(a.events, b.events, STACKS)[2]
    assert {e.order for p in pairs for e in p.target.members} == {e.order for e in b.events}
    zeros = [p for p in pairs if "zeros" in (p.baseline.event.op, p.target.event.op)]
    assert {p.layout for p in zeros} == {"part"}


def test_a_target_is_known_by_its_own_stack_s_names_inside_a_paired_module() -> None:
    """Moments of experts, of which one stack has two in one."""
    a, b, zero = Run(), Run(), floats(8, 8) * 0
    for run, names_of in (
        (a, ("experts.gate_up_proj", "experts.down_proj")),
        (b, ("gate_proj", "up_proj", "down_proj")),
    ):
        for name in names_of:
            place = f"m.mlp.{name}" if run is a else f"m.mlp.switch_mlp.{name}.weight"
            run.add(f"{place}@zeros", np.concatenate([zero, zero]) if "_up_" in name else zero)
    (pair,) = align_operations(a.events, b.events, STACKS, {"m.mlp": "m.mlp"})[2]
    assert pair.baseline.event.site.path == "m.mlp.experts.down_proj@zeros"
    assert pair.target.event.site.path == "m.mlp.switch_mlp.down_proj.weight@zeros"


def test_a_rule_comes_first() -> None:
    import re

    a, b = Run(), Run()
    a.add("left@mul", floats(4, 8, seed=1))
    b.add("right@mul", floats(4, 8, seed=2))  # another value: only a rule can pair it
    rules = Rules(renames=(Rename("target", re.compile("^right"), "left"),))
    assert [p.matched_by for p in align(a, b, rules)] == ["rule"]


def test_small_values_need_more_than_a_fingerprint() -> None:
    a, b = Run(), Run()
    a.add("m@sum", np.float32(3.0).reshape(1))
    b.add("n@max", np.float32(3.0).reshape(1))
    assert align(a, b) == []


@pytest.mark.parametrize("repeated", [False, True])
def test_cost_is_near_linear(repeated: bool) -> None:
    """Ten times the events in a single module take far less than 100 times as long."""
    seconds = {}
    for count in (500, 5_000):
        sides = []
        for name in ("a", "b"):
            run = Run()
            base = floats(4, 8)
            template = run.add(f"m@{name}", base)
            event = run.events[template]
            for place in range(1, count):
                x = event.fingerprint
                factor = 1.0 if repeated else 1.0 + place / count
                scaled = (*x[:4], *(v * factor for v in x[4:]))
                run.events.append(
                    Event(
                        site=Site(0, "forward", f"m@{name}", place),
                        order=place,
                        op=name,
                        dtype="float32",
                        shape=(4, 8),
                        fingerprint=scaled,
                        attributes=event.attributes,
                    )
                )
            sides.append(run)
        started = time.process_time()
        pairs = align(*sides)
        seconds[count] = time.process_time() - started
        assert len(pairs) == count
    assert seconds[5_000] < 50 * max(seconds[500], 0.02)


# ---- layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: x, "same"),
        (lambda x: x.reshape(24, 32), "reshape"),
        (lambda x: x.reshape(2, 12, 4, 8).transpose(0, 2, 1, 3), "head split"),
        (lambda x: x.reshape(24, 32).T, "head split"),
        (lambda x: x.transpose(2, 0, 1), "transpose"),
    ],
)
def test_a_layout_is_found_from_the_values(make: Any, name: str) -> None:
    x = floats(2, 12, 32)
    noisy = make(x * (1 + 0.1 * floats(2, 12, 32, seed=3)))
    layout = find_layout(x, noisy)
    assert layout is not None
    assert layout.name == name
    back = layout.apply(noisy)
    assert back.shape == x.shape
    assert np.linalg.norm(back - x) < 0.2 * np.linalg.norm(x)
    there = layout.inverse(noisy.shape).apply(x)
    assert np.array_equal(there, make(x))


def test_a_square_transpose_is_no_identity() -> None:
    x = floats(12, 12)
    layout = find_layout(x, np.ascontiguousarray(x.T))
    assert layout is not None
    assert np.array_equal(layout.apply(x.T), x)


def test_unrelated_values_have_no_layout() -> None:
    assert find_layout(floats(6, 8, seed=1), floats(8, 6, seed=2)) is None


def test_what_is_like_another_layer_is_no_pair_against_the_order_of_computation() -> None:
    """The baseline adds to a root, the target takes the root of a sum, as updates of Adam do; in
    another layer, where nothing else happens, the two additions are the same."""
    random = np.random.default_rng(0)
    mean, first, second = np.abs(random.standard_normal((3, 64))).astype(np.float32)
    a, b = Run(), Run()
    for layer in ("layers.0", "layers.1"):
        a.add(f"{layer}@lerp", mean)
        b.add(f"{layer}@add", mean)
    for run in (a, b):
        run.add("layers.0@add", first)
    v = a.add("layers.1@addcmul", second)
    root = a.add("layers.1@sqrt", np.sqrt(second), [v])
    a.add("layers.1@add", np.sqrt(second) + np.float32(0.1), [root])
    v = b.add("layers.1@mul", second)
    wrong = second * np.float32(1.01)
    total = b.add("layers.1@add", wrong, [v])
    b.add("layers.1@sqrt", np.sqrt(wrong), [total])
    b.add("layers.1@add", 3 * mean)
    found = names(align(a, b))
    assert ("0/forward/layers.1@sqrt#0:out", "0/forward/layers.1@sqrt#0:out") in found
    assert ("0/forward/layers.0@add#0:out", "0/forward/layers.0@add#1:out") in found
    assert ("0/forward/layers.1@add#0:out", "0/forward/layers.1@add#1:out") not in found
