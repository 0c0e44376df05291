"""Conversations from a JSONL file, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tracediff.errors import UsageError

_PAIRS: Final = (("question", "answer"), ("prompt", "completion"), ("instruction", "output"))
_EXPECTED: Final = "expected 'messages', or 'question' and 'answer', or 'prompt' and 'completion'"


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for every record: the flag, tools for records without any, variables."""

    add_generation_prompt: bool = False
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """One conversation, complete: all that a chat template is given.

    Attributes:
        index: Place in the file, counted from 0, blank lines left out.
        line: Line in the file, counted from 1.
        identity: The record's `id`, or None.
    """

    index: int
    line: int
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = False
    identity: str | None = None
    offset: int = 0
    """Bytes of the file up to the end of this record's line."""

    @property
    def has_system(self) -> bool:
        """Whether one of the messages is the system's."""
        return any(message.get("role") in ("system", "developer") for message in self.messages)


def read_records(path: Path, settings: Settings, limit: int | None = None) -> Iterator[Record]:
    """Reads records line by line; holds one at a time.

    Raises:
        UsageError: A line is no JSON object, or not one with a conversation in it.
    """
    index = offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            offset += len(line)
            if not line.strip():
                continue
            if index == limit:
                return
            yield _record(path, index, number, line, settings, offset)
            index += 1


def read_tools(path: Path) -> list[Any]:
    """Reads a JSON list of tool schemas.

    Raises:
        UsageError: The file is no JSON list.
    """
    try:
        tools = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is no JSON ({error}): give a list of tool schemas") from None
    if not isinstance(tools, list):
        raise UsageError(f"{path} holds {type(tools).__name__}: give a list of tool schemas")
    return tools


def _record(
    path: Path, index: int, number: int, line: bytes, settings: Settings, offset: int
) -> Record:
    place = f"{path}, line {number}"
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place} is no JSON ({error}): give one object per line") from None
    if not isinstance(found, dict):
        raise UsageError(f"{place} holds {type(found).__name__}, expected an object per line")
    tools = found.get("tools")
    identity = found.get("id")
    return Record(
        index=index,
        line=number,
        messages=_messages(found, place),
        tools=settings.tools if tools is None else tools,
        variables={**settings.variables, **found.get("chat_template_kwargs", {})},
        add_generation_prompt=settings.add_generation_prompt,
        identity=None if identity is None else str(identity),
        offset=offset,
    )


def _messages(found: Mapping[str, Any], place: str) -> list[Mapping[str, Any]]:
    messages = found.get("messages")
    if messages is None:
        pair = next((pair for pair in _PAIRS if pair[0] in found), None)
        if pair is None:
            fields = ", ".join(map(repr, found)) or "no field"
            raise UsageError(f"{place} has {fields}; {_EXPECTED}")
        messages = [{"role": "user", "content": found[pair[0]]}]
        if found.get(pair[1]) is not None:
            messages.append({"role": "assistant", "content": found[pair[1]]})
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        raise UsageError(f"{place}: 'messages' is no list of objects; {_EXPECTED}")
    if "system" in found and not any(message.get("role") == "system" for message in messages):
        messages = [{"role": "system", "content": found["system"]}, *messages]
    return messages
