"""Weight files as a third arm: reading, recording, and whom they blame."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tracediff.bisection import bisect
from tracediff.checkpoint import Checkpoints, WeightFile, named
from tracediff.errors import TraceError
from tracediff.events import Run
from tracediff.recording import Policy, Tape
from tracediff.trace import Trace, TraceWriter
from tracediff.verdict import Divergence

Array = NDArray[Any]
Weights = Mapping[str, Array]


def write(path: Path, arrays: Weights) -> Path:
    """A safetensors file, by the format's description."""
    names = {np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, array in arrays.items():
        data = array.tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {
            "dtype": names[array.dtype], "shape": array.shape, "data_offsets": offsets
        }  # fmt: skip
        body += data
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


WEIGHTS = {"model.a.weight": array(4, 4), "model.b.weight": array(3, 4, seed=1)}


# ---- reading ------------------------------------------------------------------------------------


def test_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    odd = {"x": array(3).astype(ml_dtypes.bfloat16), "y": array(2, 2), "empty": array(0, 2)}
    file = WeightFile(write(tmp_path / "a.safetensors", odd))
    assert sorted(file) == ["empty", "x", "y"]
    for name, value in odd.items():
        assert file.array(name).dtype == value.dtype
        assert np.array_equal(file.array(name), value)


def test_the_reader_agrees_with_the_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    library.save_file(WEIGHTS, tmp_path / "a.safetensors")
    file = WeightFile(tmp_path / "a.safetensors")
    assert all(np.array_equal(file.array(name), value) for name, value in WEIGHTS.items())


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 16, (2).to_bytes(8, "little") + b"[]"])
def test_what_is_no_weight_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"a\.safetensors: cannot be read"):
        WeightFile(path)


def test_a_file_cut_off_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", WEIGHTS)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(TraceError, match=r"model\.b\.weight is cut off"):
        WeightFile(path).array("model.b.weight")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("transformer.h.0.attn.c_attn.weight", "h.0.attn.c_attn.weight"),
        ("model.h.0.attn.c_attn.weight", "h.0.attn.c_attn.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("model.layers.1.mlp.up_proj.base_layer.weight", "model.layers.1.mlp.up_proj.weight"),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        ("base_model.model.q.lora_A.default.weight", "base_model.model.q.lora_A.weight"),
        ("lm_head.weight", None),
        ("model.layers.2.mlp.up_proj.weight", None),
    ],
)
def test_names_mean_the_same_tensor(path: str, name: str | None) -> None:
    names = [
        "h.0.attn.c_attn.weight",
        "model.norm.weight",
        "model.layers.0.input_norm.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "base_model.model.q.lora_A.weight",
    ]
    assert named(path, names) == name


# ---- recording and blame ------------------------------------------------------------------------


def record(
    path: Path,
    file: Path | None,
    params: Weights,
    settings: Mapping[str, Any] | None = None,
    level: str = "module",
) -> Path:
    """A trace of one model call, with the given parameters, loaded from a file."""
    writer = TraceWriter(path, Run(stack="pytorch", level=level))
    tape = Tape(writer, Policy(level=level))
    checkpoints = Checkpoints(tape)
    if file is not None:
        checkpoints.watching(lambda filename: None)(file)
    tape.emit_settings(settings or {})
    for name, value in params.items():
        tape.emit("loading", name, "param", value)
    checkpoints.emit()
    frame = tape.enter("root", "Model")
    tape.emit_in(frame, "in", array(2, 4))
    tape.emit_out(frame, "out", array(2, 4, seed=5))
    tape.exit(frame)
    tape.advance()
    tape.finish()
    return path


def first(tmp_path: Path, baseline: Path, target: Path) -> Divergence:
    found = bisect(baseline, target).first
    assert found is not None
    return found


def changed(name: str, edit: Any) -> Weights:
    return {**WEIGHTS, name: np.ascontiguousarray(edit(WEIGHTS[name]))}


EDITS = {
    "one weight": ("model.b.weight", lambda a: a + 0.05 * (np.arange(12).reshape(3, 4) == 5)),
    "scaled": ("model.a.weight", lambda a: 1.01 * a),
    "zero": ("model.b.weight", np.zeros_like),
    "rounded": ("model.b.weight", lambda a: a.astype(ml_dtypes.bfloat16).astype(np.float32)),
}


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("wrong", ["baseline", "target"])
@pytest.mark.parametrize("edit", EDITS)
def test_the_side_is_blamed_that_departs_from_its_file(
    tmp_path: Path, edit: str, wrong: str, gone: bool
) -> None:
    name, function = EDITS[edit]
    file = write(tmp_path / "model.safetensors", WEIGHTS)
    sides = {
        side: record(tmp_path / side, file, changed(name, function) if side == wrong else WEIGHTS)
        for side in ("baseline", "target")
    }
    if gone:
        file.unlink()
    found = first(tmp_path, sides["baseline"], sides["target"])
    assert (found.site, found.blame) == (f"0/loading/{name}:param", wrong)
    assert f"on the {wrong} it is not what its weight file holds" in found.meaning


