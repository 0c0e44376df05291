"""The chain of rendering steps of each sample, whichever library takes them.

    record -> messages, tools, documents -> template -> text -> ids -> labels, mask -> batch

Hooks into libraries call a `Chain`; it numbers the samples, knows which sample a text or a row of
IDs belongs to, and writes the events. A process that was forked from the recorded one (a data
loader's worker, `datasets.map`) cannot write into the trace: its chain spools, see `spooled`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.errors import UsageError
from tracediff.forks import process_id
from tracediff.recorders.rendering_spool import Operation
from tracediff.recording import Patches, Tape
from tracediff.rendering.steps import listening
from tracediff.source_lines import user_line
from tracediff.trace.summary import digest

PLAIN: Final = (bool, int, float, str, type(None))
_LAYERS: Final = (
    ("record",),
    ("messages", "tools", "documents"),
    ("template",),
    ("text",),
    ("normalized",),
    ("ids",),
    ("labels", "mask"),
)
"""Steps in the order in which they are taken: each is made of the layer before it."""

_LABELS: Final = ("labels", "completion_mask", "assistant_masks", "loss_mask")
"""Fields that say which tokens of a sample are trained, the most telling first."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CANDIDATES: Final = 8
_SAME_SAMPLE: Final = 0.9
_REMEMBERED: Final = 1 << 18
"""Latest samples whose IDs are known again in a batch, and whose steps are joined."""

_BATCHES: Final = 1024
"""Latest batches that are known again when a model is called with them: loaders prefetch some."""


