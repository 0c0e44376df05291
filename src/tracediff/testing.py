"""For tests: builders of traces, and the conformance tests that every recorder must pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tracediff.events import Event, Run, Site
from tracediff.session import record
from tracediff.trace import Trace, TraceWriter, verify
from tracediff.trace.summary import digest, digest_value, fingerprint


def build_event(site: Site | str, value: Any, order: int = 0, /, **fields: Any) -> Event:
    """An event as a recorder would make it, with digest and fingerprint of its value.

    Args:
        value: An array, a text, or any JSON value; by default the kind is `tensor`, `text`,
            `scalar` (a float) or `setting`.
        fields: Further fields of the event, such as `kind`, `op`, `dims` or `inputs`.
    """
    place = Site.parse(site) if isinstance(site, str) else site
    if isinstance(value, np.ndarray):
        defaults: dict[str, Any] = {
            "dtype": value.dtype.name,
            "shape": value.shape,
            "digest": digest(value),
            "fingerprint": fingerprint(value) if value.dtype.kind != "c" else (),
        }
    else:
        kind = {str: "text", float: "scalar"}.get(type(value), "setting")
        defaults = {"kind": kind, "value": value, "digest": digest_value(value)}
    return Event(**{"site": place, "order": order, **defaults, **fields})


def build_trace(
    path: str | Path,
    values: Iterable[tuple[str, Any]],
    *,
    stack: str = "pytorch",
    status: str = "finished",
    compress: bool = False,
    seal: bool = False,
    **run_fields: Any,
) -> Path:
    """Writes a trace of the given values, every payload kept.

    Args:
        path: Folder to create.
        values: Site, as it is printed, and value of each event in execution order, steps
            ascending. A pair's value may also be a tuple of value and further event fields.
        status: `recording` leaves the trace as a killed run would.
        compress, seal: As `TraceWriter` has them.
        run_fields: Further fields of the run manifest.
    """
    with TraceWriter(path, Run(stack=stack, **run_fields), compress=compress, seal=seal) as writer:
        step, orders = -1, count()
        for text, given in values:
            value, fields = given if isinstance(given, tuple) else (given, {})
            site = Site.parse(text)
            if site.step != step:
                writer.commit_step()
                step, orders = site.step, count()
            payload = value if isinstance(value, np.ndarray) else None
            writer.add(build_event(site, value, next(orders), **fields), payload)
        writer.commit_step()
        writer.finish(status, run_fields.get("error"))
    return Path(path)


class RecorderConformance:
    """What every recorder owes its users; subclass it in a test module of the stack's own.

    Set `stack`, and let `train` make a small deterministic model with at least one linear layer
    and one optimizer, run it for a number of updates, evaluate it once after the last, and return
    its final weights.
    """

    stack: ClassVar[str]

    def train(self, steps: int) -> Mapping[str, np.ndarray[Any, Any]]:
        raise NotImplementedError

    def _recorded(self, path: Path, level: str = "module") -> Mapping[str, np.ndarray[Any, Any]]:
        with record(path, stack=self.stack, level=level):
            return self.train(steps=3)

    def test_recording_does_not_change_the_weights(self, tmp_path: Path) -> None:
        plain = self.train(steps=3)
        for level in ("module", "digest", "op"):
            recorded = self._recorded(tmp_path / level, level)
            assert plain.keys() == recorded.keys()
            assert all(np.array_equal(plain[name], recorded[name]) for name in plain)

    def test_two_recordings_have_the_same_digests(self, tmp_path: Path) -> None:
        digests = []
        for name in ("first", "second"):
            self._recorded(tmp_path / name)
            with Trace(tmp_path / name) as trace:
                events = [e for e in trace.events() if e.site.phase not in ("environment", "rng")]
                digests.append([(str(event.site), event.digest) for event in events])
        assert digests[0] == digests[1]

    def test_every_stage_of_an_update_is_recorded(self, tmp_path: Path) -> None:
        self._recorded(tmp_path / "run")
        with Trace(tmp_path / "run") as trace:
            for step in range(3):
                found = {event.site.phase for event in trace.events(step)}
                assert {"forward", "loss", "backward", "optimizer", "trajectory"} <= found
            ports = {event.site.port for event in trace.events(0)}
        assert {"in", "out", "param", "grad_out", "grad", "hyper", "update"} <= ports

    def test_every_payload_matches_its_digest(self, tmp_path: Path) -> None:
        self._recorded(tmp_path / "run")
        assert verify(tmp_path / "run").sound

    def test_an_update_is_what_the_parameter_moved_by(self, tmp_path: Path) -> None:
        self._recorded(tmp_path / "run")
        with Trace(tmp_path / "run") as trace:
            events = {str(event.site): event for event in trace.events()}
            updates = [e for e in events.values() if e.site.port == "update" and e.site.step == 0]
            assert updates
            for update in updates:
                before = trace.array(events[f"0/loading/{update.site.path}:param"])
                after = trace.array(events[f"0/optimizer/{update.site.path}:param"])
                assert np.array_equal(after - before, trace.array(update))

    def test_inputs_of_an_event_come_before_it(self, tmp_path: Path) -> None:
        self._recorded(tmp_path / "run")
        with Trace(tmp_path / "run") as trace:
            for event in trace.events():
                assert all(0 <= order < event.order for order in event.inputs)

    def test_operations_and_their_inputs_form_a_closed_graph(self, tmp_path: Path) -> None:
        self._recorded(tmp_path / "run", "op")
        with Trace(tmp_path / "run") as trace:
            events = [e for e in trace.events(1) if e.attributes.get("level") == "op"]
        orders = {event.order for event in events}
        assert {"forward", "loss", "backward", "optimizer"} <= {e.site.phase for e in events}
        for event in events:
            assert set(event.inputs) <= orders
            assert event.attributes["canonical"] == event.site.path.rpartition("@")[2]
            assert not (event.attributes.get("leaf") and event.inputs)

    def test_operations_leave_the_other_events_as_they_are(self, tmp_path: Path) -> None:
        sites = []
        for level in ("module", "op"):
            self._recorded(tmp_path / level, level)
            with Trace(tmp_path / level) as trace:
                sites.append(
                    [
                        (str(event.site), event.digest)
                        for event in trace.events()
                        if event.attributes.get("level") != "op" and event.site.phase != "rng"
                    ]
                )
        assert sites[0] == sites[1]

    def test_what_ran_before_an_exception_is_kept(self, tmp_path: Path) -> None:
        try:
            with record(tmp_path / "run", stack=self.stack):
                self.train(steps=1)
                raise KeyError("planted")
        except KeyError:
            pass
        with Trace(tmp_path / "run") as trace:
            assert trace.run.status == "failed"
            assert any(event.site.port == "update" for event in trace.events(0))

    def test_nothing_is_recorded_after_the_block(self, tmp_path: Path) -> None:
        self._recorded(tmp_path / "run")
        with Trace(tmp_path / "run") as trace:
            steps, count_before = trace.steps, len(trace.events())
        self.train(steps=2)
        with Trace(tmp_path / "run") as trace:
            assert (trace.steps, len(trace.events())) == (steps, count_before)
