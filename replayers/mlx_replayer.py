"""Replay by substitution on MLX: the recorder, with calls of modules run on given inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tracediff.events import Site
from tracediff.recorders.mlx_arrays import is_float, map_arrays
from tracediff.recorders.mlx_modules import Call
from tracediff.recorders.mlx_recorder import Recorder
from tracediff.recording import Frame, Given, Tape
from tracediff.replayers.mlx_stages import StageSubstituter

__all__ = ["StageSubstituter", "Substituter"]


class Substituter(Recorder):
    """Records a run while the inputs of its modules are replaced.

    Gradients pass through a replaced input as if it had not been, so the script trains on.
    """

    def __init__(self, tape: Tape, given: Given) -> None:
        super().__init__(tape)
        self._given = given

    def attach(self) -> None:
        super().attach()
        self.modules.replace = self._replace

    def _replace(self, frame: Frame, call: Call, orders: Mapping[str, int]) -> Call:
        new: dict[int, mx.array] = {}
        ports = []
        for port, array in call.inputs().tensors:
            value = self._given(Site(frame.step, "forward", frame.path, frame.call, port))
            if value is not None and tuple(array.shape) == value.shape:
                new[id(array)] = _in_place_of(array, value)
                ports.append(port)
        if not new:
            return call
        if orders:
            self.tape.give(frame, {port: orders[port] for port in ports if port in orders})

        def swap(array: mx.array) -> mx.array:
            return new.get(id(array), array)

        kwargs = map_arrays(dict(call.kwargs), swap)
        return replace(call, args=map_arrays(tuple(call.args), swap), kwargs=kwargs)


def _in_place_of(array: mx.array, value: NDArray[Any]) -> mx.array:
    """A given value with the dtype and the gradient of a computed one."""
    if value.dtype.kind not in "biufc":  # bfloat16 and float8, which float32 holds exactly
        value = value.astype(np.float32)
    given = mx.array(value).astype(array.dtype)
    if not is_float(array):
        return given
    passed = mx.custom_function(lambda computed: given)
    passed.vjp(lambda primals, cotangent, output: cotangent)
    return cast("mx.array", passed(array))
