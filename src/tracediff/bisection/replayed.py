"""What a replay by substitution says of each forward site: introduced there, or inherited.

In a replay every module of the target ran on the baseline's own inputs, so an error at its output,
or in the code between its children, is its own. See docs/replaying.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tracediff.bisection.given import SETTING, identity
from tracediff.bisection.healing import Step
from tracediff.bisection.inheritance import Judged
from tracediff.errors import UsageError
from tracediff.trace import Trace
from tracediff.verdict import Replayed


class Replay:
    """Decides the origin of every divergence in the forward pass, step by step.

    Args:
        traces: Baseline and target of the bisection.
        replay: The replay of the target with the baseline.
        steps: The baseline and the replay judged against each other, in the order of steps.

    Raises:
        UsageError: It is no replay, or one of other runs.
    """

    def __init__(self, traces: tuple[Trace, Trace], replay: Trace, steps: Iterator[Step]) -> None:
        _check(traces, replay)
        self._path = replay.path
        self._steps = steps
        self._introduced: list[str] = []
        self._inherited = 0
        self._decided = 0

    def decide(self, step: Step) -> None:
        """Marks the divergences of a step as introduced or inherited.

        A site whose error hides in what it inherits is a divergence too, if it errs on the
        baseline's own inputs.
        """
        replayed = next((s for s in self._steps if s.number == step.number), None)
        if replayed is None:
            return
        found = {judged.event.site: judged for judged in replayed.stage("forward")}
        for judged in step.stage("forward"):
            given = found.get(judged.event.site)
            if given is not None:
                self._decide(judged, given)

    def _decide(self, judged: Judged, given: Judged) -> None:
        self._decided += 1
        errs = given.mark == "diverged" and not given.inherited
        if errs and judged.mark != "identical":
            self._introduced.append(str(judged.event.site))
            if judged.mark != "diverged":
                judged.mark, judged.kind = "diverged", given.kind
                judged.error, judged.bound = given.error, given.bound
            judged.inherited = False
            judged.blame, judged.evidence, judged.note = given.blame, given.evidence, given.note
        elif judged.mark == "diverged":
            judged.inherited = True
            self._inherited += 1

    def result(self) -> Replayed:
        return Replayed(
            trace=str(self._path),
            decided=self._decided,
            introduced=tuple(self._introduced),
            inherited=self._inherited,
        )


def _check(traces: tuple[Trace, Trace], replay: Trace) -> None:
    setting: Mapping[str, Any] = replay.run.settings.get(SETTING) or {}
    if not setting:
        raise UsageError(
            f"--replayed {replay.path} is no replay: make one with `tracediff replay B --with A`"
        )
    for trace, key, name in zip(traces, ("with", "of"), ("baseline", "target"), strict=True):
        if setting.get(key) != identity(trace.run):
            raise UsageError(
                f"--replayed {replay.path} is of another {name} than {trace.path}: replay the "
                "target with this baseline"
            )
