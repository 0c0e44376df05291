"""Replay with whole stages of another run on MLX: its batches, labels, weights and masks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from tracediff.events import Site
from tracediff.recorders.mlx_arrays import flatten, input_ports, is_integer, map_arrays
from tracediff.recorders.mlx_modules import Call
from tracediff.recorders.mlx_recorder import Recorder
from tracediff.recorders.mlx_snapshot import from_numpy
from tracediff.recording import Frame, Given, Tape

_DROPOUTS: Final = (nn.Dropout, nn.Dropout2d, nn.Dropout3d)


class StageSubstituter(Recorder):
    """Records a run whose batches and weights are replaced before a gradient is taken.

    What is replaced are the arguments of functions that `nn.value_and_grad` made, and the
    parameters of their model.
    """

    def __init__(self, tape: Tape, given: Given) -> None:
        super().__init__(tape)
        self._given = given
        self._loaded: set[int] = set()
        self._batches: Counter[int] = Counter()

    def attach(self) -> None:
        super().attach()
        # Around the recorder's own wrapper: it is to see what the run is given.
        self.patches.replace(nn, "value_and_grad", self._wrap_gradient)
        self.modules.replace = self._with_mask

    def _wrap_gradient(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def value_and_grad(model: nn.Module, fn: Callable[..., Any]) -> Callable[..., Any]:
            gradient = original(model, fn)

            @functools.wraps(gradient)
            def call(*args: Any, **kwargs: Any) -> Any:
                self._load(model)
                args, kwargs = self._with_batch(fn, args, kwargs)
                return gradient(*args, **kwargs)

            return call

        return value_and_grad

    def _load(self, model: nn.Module) -> None:
        """Puts the given weights into a model, before they are recorded as loaded."""
        if id(model) in self._loaded:
            return
        self._loaded.add(id(model))
        new: list[tuple[str, mx.array]] = []
        for name, array in flatten(model.parameters()):  # type: ignore[no-untyped-call]
            value = self._given(Site(self.tape.step, "loading", name, port="param"))
            if value is not None:
                new.append((name, from_numpy(value).astype(array.dtype)))
        if new:
            model.update(tree_unflatten(new))
            mx.eval(model.parameters())  # type: ignore[no-untyped-call]

    def _with_batch(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a loss, with the given batch in place of the script's."""
        step = self.tape.step
        index, self._batches[step] = self._batches[step], self._batches[step] + 1
        new = {}
        for name, array in input_ports(fn, args, kwargs).named():
            value = self._given(Site(step, "rendering", f"batch.{name}", index))
            if value is not None and is_integer(array):
                new[id(array)] = from_numpy(value).astype(array.dtype)

        def swap(array: mx.array) -> mx.array:
            return new.get(id(array), array)

        return map_arrays(tuple(args), swap), map_arrays(dict(kwargs), swap)

    def _with_mask(self, frame: Frame, call: Call, orders: Mapping[str, int]) -> Call:
        """A dropout with the given mask. It draws all the same: the generators go on as they do."""
        module = call.module
        if not isinstance(module, _DROPOUTS) or not module.training:
            return call
        kept = self._given(Site(frame.step, "forward", frame.path, frame.call, "mask"))
        if kept is None:
            return call

        def masked(module: Any, x: mx.array) -> mx.array:
            call.original(module, x)
            result: mx.array = (mx.array(kept) * x) * (1 / module._p_1)
            return result

        return replace(call, original=masked)
