"""Snapshots while recording, and putting one back in a rerun; the generators of Python and NumPy.

What a run is made of is known to the stack's recorder (weights, optimizers, its generators) and to
this module (the generators that every Python program has). Both are captured before the first call
of a model in a step, after the batch was made.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracediff.errors import UsageError
from tracediff.recording import Recorder, Tape, watch_generators
from tracediff.rerun import Rerun, follow
from tracediff.trace.snapshot import Tree

Array = NDArray[Any]


def python_generators() -> dict[str, Array]:
    """States of the global generators of Python and NumPy: 624 words and a place among them."""
    state = np.random.get_state(legacy=False)["state"]
    words = np.empty(len(state["key"]) + 1, np.uint32)
    words[:-1], words[-1] = state["key"], state["pos"]
    # By way of an array of Python's, which takes half as long.
    return {"python": np.asarray(array("I", random.getstate()[1])), "numpy": words}


def set_python_generators(states: Mapping[str, Array]) -> None:
    """Puts the global generators into given states, without a spare Gaussian number."""
    if (words := states.get("python")) is not None:
        random.setstate((3, tuple(map(int, words)), None))
    if (words := states.get("numpy")) is not None:
        np.random.set_state(("MT19937", words[:-1], int(words[-1]), 0, 0.0))


def watch_python_generators(tape: Tape) -> None:
    """Records the states of Python's and NumPy's global generators around each step."""
    watch_generators(tape, python_generators)


def attach_snapshots(tape: Tape, recorder: Recorder, every: int, keep: int | None) -> None:
    """Writes a snapshot before every step that `every` divides, but the first.

    Raises:
        UsageError: A number is out of its range.
    """
    for name, value in (("--snapshot-every", every), ("--keep-snapshots", keep)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}: it must be 1 or more")

    def capture() -> None:
        if not tape.step or tape.step % every:
            return
        tree = recorder.capture()
        if tree is None:
            tape.note(f"no snapshots: {recorder.stack} keeps state where it cannot be put back")
            return
        lost = tape.writer.add_snapshot(tape.step, tree | _generators(recorder), keep)
        for place in lost:
            tape.note(f"snapshots lack {place}: it is no number, text or array")

    tape.on_step_start.append(capture)


def attach_rerun(tape: Tape, recorder: Recorder, rerun: Rerun) -> None:
    """Makes a recorder skip the steps before a snapshot, and put it back at its step."""
    tape.rerun = rerun

    def restore_states(states: Mapping[str, Array]) -> None:
        set_python_generators(states)
        recorder.set_generators(states)

    def current() -> dict[str, Array]:
        return python_generators() | dict(recorder.generators())

    def begin() -> None:
        if tape.skipping:
            follow(rerun, tape.step, "state", current(), restore_states)
        elif tape.step == rerun.start and rerun.start:
            tree = rerun.snapshot()
            recorder.restore(tree)
            _set_generators(recorder, tree)
            tape.emit_settings(tape.settings_of_skipped)

    def evaluate() -> None:
        """Before the first call of the step, only what an evaluation depends on: the script may
        yet move its schedules on."""
        if tape.step == rerun.start and rerun.start and not tape.step_started:
            recorder.restore_weights(rerun.snapshot())

    def end() -> None:
        if tape.skipping:
            follow(rerun, tape.step, "after", current(), restore_states)

    tape.on_step_start.insert(0, begin)
    tape.on_step_end.append(end)
    tape.on_evaluation.append(evaluate)


def _generators(recorder: Recorder) -> Tree:
    """States of all generators, with the spare Gaussian numbers of Python and NumPy."""
    spare = np.random.get_state(legacy=False)
    return {
        "generators": python_generators() | dict(recorder.generators()),
        "spare": {
            "python": random.getstate()[2],
            "numpy": [int(spare["has_gauss"]), float(spare["gauss"])],
        },
    }


def _set_generators(recorder: Recorder, tree: Tree) -> None:
    states = tree["generators"]
    recorder.set_generators(states)
    words, spare = states["python"], tree["spare"]
    random.setstate((3, tuple(map(int, words)), spare["python"]))
    words = states["numpy"]
    np.random.set_state(("MT19937", words[:-1], int(words[-1]), *spare["numpy"]))
