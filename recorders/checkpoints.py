"""Weight files: which ones a run opens, on any stack."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from tracediff.checkpoint import Checkpoints
from tracediff.recording import Patches


def watch_safetensors(checkpoints: Checkpoints, patches: Patches) -> None:
    """Has `safetensors.safe_open`, which all loaders of that package go through, tell its files.

    Modules that imported it by name hold it themselves, so it is replaced wherever it is.
    """
    if importlib.util.find_spec("safetensors") is None:
        return
    original: Any = importlib.import_module("safetensors").safe_open
    for module in list(sys.modules.values()):
        if vars(module).get("safe_open") is original:
            patches.replace(module, "safe_open", checkpoints.watching)
