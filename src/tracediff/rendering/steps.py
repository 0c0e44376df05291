"""`step`: what plain Python code says of its own rendering, where no recorder can look."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

Listener = Callable[[str, Any, Hashable, Mapping[str, Any]], None]
"""Called with a step's name, its value, the sample's key and what else was said of it."""

_listeners: Final[list[Listener]] = []


def step(name: str, value: Any, *, sample: Hashable = None, **attributes: Any) -> None:
    """Records one step of a sample's rendering; does nothing while nothing is recorded.

    Steps of one sample are compared in the order in which they are recorded, and the first that
    differs is named. A `text` or `template` that is given to a tokenizer afterwards is the same
    sample as the tokenizer's call.

        step("record", record, sample=record["id"])
        step("messages", messages, sample=record["id"])
        step("template", text, sample=record["id"])
        step("labels", labels, sample=record["id"])

    Args:
        name: `record`, `messages`, `tools`, `template`, `text`, `ids`, `labels`, `mask`, or a name
            of your own.
        value: A text; a list or array of integers (any framework's that NumPy can read); or
            anything that JSON can hold.
        sample: Any key that the steps of one sample share, such as its `id`. Without one, steps
            belong to the latest sample until a name comes again.
        attributes: Facts that the step depends on (`max_length=512`), shown where it differs.

    Raises:
        UsageError: While recording: the name is no identifier.
    """
    for listener in _listeners:
        listener(name, value, sample, attributes)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Has a recorder hear of steps for the duration of a `with` block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
