"""A trace as an xarray DataTree: modules as nodes, phases and ports as variables.

The step axis is a view: values stay where they are, one payload per step, and are read when they
are asked for. xarray wants one size per dimension name along a branch of the tree, so a name that
has several sizes in a trace gets the size appended (`hidden_576`), and a variable that was not
recorded at every step gets a step dimension of its own (`step_0`, `step_0_to_8`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from tracediff.events import Event
from tracediff.trace.dtypes import DTYPES
from tracediff.trace.metadata import parents
from tracediff.trace.names import node_name

if TYPE_CHECKING:
    from tracediff.trace.reader import Trace

Shape = tuple[int, ...]
Grid = dict[int, dict[int, Event]]
"""Events of one variable by step and call."""

_LEADING: Final = ("step", "call")


def build_tree(trace: Trace) -> xr.DataTree:
    """The whole trace as a tree. Reads the columns of every step, and no payload.

    Returns:
        A node per component of the module path; each variable has the dimensions `step`, then
        `call` if a step has several, then its own. Where the shape differs from step to step, or
        a call is missing in some, each step has a variable: `forward_out_step_3`.
    """
    grids = _collect(trace)
    stacks = [stack for name, grid in grids.items() for stack in _stacks(trace, name, grid)]
    sizes: dict[str, set[int]] = defaultdict(set)
    for stack in stacks:
        for name, size in stack.sizes():
            sizes[name].add(size)
    ambiguous = {name for name, found in sizes.items() if len(found) > 1} | set(_LEADING)
    nodes: dict[str, dict[str, xr.Variable]] = defaultdict(dict)
    coordinates: dict[str, dict[str, Any]] = defaultdict(dict)
    modules = parents(f"{stack.node}/x" for stack in stacks)
    for stack in stacks:
        name = stack.name
        while f"{stack.node}/{name}" in modules:  # a module of that name: a node has either
            name += "_"
        nodes[stack.node][name] = stack.variable(ambiguous, trace.steps)
        dim = stack.step_dim(trace.steps)
        coordinates[stack.node][dim] = (dim, np.array(stack.steps))
    tree = xr.DataTree.from_dict(
        {node: xr.Dataset(nodes[node], coords=coordinates[node]) for node in nodes},
        name=Path(trace.place).stem,
    )
    tree.attrs = {"stack": trace.run.stack, "status": trace.run.status}
    return tree


def _collect(trace: Trace) -> dict[tuple[str, str], Grid]:
    """Events that have a value, by node and variable name; the first of each site and step."""
    grids: dict[tuple[str, str], Grid] = defaultdict(dict)
    for step in trace.steps:
        for event in trace.events(step):
            if event.payload is None and event.value is None:
                continue
            node = "/".join(node_name(part) for part in event.site.path.split("."))
            key = (node, f"{event.site.phase}_{event.site.port}".replace("/", "%2F"))
            grids[key].setdefault(step, {}).setdefault(event.site.call, event)
    return grids


def _stacks(trace: Trace, key: tuple[str, str], grid: Grid) -> Iterable[Stack]:
    node, name = key
    whole = Stack(trace, node, name, grid)
    if whole.is_regular():
        return [whole]
    return [
        Stack(trace, node, f"{name}_step_{step}" + (f"_call_{call}" if len(calls) > 1 else ""), one)
        for step, calls in grid.items()
        for call, event in calls.items()
        for one in [{step: {call: event}}]
    ]


class Stack(BackendArray):
    """Payloads of one variable stacked over steps and calls, read block by block."""

    def __init__(self, trace: Trace, node: str, name: str, grid: Grid) -> None:
        self.trace = trace
        self.node = node
        self.name = name
        self.grid = grid
        self.steps = sorted(grid)
        self.first = next(iter(grid[self.steps[0]].values()))
        self.calls = sorted(grid[self.steps[0]])
        lead = (len(self.steps), len(self.calls)) if len(self.calls) > 1 else (len(self.steps),)
        self.shape = (*lead, *self.first.shape)
        self.dtype = DTYPES[self.first.dtype] if self.first.payload else np.dtype(object)

    def is_regular(self) -> bool:
        """Whether all steps have the same calls, and all events the same shape and dtype."""
        first = self.first
        alike = (first.shape, first.dtype, first.payload is None)
        return all(
            sorted(calls) == self.calls
            and all((e.shape, e.dtype, e.payload is None) == alike for e in calls.values())
            for calls in self.grid.values()
        )

    def sizes(self) -> Iterable[tuple[str, int]]:
        from tracediff.trace.reader import dims_of

        return zip(dims_of(self.first), self.first.shape, strict=True)

    def step_dim(self, all_steps: list[int]) -> str:
        if self.steps == all_steps:
            return "step"
        first, last = self.steps[0], self.steps[-1]
        return f"step_{first}" if first == last else f"step_{first}_to_{last}_{len(self.steps)}"

    def variable(self, ambiguous: set[str], all_steps: list[int]) -> xr.Variable:
        """The lazy variable, its dimensions renamed where their names have several sizes."""
        own = [f"{name}_{size}" if name in ambiguous else name for name, size in self.sizes()]
        calls = [f"call_{len(self.calls)}"] if len(self.calls) > 1 else []
        attributes = {"op": self.first.op, "kind": self.first.kind, "source": self.first.source}
        data = indexing.LazilyIndexedArray(self)
        return xr.Variable((self.step_dim(all_steps), *calls, *own), data, attributes)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._read
        )

    def _read(self, key: tuple[int | slice, ...]) -> Any:
        """Reads only the steps and calls that a basic index asks for."""
        lead = 2 if len(self.calls) > 1 else 1
        steps = np.array(self.steps)[key[0]]
        calls = np.array(self.calls)[key[1]] if lead == 2 else np.array(self.calls[0])
        inner = (*key[lead:], ...)  # keeps a single element an array
        blocks = [
            self._value(self.grid[int(step)][int(call)])[inner]
            for step, call in product(np.atleast_1d(steps), np.atleast_1d(calls))
        ]
        outer = (*steps.shape, *calls.shape)
        if not blocks:
            rest = np.broadcast_to(np.False_, self.first.shape)[inner].shape
            return np.empty((*outer, *rest), self.dtype)
        return np.stack(blocks).reshape((*outer, *blocks[0].shape))

    def _value(self, event: Event) -> Any:
        if event.payload is not None:
            return self.trace.array(event)
        cell = np.empty((), dtype=object)
        cell[()] = event.value
        return cell