class Chain:
    """The samples of one recorded run; one instance per tape."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._process = process_id()
        self._active = True
        self._inside = False
        self._count = 0
        self._orders: dict[int, dict[str, int]] = {}
        self._step = 0
        self._rendered: dict[str, deque[int]] = defaultdict(deque)
        self._by_ids: dict[bytes, int] = {}
        self._by_key: dict[Hashable, int] = {}
        self._labelled: set[int] = set()
        self._records: deque[str] = deque()
        self._spool: list[Operation] = []
        self._batches: dict[bytes, Batch] = {}
        self._emitted: tuple[str, int, int] | None = None

    def attach(self, patches: Patches) -> None:
        """Hears of `tracediff.rendering.step` and of batches until the patches are undone."""
        listener = listening(self.told)
        listener.__enter__()
        patches.on_undo(listener.__exit__, None, None, None)
        self._tape.on_batch.append(self._used)
        patches.on_undo(self._tape.on_batch.remove, self._used)
        patches.on_undo(self._end)

    def _end(self) -> None:
        """Nothing is recorded any more, also by wrappers that other modules have imported."""
        self._active = False

    @contextmanager
    def outermost(self) -> Iterator[bool]:
        """Whether a library's call is not made by another one that is recorded."""
        if self._inside or not self._active:
            yield False
            return
        self._inside = True
        try:
            yield True
        finally:
            self._inside = False

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the recorded one."""
        return process_id() != self._process

    # ---- samples ---------------------------------------------------------------------------

    def new(self) -> int:
        """Begins a sample, with the raw record that is being processed, if one is."""
        index, self._count = self._count, self._count + 1
        if self.forked:
            self._spool.append(("new", index))
        if self._records:
            self.text(index, "record", self._records.popleft())
        return index

    @contextmanager
    def processing(self, records: Sequence[Any]) -> Iterator[None]:
        """The first samples begun inside the block are made of these raw records."""
        self._records = deque(map(as_json, records))
        try:
            yield
        finally:
            self._records.clear()

    def waits(self, index: int, text: str) -> None:
        """The text that a sample's template made may be given to a tokenizer later."""
        self._rendered[text].append(index)

    def sample_of(self, text: str) -> int:
        """The sample that a template made of this text, or else a new one."""
        made = text if text in self._rendered else self._changed_into(text)
        if made is None:
            return self.new()
        waiting = self._rendered[made]
        index = waiting.popleft()
        if not waiting:
            del self._rendered[made]
        return index

    def _changed_into(self, text: str) -> str | None:
        """The template's text that the script seems to have changed into this one.

        Only the texts that wait longest and shortest are looked at: scripts tokenize a text right
        after making it, or all of them in the order in which they were made.
        """
        waiting = list(islice(self._rendered, _CANDIDATES))
        waiting += islice(reversed(self._rendered), _CANDIDATES)
        best = max(waiting, key=lambda made: _likeness(made, text), default=None)
        return best if best is not None and _likeness(best, text) >= _SAME_SAMPLE else None

    def row(self, ids: Any) -> int:
        """The latest sample with these token IDs, or else a new one that begins with them."""
        array = as_ids(ids)
        found = self._by_ids.get(digest(array))
        if found is None:
            found = self.new()
            self.ids(found, array)
        return found

    # ---- events ----------------------------------------------------------------------------

    def text(self, index: int, step: str, text: str, attributes: Mapping[str, Any] = {}) -> None:
        self._emit(index, step, text, "text", attributes)

    def ids(
        self,
        index: int,
        ids: Any,
        attributes: Mapping[str, Any] = {},
        step: str = "ids",
    ) -> None:
        """Records token IDs, labels or a mask of one sample, 1-D."""
        array = as_ids(ids)
        kind = step if step in ("labels", "mask") else "ids"
        self._emit(index, step, array, kind, attributes)
        if step == "ids":
            self._by_ids[digest(array)] = index
            _forget(self._by_ids)

    def labels(self, index: int, labels: Any, step: str = "labels") -> None:
        """Records the labels (or loss mask) of a sample, once: epochs repeat them."""
        if index not in self._labelled:
            self._labelled.add(index)
            self.ids(index, labels, step=step)

    def feature(self, feature: Mapping[str, Any]) -> None:
        """Records what a sample brings along besides its IDs, as a collator is given it."""
        if feature.get("input_ids") is None:
            return
        fields = {name: feature.get(name) for name in _LABELS}
        if any(value is not None for value in fields.values()):
            index = self.row(feature["input_ids"])
            name, labels = next((n, v) for n, v in fields.items() if v is not None)
            self.labels(index, labels, "labels" if name == "labels" else "mask")

    def settings(self, settings: Mapping[str, Any]) -> None:
        if self.forked:
            self._spool.append(("settings", dict(settings)))
        else:
            self._tape.emit_settings(settings)

    def decoded(self, number: int, text: str, attributes: Mapping[str, Any]) -> None:
        """Records the text that token IDs were turned into, under their number."""
        if not self.forked:
            path = f"decoded[{number:014x}]"
            self._tape.emit("rendering", path, "out", text, kind="text", attributes=attributes)

    def told(self, name: str, value: Any, key: Hashable, attributes: Mapping[str, Any]) -> None:
        """Takes a step that the script itself tells of.

        Raises:
            UsageError: The name could not stand in a path.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name of a step: use letters, digits and underscores, as 'labels'"
            )
        index = self._by_key.get(key)
        if index is None or (key is None and name in self._orders.get(index, {})):
            index = self._by_key[key] = self.new()
            _forget(self._by_key)
        if isinstance(value, str):
            self.text(index, name, value, attributes)
            if name in ("template", "text"):
                self.waits(index, value)
        elif (array := integers(value)) is not None:
            self.ids(index, array, attributes, name)
        else:
            self.text(index, name, as_json(value), attributes)

    def _emit(
        self, index: int, step: str, value: Any, kind: str, attributes: Mapping[str, Any]
    ) -> None:
        if not self._active:
            return
        if self.forked:
            kept = value.tolist() if isinstance(value, np.ndarray) else value
            self._orders.setdefault(index, {})[step] = 0
            self._spool.append(("event", [index, step, kept, kind, dict(attributes)]))
            return
        if self._tape.step != self._step:
            self._step = self._tape.step
            self._orders.clear()
        known = self._orders.setdefault(index, {})
        _forget(self._orders)
        known[step] = self._tape.emit(
            "rendering",
            f"sample[{index}].{step}",
            "out",
            value,
            kind=kind,
            source=user_line(),
            dims=("sequence",) if isinstance(value, np.ndarray) else (),
            inputs=_made_of(step, known),
            attributes=attributes,
        )

    # ---- batches ---------------------------------------------------------------------------

    def collated(self, rows: Sequence[Any], batch: Any, indices: Sequence[int] | None) -> None:
        """Remembers what a batch was made of until a model is called with it.

        Args:
            rows: Token IDs of each sample, in the order in which they were collated.
            batch: The batch's token IDs.
            indices: Places of the samples in the data set, as the sampler drew them.
        """
        if not self._active:
            return
        array = np.ascontiguousarray(batch, dtype=np.int64)
        contents = [content_of(row) for row in rows]
        if self.forked:
            self._spool.append(("batch", [digest(array).hex(), contents, indices]))
        else:
            self._remember(digest(array), Batch(contents, indices))

    def _remember(self, key: bytes, batch: Batch) -> None:
        self._batches[key] = batch
        while len(self._batches) > _BATCHES:
            del self._batches[next(iter(self._batches))]

    def _used(self, array: NDArray[Any], prefix: str, call: int) -> None:
        """Records the order of sampling and of collation of a batch that a model is given."""
        here = prefix, self._tape.step, call
        if array.dtype.kind not in "iu" or self._emitted == here:
            return
        batch = self._batches.get(digest(np.ascontiguousarray(array, dtype=np.int64)))
        if batch is None:
            return
        self._emitted = here
        drawn: tuple[int, ...] = ()
        for name, values in (("indices", batch.indices), ("samples", batch.samples)):
            if values:
                order = self._tape.emit(
                    "rendering",
                    f"{prefix}.{name}",
                    "out",
                    np.array(values, np.int64),
                    kind="ids",
                    call=call,
                    dims=("batch",),
                    inputs=drawn,
                )
                drawn = (order,)

    # ---- other processes -------------------------------------------------------------------

    def spooled(self) -> list[Operation]:
        """In a forked process: what was recorded since the last call, to be `replay`ed."""
        taken, self._spool = self._spool, []
        return taken

    def replay(self, operations: Sequence[Operation], numbers: dict[int, int]) -> None:
        """Writes what a forked process spooled.

        Args:
            numbers: Index of a sample begun there -> its index here; grows as samples appear.
        """
        for name, content in operations:
            if name == "new":
                numbers[content] = self.new()
            elif name == "settings":
                self.settings(content)
            elif name == "batch":
                key, samples, indices = content
                self._remember(bytes.fromhex(key), Batch(samples, indices))
            else:
                index, step, value, kind, attributes = content
                index = numbers.get(index, index)  # one from before the fork keeps its number
                if kind == "text":
                    self.text(index, step, value, attributes)
                elif step in ("labels", "mask"):
                    self.labels(index, value, step)
                else:
                    self.ids(index, value, attributes, step)


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch was collated from: a number per sample that its IDs determine, and places."""

    samples: Sequence[int]
    indices: Sequence[int] | None


