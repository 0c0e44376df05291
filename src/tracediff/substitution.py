"""Replay by substitution: one run's script, each module of which is given the other run's inputs.

An error that travels through a network hides whether a place adds to it. With the baseline's own
inputs given to each module of the target, what still differs at its output was introduced there.
The value that the target itself computed for an input is recorded before it is replaced, so that
code between modules is judged as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tracediff.align import Rules, align, load_rules
from tracediff.bisection.given import SETTING, identity
from tracediff.errors import UsageError
from tracediff.events import Event, Pair, Run, Site
from tracediff.session import record_script
from tracediff.stacks import load_substituter
from tracediff.trace import Trace


class Inputs:
    """The baseline's values for the inputs of the target's modules, by the target's sites.

    Attributes:
        steps: Steps for which there are any.
    """

    def __init__(self, baseline: Trace, target: Trace, rules: Rules | None = None) -> None:
        """
        Raises:
            UsageError: No input of one has a value in the other.
        """
        self._baseline = baseline
        self._events: dict[Site, Event] = {}
        stacks = (baseline.run.stack, target.run.stack)
        for step in sorted(set(baseline.steps) & set(target.steps)):
            pairs = align(
                baseline.events(step, samples=False),
                target.events(step, samples=False),
                stacks,
                rules,
            ).pairs
            self._events |= {p.target.site: p.baseline for p in pairs if _fits(p)}
        self.steps = sorted({site.step for site in self._events})
        if not self._events:
            raise UsageError(
                f"{baseline.path} holds no input for any module of {target.path}: record both at "
                "--level module, and see `tracediff diff` for what is paired"
            )

    def __call__(self, site: Site) -> NDArray[Any] | None:
        """The baseline's value for an input of the target, or None where it is left as it is."""
        event = self._events.get(site)
        return None if event is None else self._baseline.array(event)


def _fits(pair: Pair) -> bool:
    """Whether the baseline's value can take the place of the target's."""
    a, b = pair.baseline, pair.target
    is_input = b.site.phase == "forward" and (b.site.port == "in" or b.site.port.startswith("in."))
    alike = a.shape == b.shape and _is_float(a) == _is_float(b)
    return is_input and alike and a.payload is not None


def _is_float(event: Event) -> bool:
    return event.dtype.startswith(("float", "bfloat", "complex"))


def replay(
    script: str,
    args: Sequence[str],
    *,
    target: Path,
    baseline: Path,
    output: Path,
    rules: Path | None = None,
    overwrite: bool = False,
) -> Run:
    """Runs the target's script on its stack, with the baseline's inputs given to each module.

    Args:
        script, args: What `target` is a recording of.
        output: Where the trace of the replay is written.

    Returns:
        The manifest of the replay. Its setting `replay` says what was replayed with what.

    Raises:
        UsageError: The script is not the one that was recorded, or nothing can be substituted.
        ScriptError: As `session.record_script` does.
    """
    with Trace(baseline) as given, Trace(target) as own:
        check(script, own.run, given, output)
        inputs = Inputs(given, own, load_rules(rules) if rules else None)
        make = load_substituter(own.run.stack)
        settings: Mapping[str, Any] = {
            SETTING: {"of": identity(own.run), "with": identity(given.run), "steps": inputs.steps}
        }
        return record_script(
            script,
            args,
            output=output,
            stack=own.run.stack,
            overwrite=overwrite,
            settings=settings,
            recorder=lambda tape: make(tape, inputs),
        )


def check(script: str, run: Run, baseline: Trace, output: Path) -> None:
    """Refuses to write over the baseline, and another script than was recorded.

    Raises:
        UsageError: One of both.
    """
    if output.resolve() == baseline.path.resolve():
        raise UsageError(f"-o {output} is the baseline: give another path for the replay")
    recorded = Path(run.argv[0]).name if run.argv else ""
    if recorded and Path(script).name != recorded:
        raise UsageError(
            f"{script} is not what was recorded: the trace is of {recorded}; give that script with "
            "the arguments it had then"
        )