def test_parameters_that_change_places_are_seen_without_values(tmp_path: Path) -> None:
    """Both are in the file, so neither is kept apart: the table says under which name."""
    weights = {"model.a.weight": array(4, 4), "model.b.weight": array(4, 4, seed=1)}
    swapped = dict(zip(weights, reversed(weights.values()), strict=True))
    file = write(tmp_path / "model.safetensors", weights)
    sides = record(tmp_path / "a", file, weights), record(tmp_path / "b", file, swapped)
    assert first(tmp_path, *sides).blame == "target"


def test_a_conversion_of_the_dtype_is_no_departure(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", WEIGHTS)
    narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in WEIGHTS.items()}
    wrong = {**narrow, "model.b.weight": narrow["model.b.weight"] * ml_dtypes.bfloat16(2)}
    sides = record(tmp_path / "a", file, narrow), record(tmp_path / "b", file, wrong)
    assert first(tmp_path, *sides).blame == "target"


def test_two_different_files_leave_it_open(tmp_path: Path) -> None:
    other = changed("model.b.weight", lambda a: 2 * a)
    a = record(tmp_path / "a", write(tmp_path / "a.safetensors", WEIGHTS), WEIGHTS)
    b = record(tmp_path / "b", write(tmp_path / "b.safetensors", other), other)
    found = first(tmp_path, a, b)
    assert found.blame == "undecided"
    assert "the files differ" in found.meaning


def test_without_a_file_nobody_is_blamed(tmp_path: Path) -> None:
    other = changed("model.b.weight", lambda a: 2 * a)
    sides = record(tmp_path / "a", None, WEIGHTS), record(tmp_path / "b", None, other)
    assert first(tmp_path, *sides).blame == "undecided"


def test_a_parameter_that_is_in_the_file_and_not_in_the_model(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", WEIGHTS)
    fewer = {"model.a.weight": WEIGHTS["model.a.weight"]}
    sides = record(tmp_path / "a", file, WEIGHTS), record(tmp_path / "b", file, fewer)
    found = first(tmp_path, *sides)
    assert (found.kind, found.blame) == ("missing", "target")


def test_a_rotary_base_that_is_not_the_checkpoints(tmp_path: Path) -> None:
    file = write(tmp_path / "model" / "model.safetensors", WEIGHTS)
    (file.parent / "config.json").write_text('{"rope_parameters": {"rope_theta": 10000.0}}')
    sides = []
    for name, base in (("a", 500000.0), ("b", 10000.0)):
        tables = {"model.rotary_emb.inv_freq": (base ** -(np.arange(4) / 4)).astype(np.float32)}
        path = tmp_path / name
        sides.append(record(path, file, WEIGHTS | tables, {"config.rope_theta": base}))
    found = first(tmp_path, *sides)
    assert found.blame == "baseline"
    assert "rope_theta is 500000.0 and not 10000.0" in found.meaning


def test_the_same_file_twice_is_silent_and_stored_once(tmp_path: Path) -> None:
    weights = {"model.a.weight": array(256, 256)}
    file = write(tmp_path / "model.safetensors", weights)
    plain, watched = (record(tmp_path / n, f, weights) for n, f in (("a", None), ("b", file)))
    assert bisect(plain, watched).outcome in ("identical", "equivalent")
    with Trace(plain) as a, Trace(watched) as b:
        assert b.bytes_stored < a.bytes_stored + 10_000
        table = next(e for e in b.events() if e.site.path == "checkpoint[0]")
    assert table.value["tensors"]["model.a.weight"][:2] == ["float32", [256, 256]]


# ---- recorders ----------------------------------------------------------------------------------


def test_each_recorder_sees_the_files_of_its_loaders(tmp_path: Path) -> None:
    torch, mx = pytest.importorskip("torch"), pytest.importorskip("mlx.core")
    import mlx.nn
    from safetensors.torch import load_file

    from tracediff import record as recording

    file = write(tmp_path / "model.safetensors", {"layer.weight": array(4, 4)})

    def pytorch() -> None:
        model = torch.nn.ModuleDict({"layer": torch.nn.Linear(4, 4, bias=False)})
        model.forward = lambda x: model["layer"](x)
        model.load_state_dict(load_file(file))
        model(torch.ones(1, 4))

    def mlx_run() -> None:
        model = mlx.nn.Sequential(mlx.nn.Linear(4, 4, bias=False))
        model.load_weights([("layers.0.weight", mx.load(str(file))["layer.weight"])])
        mx.eval(model(mx.ones((1, 4))))

    for stack, run in (("pytorch", pytorch), ("mlx", mlx_run)):
        with recording(tmp_path / stack, stack=stack):
            run()
        with Trace(tmp_path / stack) as trace:
            events = [e for e in trace.events() if e.site.port == "checkpoint"]
        assert [e.value["file"] for e in events] == [str(file)]
        assert events[0].value["tensors"]["layer.weight"][3]  # loaded as it is
