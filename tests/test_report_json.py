"""The JSON report: the fields of the format, and nothing that JSON cannot hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.verdicts import ATTENTION, DIVERGED, FIRST, HOSTILE, TEXT, hostile_verdict
from tracediff.report.json import dumps, plain, to_json
from tracediff.verdict import ErrorFigures, Verdict


def read(verdict: Verdict) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(dumps(to_json(verdict)), parse_constant=refuse)


def test_json_has_the_fields_of_the_format() -> None:
    found = read(DIVERGED)
    assert found["format"] == 1
    assert found["outcome"] == "diverged"
    assert (
        found["first"]
        | {
            "stage": "forward",
            "step": 0,
            "site": ATTENTION,
            "path": "model.layers.0.self_attn",
            "port": "out",
            "op": {"baseline": "LlamaAttention", "target": "Attention"},
            "kind": "value",
            "pattern": "scaled",
            "detail": {"factor": 4.0},
            "origin": "introduced",
            "blame": "target",
            "bound": {"rel_l2": 2.5e-6, "from": "matmul K=512 float32"},
            "where": {"baseline": "train.py:41", "target": "train_mlx.py:38"},
        }
        == found["first"]
    )
    assert found["first"]["error"]["max_abs"] == 1.25
    assert found["first"]["error"]["rel_l2"] == 0.125
    assert found["first"]["error"]["max_ulp"] == 1234
    assert found["last_agreeing"] == DIVERGED.last_agreeing
    forward = found["stages"][3]
    assert (forward["compared"], forward["differing"], forward["reason"]) == (1412, 300, None)
    assert forward["unmatched"] == {"baseline": 5, "target": 3}
    assert found["also"] == []
    assert found["cost"] == {"bytes_read": 10, "bytes_stored": 0, "events": 400, "seconds": 1.25}
    assert found["environment"][0] == {
        "name": "version.package0",
        "baseline": "1.0",
        "target": "2.0",
    }


@pytest.mark.parametrize("outcome", ["identical", "equivalent", "incomparable"])
def test_first_is_null_unless_diverged(outcome: str) -> None:
    assert read(replace(DIVERGED, outcome=outcome))["first"] is None


def test_further_divergences_have_the_shape_of_the_first() -> None:
    found = read(replace(DIVERGED, also=(TEXT,)))
    assert found["also"][0].keys() == found["first"].keys()
    assert found["also"][0]["bound"] is None


def test_numbers_that_json_lacks_are_strings_that_float_reads() -> None:
    error = ErrorFigures(max_abs=math.inf, rel_l2=math.nan, max_rel=-math.inf, max_ulp=None)
    found = read(replace(DIVERGED, first=replace(FIRST, error=error)))["first"]["error"]
    assert float(found["max_abs"]) == math.inf
    assert math.isnan(float(found["rel_l2"]))
    assert float(found["max_rel"]) == -math.inf
    assert found["max_ulp"] is None


def test_hostile_values_survive_json() -> None:
    assert read(hostile_verdict())["reason"] == HOSTILE


def test_plain_reduces_anything_to_json_types() -> None:
    value = {1: (np.float32(0.5), np.int64(3), np.bool_(True)), "b": b"\xff", "n": np.array([1.5])}
    assert plain(value) == {"1": [0.5, 3, True], "b": "ff", "n": [1.5]}
    assert type(plain(np.float64(2.0))) is float
