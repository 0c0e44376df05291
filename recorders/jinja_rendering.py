"""Templates that a script renders with Jinja itself, without a tokenizer's help."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from tracediff.recorders.rendering_chain import PLAIN, Chain, as_json
from tracediff.recording import Patches
from tracediff.trace.summary import digest_value

_MESSAGES: Final = ("messages", "conversation", "conversations")
_PARTS: Final = ("tools", "documents")


class TemplateHooks:
    """Wraps `jinja2.Template.render` as called by the user's own code.

    What libraries render with Jinja (transformers' chat templates, pages, kernels) is their own
    business, and recorded where they are hooked into, if at all.
    """

    def __init__(self, chain: Chain, patches: Patches) -> None:
        self._chain = chain
        self._patches = patches
        self._sources: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def install(self, module: Any) -> None:
        """Wraps the classes of the imported module `jinja2.environment`."""
        self._patches.replace(module.Environment, "from_string", self._wrap_from_string)
        self._patches.replace(module.Template, "render", self._wrap_render)

    def _wrap_from_string(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def from_string(environment: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
            template = original(environment, source, *args, **kwargs)
            if isinstance(source, str):
                self._sources[template] = digest_value(source).hex()[:12]
            return template

        return from_string

    def _wrap_render(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def render(template: Any, *args: Any, **kwargs: Any) -> Any:
            ours = "site-packages" not in sys._getframe(1).f_code.co_filename
            with self._chain.outermost() as outermost:
                text = original(template, *args, **kwargs)
                if ours and outermost:
                    self._record(template, dict(*args, **kwargs), text)
            return text

        return render

    def _record(self, template: Any, context: Mapping[str, Any], text: str) -> None:
        chain, index = self._chain, self._chain.new()
        messages = next((name for name in _MESSAGES if name in context), None)
        if messages is None:
            chain.text(index, "record", as_json(context))
        else:
            chain.text(index, "messages", as_json(context[messages]))
            for name in _PARTS:
                if context.get(name):
                    chain.text(index, name, as_json(context[name]))
        inputs = {k: v for k, v in context.items() if isinstance(v, PLAIN)} if messages else {}
        if template in self._sources:
            inputs["template"] = self._sources[template]
        chain.text(index, "template", text, inputs)
        chain.waits(index, text)