def content_of(ids: Any) -> int:
    """A number that the token IDs of a sample determine: the same in both runs, in any order."""
    return int.from_bytes(digest(as_ids(ids))[:7], "little")


def _made_of(step: str, known: Mapping[str, int]) -> tuple[int, ...]:
    """Orders of the recorded steps that a step is made of: those of the nearest layer before it."""
    place = next((i for i, layer in enumerate(_LAYERS) if step in layer), None)
    if place is None:  # a step of the script's own follows the one before it
        return tuple(order for name, order in known.items() if name != step)[-1:]
    for layer in reversed(_LAYERS[:place]):
        if found := tuple(known[name] for name in layer if name in known):
            return found
    return ()


def as_ids(ids: Any) -> NDArray[np.int64]:
    return np.asarray(ids, dtype=np.int64).reshape(-1)


def integers(value: Any) -> NDArray[np.int64] | None:
    """A list or an array of integers (or booleans) as one row; None for anything else."""
    if isinstance(value, str | bytes | Mapping) or value is None:
        return None
    if isinstance(value, list | tuple) and not value:
        return np.empty(0, np.int64)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    return as_ids(array) if array.ndim and array.size and array.dtype.kind in "iub" else None


def as_json(value: Any) -> str:
    """A value as JSON text in the order of its own keys."""
    return json.dumps(plain(value), ensure_ascii=False)


def plain(value: Any) -> Any:
    """A value as JSON types: objects by their fields, arrays by their items, else by its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, PLAIN):
        return value
    if hasattr(value, "messages"):
        return plain(value.messages)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def _likeness(made: str, text: str) -> float:
    """Share of the characters that two texts have in common, wherever they stand."""
    return SequenceMatcher(None, made, text, autojunk=False).quick_ratio()


def _forget(known: dict[Any, Any]) -> None:
    """Drops what has been remembered longest."""
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]
