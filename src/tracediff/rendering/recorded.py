"""A recorded run as one more route: what its stack made of each conversation, from the trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tracediff.errors import UsageError
from tracediff.events import Event
from tracediff.rendering.files import read_files
from tracediff.rendering.provenance import facts_of
from tracediff.rendering.records import Record
from tracediff.rendering.routes import Named, RefusedError, Rendered
from tracediff.rendering.routes import Route as BaseRoute
from tracediff.trace import Trace
from tracediff.trace.samples import SampleRows
from tracediff.trace.summary import digest_value

_STEPS: Final = ("messages", "tools", "template", "text", "ids")
_NO_VARIABLES: Final = frozenset(
    {"add_generation_prompt", "continue_final_message", "template", "clock"}
)
"""Attributes of a template's text that are no variables of the template."""


class Recorded(BaseRoute):
    """Gives what a trace holds of each sample; renders nothing itself.

    Attributes:
        conversations: How many samples have recorded messages.
        others: How many have none, so that no other route can render them.
    """

    def __init__(self, path: Path, routes: Sequence[Named]) -> None:
        """
        Args:
            routes: The routes that it is compared with: what it shares with them is told.

        Raises:
            TraceError: The trace cannot be read.
            UsageError: It holds no rendered conversation.
        """
        self._trace = Trace(path)
        self._samples: dict[int, tuple[int, dict[str, int]]] = {}
        self._rows: dict[int, SampleRows] = {}
        for step in self._trace.steps:
            self._collect(step)
        seen = [rows for _, rows in self._samples.values()]
        self.conversations = sum("messages" in rows for rows in seen)
        self.others = len(seen) - self.conversations
        if not self.conversations:
            raise UsageError(
                f"{path} holds no conversation that could be rendered again: record a script that "
                "applies a chat template"
            )
        self.vocabulary = next((r.route.vocabulary for r in routes if r.route.vocabulary), None)
        self.parts = self._parts(routes)

    def records(self, limit: int | None = None) -> Iterator[Record]:
        """The recorded conversations, by index; each record's index is that of its sample."""
        given = 0
        for index, (step, rows) in self._samples.items():
            if "messages" not in rows or given == limit:
                continue
            given += 1
            template = self._event(index, "template")
            attributes = template.attributes if template else {}
            tools = self._event(index, "tools")
            yield Record(
                index=index,
                line=step,
                messages=json.loads(str(self._event(index, "messages").value)),  # type: ignore[union-attr]
                tools=json.loads(str(tools.value)) if tools else None,
                variables={k: v for k, v in attributes.items() if k not in _NO_VARIABLES},
                add_generation_prompt=bool(attributes.get("add_generation_prompt")),
            )

    def render(self, record: Record) -> Rendered:
        template, text, ids = (self._event(record.index, name) for name in _STEPS[2:])
        if template is None and text is None:
            raise RefusedError("no text of it was recorded")
        made = str((text or template).value)  # type: ignore[union-attr]
        return Rendered(
            made,
            None if ids is None else self._bare(ids),
            None if template is None else str(template.value),
        )

    def close(self) -> None:
        self._trace.close()

    def _collect(self, step: int) -> None:
        rows = self._rows[step] = self._trace.samples(step)
        names = [name for name, _ in rows.steps]
        for row in np.argsort(rows.order, kind="stable").tolist():
            name = names[rows.step[row]]
            if name in _STEPS:
                index = int(rows.sample[row])
                self._samples.setdefault(index, (step, {}))[1].setdefault(name, row)

    def _event(self, index: int, name: str) -> Event | None:
        step, rows = self._samples[index]
        return self._rows[step].event(rows[name]) if name in rows else None

    def _bare(self, ids: Event) -> tuple[int, ...]:
        """The recorded IDs without padding."""
        before, after = facts_of(ids.attributes).get("padded", (0, 0))
        row = self._trace.array(ids).tolist()
        return tuple(row[before : len(row) - after])

    def _parts(self, routes: Sequence[Named]) -> dict[str, str]:
        """What did the work when the run was recorded, named as the routes name it."""
        events = self._trace.events(self._trace.steps[0], samples=False)
        known = {e.site.path: e.value for e in events if e.site.phase == "environment"}
        jinja, front, rust = (
            f"{name} {known.get(f'version.{name}', 'of an unknown version')}"
            for name in ("jinja2", "transformers", "tokenizers")
        )
        return {
            "template engine": jinja,
            "template set-up": front,
            "tokenizer": f"{rust} (Rust)",
            "Unicode tables": "those of tokenizers",
            "template": _template(known.get("tokenizer.chat_template"), routes),
        }


def _template(recorded: Any, routes: Sequence[Named]) -> str:
    """The digest that routes give the template, if it is the one of the recorded run."""
    for named in routes:
        source = read_files(Path(named.name.partition(":")[2])).template
        if source is not None and digest_value(source).hex() == recorded:
            return str(named.route.parts["template"])
    return f"another one (xxh3 {str(recorded)[:12]})"
