"""Dropout that is called as a function, and is a module in other models or on other stacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from tracediff.recorders.pytorch_modules import Call, ModuleHooks
from tracediff.recorders.pytorch_state import State
from tracediff.recording import Patches

FUSED_NOTE: Final = (
    "scaled_dot_product_attention ran with dropout_p > 0: what it drops is decided inside its "
    "kernel, is not recorded, and cannot be substituted"
)
_CLASSES: Final[Mapping[str, type[nn.Dropout | nn.Dropout2d]]] = {
    "dropout": nn.Dropout,
    "feature_dropout": nn.Dropout2d,
}
"""What each function is recorded as a call of."""


class DropoutHooks:
    """Records dropout outside of modules made for it as a module `<caller>.dropout`.

    The functions of `torch.nn.functional` end in those of `torch._VF`, also where a script has
    imported them by name. One that is off hands its input through, and is not recorded.
    """

    def __init__(self, state: State, patches: Patches, modules: ModuleHooks) -> None:
        self._state = state
        self._patches = patches
        self._modules = modules

    def install(self) -> None:
        for name in _CLASSES:
            for inplace in (False, True):
                wrap = functools.partial(self._wrap, name, inplace)
                for owner in (torch._VF, torch):
                    self._replace(owner, f"{name}_" if inplace else name, wrap)
        self._replace(F, "scaled_dot_product_attention", self._wrap_attention)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replaces a function, which TorchScript is to take for what it stands for."""
        self._patches.replace(owner, name, wrap)
        builtins: Any = torch.jit._builtins
        table = builtins._get_builtin_table()
        wrapper = getattr(owner, name)
        table[id(wrapper)] = f"aten::{name}"
        self._patches.on_undo(table.pop, id(wrapper))

    def _wrap(self, name: str, inplace: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dropout(input: Any, p: float, train: bool) -> Any:
            if not train or not 0 < p <= 1 or not self._is_of_its_own():
                return original(input, p, train)
            caller = self._state.open[-1]
            path = f"{caller.path}.dropout" if caller else ""
            module = _CLASSES[name](float(p), inplace)
            call = Call(module, (input,), {}, lambda _, given: original(given, p, train))
            return self._modules.record(call, path, {"p": module.p})

        return dropout

    def _is_of_its_own(self) -> bool:
        """Whether a call is made by code of a recorded module that is no dropout itself."""
        state = self._state
        if not state.open or self._modules.unrecorded():
            return False
        module = state.running[-1][0] if state.running else None
        return not isinstance(module, nn.modules.dropout._DropoutNd)

    def _wrap_attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def attention(*args: Any, **kwargs: Any) -> Any:
            share = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            if share > 0 and self._state.open and not self._modules.unrecorded():
                self._state.tape.note(FUSED_NOTE)
            return original(*args, **kwargs)

        return attention
