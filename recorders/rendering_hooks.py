"""Installs what sees a sample's rendering, whatever the stack."""

from __future__ import annotations

import importlib.util

from tracediff.recorders.datasets_rendering import MapHooks
from tracediff.recorders.jinja_rendering import TemplateHooks
from tracediff.recorders.rendering_chain import Chain
from tracediff.recording import Patches, Tape


def install(tape: Tape, patches: Patches) -> Chain:
    """Hooks into the libraries that are there; returns the chain that they write on."""
    chain = Chain(tape)
    chain.attach(patches)
    patches.when_imported("jinja2.environment", TemplateHooks(chain, patches).install)
    patches.when_imported("datasets.arrow_dataset", MapHooks(tape, chain, patches).install)
    if importlib.util.find_spec("transformers") is not None:
        from tracediff.recorders.transformers_rendering import RenderingHooks

        RenderingHooks(chain, patches).install()
    return chain
