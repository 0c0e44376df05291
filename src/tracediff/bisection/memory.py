"""What one side's calls depend on that no event of the step says: parameters and settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tracediff.events import Event


class Memory:
    """Parameters and settings of one side, as they stand before a step."""

    def __init__(self) -> None:
        self._params: dict[str, dict[str, Event]] = defaultdict(dict)
        self._aliases: dict[str, Sequence[str]] = {}
        self._trainable: set[str] = set()
        self._settings: dict[str, dict[str, Any]] = defaultdict(dict)
        self._configuration: dict[str, Any] = {}
        self._parted: set[str] = set()

    def begin(self, events: Iterable[Event]) -> None:
        """Takes in what a step finds: parameters as loaded, and settings."""
        for event in events:
            if event.site.phase == "loading" and event.site.port == "param":
                self._aliases[event.site.path] = event.attributes.get("aliases", ())
                if event.attributes.get("trainable", True):
                    self._trainable.add(event.site.path)
                self._remember(event)
            elif event.site.phase == "environment":
                self._remember_setting(event.site.path, event.value)

    def finish(self, events: Iterable[Event]) -> None:
        """Takes in what a step leaves: updated parameters. What was taken apart is then known by
        its parts alone."""
        updated = [e for e in events if (e.site.phase, e.site.port) == ("optimizer", "param")]
        for event in updated:
            if event.view and event.view.whole.site.path != event.site.path:
                self._forget(event.view.whole.site.path)
        for event in updated:
            self._remember(event)

    def forget_stale(self, events: Iterable[Event]) -> None:
        """Forgets the trainable parameters that this step, the latest, did not update."""
        updated = {e.site.path for e in events if e.site.port == "param"}
        for path in self._trainable - updated:
            self._forget(path)

    def params(self, path: str) -> Mapping[str, Event]:
        return self._params.get(path, {})

    def holds_parts(self, path: str) -> bool:
        """Whether a module has parameters of which a process holds a part: what it computes is not
        what its formula makes of them."""
        return path in self._parted

    def settings(self, path: str) -> dict[str, Any]:
        return self._configuration | self._settings.get(path, {})

    def trains(self, path: str) -> bool:
        """Whether a module has parameters that are trained."""
        return any(event.site.path in self._trainable for event in self.params(path).values())

    def _remember(self, event: Event) -> None:
        for path in (event.site.path, *self._aliases.get(event.site.path, ())):
            for owner, name in _owners(path):
                self._params[owner][name] = event
                if event.shard:
                    self._parted.add(owner)

    def _forget(self, path: str) -> None:
        for name in (path, *self._aliases.get(path, ())):
            for owner, rest in _owners(name):
                self._params[owner].pop(rest, None)

    def _remember_setting(self, path: str, value: Any) -> None:
        if path.startswith(("config.", "torch.", "mlx.")):
            self._configuration[path] = value
        for owner, name in _owners(path):
            self._settings[owner][name] = value


class History:
    """One side's parameters and optimizer state as the latest step left them."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, str], Event] = {}

    def begin(self, events: Iterable[Event]) -> None:
        """Takes in what a step finds: parameters and state as loaded."""
        self._take(events, "loading")

    def finish(self, events: Iterable[Event]) -> None:
        """Takes in what a step leaves."""
        self._take(events, "optimizer")

    def at(self, path: str, port: str) -> Event | None:
        return self._events.get((path, port))

    def _take(self, events: Iterable[Event], stage: str) -> None:
        for event in events:
            port = event.site.port
            if event.site.phase == stage and (
                port in ("param", "hyper") or port.startswith("state.")
            ):
                self._events[event.site.path, port] = event


def _owners(path: str) -> Iterable[tuple[str, str]]:
    """`a.b.c` -> (a.b, c), (a, b.c)."""
    owner, _, name = path.rpartition(".")
    while owner:
        yield owner, name
        owner, _, last = owner.rpartition(".")
        name = f"{last}.{name}"
