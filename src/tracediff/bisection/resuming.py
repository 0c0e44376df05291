"""Takes up a comparison at a step, with parameters and optimizer state as the one before left them.

How far they are apart is measured, and taken for rounding: the steps until then were held to it.
"""

from __future__ import annotations

from tracediff.bisection.common import common_form
from tracediff.bisection.inheritance import State
from tracediff.bisection.level import Level
from tracediff.bisection.options import Options
from tracediff.bisection.values import estimate, is_float, read_pair
from tracediff.compare.figures import measure
from tracediff.events import Pair
from tracediff.trace import Trace


def resume(traces: tuple[Trace, Trace], step: int, state: State, options: Options) -> None:
    """Brings the state to the end of a step that was not judged."""
    common, _ = common_form(traces, step, state, options, every_sample=False)
    for memory, history, events in zip(state.memory, state.histories, common.events, strict=True):
        memory.finish(events)
        history.finish(events)
    for pair in common.alignment.pairs:
        site = pair.baseline.site
        if site.phase != "optimizer" or not is_float(pair.baseline):
            continue
        if site.port == "param":
            state.parameters.learn(pair, _level(traces, pair))
        elif site.port.startswith("state."):
            state.moments[site.path, site.port] = _level(traces, pair)


def _level(traces: tuple[Trace, Trace], pair: Pair) -> Level:
    if pair.baseline.digest == pair.target.digest and pair.layout == "same":
        return Level()
    values = read_pair(traces, pair)
    alike = values is not None and values[0].shape == values[1].shape
    figures = measure(*values) if values is not None and alike else estimate(pair)
    return Level(figures.error.rel_l2, figures.error.rel_l2)
