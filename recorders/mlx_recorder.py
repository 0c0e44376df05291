"""The MLX stack: records models built from `mlx.nn` and trained with `mlx.optimizers`.

Works with Metal, CUDA and the CPU alike: it only asks MLX for values.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Final

import mlx.core as mx
from numpy.typing import NDArray

from tracediff import recording
from tracediff.checkpoint import Checkpoints
from tracediff.consumers import Consumers
from tracediff.draws import Position, position
from tracediff.recorders import rendering_hooks
from tracediff.recorders.checkpoints import watch_safetensors
from tracediff.recorders.mlx_arrays import random_key
from tracediff.recorders.mlx_autograd import GradientHooks
from tracediff.recorders.mlx_batches import BatchHooks
from tracediff.recorders.mlx_compile import CompileHooks
from tracediff.recorders.mlx_deferral import DeferralHooks
from tracediff.recorders.mlx_losses import LossHooks
from tracediff.recorders.mlx_modules import ModuleHooks
from tracediff.recorders.mlx_operations import OperationHooks
from tracediff.recorders.mlx_optimizer import OptimizerHooks
from tracediff.recorders.mlx_roots import Roots
from tracediff.recorders.mlx_skip import SkipHooks
from tracediff.recorders.mlx_snapshot import Snapshots
from tracediff.recorders.mlx_state import State
from tracediff.recording import watch_generators
from tracediff.trace.snapshot import Tree

_DISTRIBUTIONS: Final = (
    *("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda", "mlx-lm"),
    *("transformers", "tokenizers", "safetensors"),
)

_VARIABLES: Final = ("MLX_ENABLE_TF32", "MLX_DISABLE_COMPILE")


class Recorder(recording.Recorder):
    """Records an MLX run at module level."""

    stack: ClassVar[str] = "mlx"

    def attach(self) -> None:
        """Wraps modules, gradient transformations, losses, optimizers and `mx.compile`."""
        tape, patches = self.tape, self.patches
        checkpoints = Checkpoints(tape)
        self._roots = Roots(tape, checkpoints)
        state = State(tape, self._roots)
        gc.collect()  # an optimizer or a compiled step that nobody holds any more does not count
        # Undone last: until then a wrapper may still be running.
        patches.on_undo(setattr, state, "recording", False)
        consumers = Consumers(tape, "mlx", _position)
        CompileHooks(state, patches).install()
        DeferralHooks(state, patches).install()
        self.modules = ModuleHooks(state, patches)
        self.modules.install()
        GradientHooks(state, patches).install()
        LossHooks(state, patches).install()
        OptimizerHooks(state, patches).install()
        if tape.policy.operations:
            OperationHooks(state, patches, consumers).install()
        patches.replace(mx, "load", checkpoints.watching)
        watch_safetensors(checkpoints, patches)
        chain = rendering_hooks.install(tape, patches)
        BatchHooks(chain, patches).install()
        self.snapshots = Snapshots(state, patches)
        self.snapshots.install()
        if tape.rerun is not None:
            SkipHooks(state, patches, tape.rerun).install()
        patches.on_undo(watch_generators(tape, self.generators))

    def environment(self) -> Mapping[str, Any]:
        """Device, stream, and whether Metal or CUDA are there; no key depends on a run."""
        device = mx.default_device()
        variables = {f"env.{name}": os.environ[name] for name in _VARIABLES if name in os.environ}
        return variables | {
            "mlx.default_device": device.type.name,
            "mlx.default_stream": str(mx.default_stream(device)),
            "mlx.cuda_available": mx.cuda.is_available(),
            "mlx.metal_available": mx.metal.is_available(),
            "mlx.default_float_dtype": to_dtype_name(mx.array(1.0)),
            "mlx.default_int_dtype": to_dtype_name(mx.array(1)),
        }

    def versions(self) -> Mapping[str, str]:
        """Versions of MLX, its back ends, and what mlx-lm stands on, where installed."""
        found = {}
        for name in _DISTRIBUTIONS:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        return found

    # ---- long runs -------------------------------------------------------------------------

    def generators(self) -> Mapping[str, NDArray[Any]]:
        key = random_key()
        return {} if key is None else {"mlx": key}

    def set_generators(self, states: Mapping[str, NDArray[Any]]) -> None:
        if (key := states.get("mlx")) is not None:
            mx.random.seed((int(key[0]) << 32) | int(key[1]))

    def capture(self) -> Tree | None:
        return self.snapshots.capture()

    def restore_weights(self, tree: Tree) -> None:
        self.snapshots.restore_weights(tree)

    def restore(self, tree: Tree) -> None:
        self.snapshots.restore(tree)
        self._roots.emit_loaded()


def _position() -> Position | None:
    """Where the global generator stands."""
    key = random_key()
    return None if key is None else position("mlx", key)


def to_dtype_name(array: mx.array) -> str:
    """`float32` for `mlx.core.float32`."""
    return str(array.dtype).removeprefix("mlx.core.")
