"""The PyTorch recorder: modules, losses, gradients, optimizers and random generators."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Final

import numpy as np
import torch

from tracediff.consumers import Consumers
from tracediff.draws import Position, position
from tracediff.recorders import rendering_hooks
from tracediff.recorders.checkpoints import watch_safetensors
from tracediff.recorders.pytorch_data import DataLoaderHooks
from tracediff.recorders.pytorch_device import device_reader
from tracediff.recorders.pytorch_dropout import DropoutHooks
from tracediff.recorders.pytorch_loading import LoadingHooks
from tracediff.recorders.pytorch_loss import LossHooks
from tracediff.recorders.pytorch_modules import COMPILED_NOTE, ModuleHooks
from tracediff.recorders.pytorch_operations import OperationHooks
from tracediff.recorders.pytorch_optimizer import OptimizerHooks
from tracediff.recorders.pytorch_rope import RopeHooks
from tracediff.recorders.pytorch_skip import SkipHooks
from tracediff.recorders.pytorch_snapshot import Snapshots
from tracediff.recorders.pytorch_state import State
from tracediff.recorders.pytorch_tensors import memory_of, out_of_sight
from tracediff.recording import Recorder as BaseRecorder
from tracediff.recording import Tape, watch_generators
from tracediff.trace.snapshot import Tree

_PACKAGES: Final = ("torch", "transformers", "peft", "accelerate", "tokenizers", "safetensors")


class Recorder(BaseRecorder):
    """Records whatever runs on PyTorch in this process while it is attached."""

    stack: ClassVar[str] = "pytorch"

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self._state = State(tape)
        self._eager = False

    def attach(self) -> None:
        state, patches = self._state, self.patches
        if (reader := device_reader(self.tape)) is not None:
            state.read_part = reader.read_part
            reader.wait_on(self.tape.waiting)
        consumers = Consumers(self.tape, "torch.cpu", _position)
        self.modules = modules = ModuleHooks(state, patches)
        modules.install()
        RopeHooks(state, patches, modules).install()
        DropoutHooks(state, patches, modules).install()
        LossHooks(state, patches).install()
        OptimizerHooks(state, patches).install()
        if self.tape.policy.operations:
            OperationHooks(state, patches, consumers).install()
        watch_safetensors(state.checkpoints, patches)
        chain = rendering_hooks.install(self.tape, patches)
        LoadingHooks(self.tape, chain, patches).install()
        self.snapshots = Snapshots(state, patches)
        self.snapshots.install()
        if self.tape.rerun is not None:
            SkipHooks(state, patches, modules, self.tape.rerun).install()
        patches.replace(torch, "compile", self._wrap_compile)
        if "torch._dynamo" in sys.modules:
            self._run_eagerly()
        DataLoaderHooks(state, consumers, patches).install()
        patches.on_undo(watch_generators(self.tape, self.generators, _fresh_state))
        patches.on_undo(setattr, state, "recording", False)

    # ---- compiled functions ----------------------------------------------------------------

    def _wrap_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            self._run_eagerly()
            self.tape.note(COMPILED_NOTE)
            return original(*args, **kwargs)

        return compile

    def _run_eagerly(self) -> None:
        """Makes compiled functions run as they were written, until the recorder is detached.

        Not done before it is needed: it imports the compiler, which takes seconds.
        """
        if not self._eager:
            self._eager = True
            stance = torch.compiler.set_stance("force_eager")
            self.patches.on_undo(stance.__exit__, None, None, None)

    # ---- long runs -------------------------------------------------------------------------

    def generators(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return generator_states() | self.snapshots.generator_states()

    def set_generators(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        for path, state in states.items():
            tensor = torch.from_numpy(np.array(state))
            if path == "torch.cpu":
                torch.set_rng_state(tensor)
            elif path.startswith("torch.cuda."):
                torch.cuda.set_rng_state(tensor, int(path.rpartition(".")[2]))
        self.snapshots.set_generators(states)

    def capture(self) -> Tree:
        return self.snapshots.capture()

    def restore_weights(self, tree: Tree) -> None:
        self.snapshots.restore_weights(tree)

    def restore(self, tree: Tree) -> None:
        self.snapshots.restore(tree)
        self._state.roots.emit_loaded()

    # ---- what runs here --------------------------------------------------------------------

    def environment(self) -> Mapping[str, Any]:
        cuda: Any = torch.backends.cuda
        settings = {
            "torch.cuda_available": torch.cuda.is_available(),
            "torch.mps_available": torch.backends.mps.is_available(),
            "torch.num_threads": torch.get_num_threads(),
            "torch.num_interop_threads": torch.get_num_interop_threads(),
            "torch.default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
            "torch.deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "torch.cudnn.benchmark": torch.backends.cudnn.benchmark,
            "torch.cudnn.deterministic": torch.backends.cudnn.deterministic,
            "torch.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
            "torch.cuda.matmul.allow_tf32": cuda.matmul.allow_tf32,
            "torch.sdp.flash": cuda.flash_sdp_enabled(),
            "torch.sdp.mem_efficient": cuda.mem_efficient_sdp_enabled(),
            "torch.sdp.math": cuda.math_sdp_enabled(),
            "torch.cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }
        if torch.cuda.is_available():
            settings["torch.cuda.device"] = torch.cuda.get_device_name()
            settings["torch.cuda.version"] = torch.version.cuda
        return settings

    def versions(self) -> Mapping[str, str]:
        found = {}
        for name in _PACKAGES:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        return found


def generator_states() -> dict[str, np.ndarray[Any, Any]]:
    """States of the default generators as bytes, without making CUDA initialise itself."""
    cuda: Any = torch.cuda
    states = {"torch.cpu": _cpu_state()}
    if cuda.is_initialized():
        with out_of_sight():
            for device, state in enumerate(cuda.get_rng_state_all()):
                states[f"torch.cuda.{device}"] = state.numpy()
    return states


def _position() -> Position | None:
    """Where the default generator stands."""
    return position("torch.cpu", _cpu_state())


def _cpu_state() -> np.ndarray[Any, Any]:
    """State of the default generator on the CPU, as bytes. No mode sees that it is asked for."""
    state = torch.get_rng_state()
    array = memory_of(state)
    if array is None:
        with out_of_sight():
            array = state.numpy()
    return array


def _fresh_state(path: str) -> np.ndarray[Any, Any] | None:
    """State of a CUDA generator that was initialised after the recorder attached."""
    if not path.startswith("torch.cuda."):
        return None
    device = path.removeprefix("torch.").replace(".", ":")
    with out_of_sight():
        return np.asarray(torch.Generator(device).get_state().numpy())
