"""How `benchmarks.fuzz` mutates a trace: a few wrong things, where a reader has to parse."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from tracediff.trace.archive import Archive
from tracediff.trace.archive_writer import ArchiveWriter
from tracediff.trace.columns import COLUMNS, STRING_COLUMNS, decode_strings, encode_strings
from tracediff.trace.compression import TEXTS, compress, decompress, stated_size
from tracediff.trace.summary import digest

MARK: Final = "\x1b]0;taken\x07"
"""Sets a terminal's title. It must never reach one from a trace."""

Entries = dict[str, bytes]
Files = dict[str, bytes]

_DEEP: Final = 50_000
_NASTY: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1, 7, 1 << 31, 1 << 63, 10**400, 1e308, float("nan"), float("inf"), "", "0",
    "../../../../../tmp/escaped", "/etc/passwd", "a/../b", "c:\\x", "x" * 100_000, "\0", "\ud800",
    f"{MARK}<script>alert(1)</script>[red]x[/red][link=http://x]", "\u202eevil", "\x9b31m", "a\nb",
    "float32", "uint64", "bfloat16", "tensor", "text", "setting", "labels", "mask", "state",
    "forward", "rendering", "optimizer", "root", "batch.input_ids", "sample[0].ids", "int32",
    "sample[999999999].text", [], {}, [0], [-1], [1 << 62, 4], [10**12] * 8, [[[[]]]],
    {"a": {"a": {}}}, ["x"] * 1000, {"num_heads": -1, "eps": "x", "base": 0},
    {"touched": 7, "level": "op", "leaf": 1}, {"$array": "../x"}, {"$tuple": 1}, {"$items": [1]},
    {"$array": "arrays/0"}, {"$items": [[[], 1]]},
)  # fmt: skip
_NUMBERS: Final = (0, 1, 2, 64, 255, 1 << 15, (1 << 16) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1)
_PATTERNS: Final = (b"\0" * 8, b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\0\0\0\0\0\0\xf8\x7f")
_ZEROS: Final = compress(np.zeros(1 << 20, np.uint8), TEXTS)

_ZIP_FIELDS: Final = {
    b"PK\1\2": ((4, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2),
                (42, 4), (46, 8)),
    b"PK\3\4": ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2), (30, 8)),
    b"PK\5\6": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
}  # fmt: skip
"""Offset and size of the fields of each header of a ZIP file, and of a part of its name."""


class Mutator:
    """Makes mutants of one trace, each told by its number alone."""

    def __init__(self, source: Path) -> None:
        found = sorted(p for p in source.rglob("*") if p.is_file())
        self._files = {str(p.relative_to(source)): p.read_bytes() for p in found}
        self._entries: dict[str, Entries] = {}
        for file in (p for p in found if p.suffix == ".zip"):
            archive = Archive(file)
            self._entries[str(file.relative_to(source))] = {
                name: archive.read(name) for name in archive.entries
            }

    def make(self, number: int, target: Path) -> str:
        """Writes mutant `number` to `target`, which is not there; returns what was done."""
        rng = random.Random(number)
        files: dict[str, bytes | Entries] = dict(self._files)
        done = []
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            name = rng.choice([*files, *3 * [f for f in files if f.endswith(".zip")]])
            try:
                done.append(f"{name}: {self._mutate(files, name, rng)}")
            except (ValueError, LookupError, RecursionError, TypeError, AttributeError) as error:
                done.append(f"{name}: no second mutation, {type(error).__name__}")
        self._write(files, target)
        if rng.random() < 0.05:
            done.append(_folder(target, rng))
        return "; ".join(done)

    def _mutate(self, files: dict[str, bytes | Entries], name: str, rng: random.Random) -> str:
        held = files[name]
        if isinstance(held, bytes) and rng.random() < 0.12:
            files[name], what = _bytes(held, rng)
            return what
        if not name.endswith(".zip"):
            assert isinstance(held, bytes)
            if not name.endswith(".json"):
                files[name] = _line(held, rng)
                return "a line"
            files[name] = _json(_nested(json.loads(held), rng))
            return "a value of its JSON"
        if isinstance(held, bytes) and rng.random() < 0.15:
            files[name], what = _structure(held, rng)
            return what
        entries = dict(self._entries[name]) if isinstance(held, bytes) else held
        what = rng.choice([_metadata, _strings, _strings, _numbers, _entry, _shape, _table])(
            entries, rng
        )
        files[name] = entries
        return what

    def _write(self, files: dict[str, bytes | Entries], target: Path) -> None:
        for name, held in files.items():
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(held, bytes):
                file.write_bytes(held)
                continue
            writer = ArchiveWriter(file)
            for entry, data in held.items():
                writer.add(entry, data)
            writer.close()


def _bytes(held: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Damage that knows nothing of the format."""
    data = bytearray(held)
    at = rng.randrange(len(data) + 1)
    length = rng.choice((1, 1, 4, 64, 1024))
    what = rng.choice(("flip", "cut", "delete", "insert", "repeat", "empty"))
    if what == "flip":
        for i in range(at, min(at + length, len(data))):
            data[i] ^= 1 << rng.randrange(8)
    elif what == "cut":
        del data[at:]
    elif what == "delete":
        del data[at : at + length]
    elif what == "insert":
        data[at:at] = rng.randbytes(length)
    elif what == "repeat":
        data[at:at] = data[at : at + length]
    else:
        data.clear()
    return bytes(data), f"{what} {length} bytes at {at}"


def _line(held: bytes, rng: random.Random) -> bytes:
    """A text file with a line that is another, or comes twice."""
    lines = held.split(b"\n")
    names = (b"../../x", b"zarr.json", b"segments/0/../../../etc/passwd", b"segments/\x1b[31m", b"")
    other = b"0" * 64 + b"  " + rng.choice(names)
    lines[rng.randrange(len(lines))] = rng.choice((other, rng.choice(lines), MARK.encode()))
    return b"\n".join(lines)


def _structure(held: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A header of the ZIP file that lies in one field."""
    signature = rng.choice(list(_ZIP_FIELDS))
    places = []
    at = held.find(signature)
    while at >= 0:
        places.append(at)
        at = held.find(signature, at + 1)
    place = rng.choice(places)
    offset, size = rng.choice(_ZIP_FIELDS[signature])
    data = bytearray(held)
    if size == 8:
        data[place + offset : place + offset + 8] = rng.choice(
            (b"../../..", b"\x1b[31mxxx", b"/" * 8)
        )
    else:
        value = rng.choice((*_NUMBERS, len(held), place)) & ((1 << 8 * size) - 1)
        data[place + offset : place + offset + size] = value.to_bytes(size, "little")
    return bytes(data), f"field {offset} of the header {signature!r} at {place}"


def _metadata(entries: Entries, rng: random.Random) -> str:
    name = rng.choice([name for name in entries if name.endswith("zarr.json")])
    document = json.loads(entries[name])
    changed = _nested(document, rng)
    tracediff = changed.get("attributes", {}) if isinstance(changed, dict) else {}
    tree = tracediff.get("tracediff", {}).get("snapshot") if isinstance(tracediff, dict) else None
    if isinstance(tree, str) and rng.random() < 0.8:
        tracediff["tracediff"]["snapshot"] = json.dumps(_nested(json.loads(tree), rng))
    entries[name] = _json(changed)
    return f"a value in {name}"


def _strings(entries: Entries, rng: random.Random) -> str:
    name = rng.choice(STRING_COLUMNS)
    key = f"events/{name}/c/0"
    rows = _unpacked(entries[key])
    at = rng.randrange(len(rows))
    text = rows[at]
    if text[:1] in ("[", "{") and rng.random() < 0.6:
        rows[at] = json.dumps(_nested(json.loads(text), rng))
    elif rng.random() < 0.05:
        rows[at] = rng.choice(("[" * _DEEP, '{"a":' * _DEEP, "[" * _DEEP + "]" * _DEEP))
    else:
        value = rng.choice(_NASTY)
        rows[at] = value if isinstance(value, str) else json.dumps(value)
    if rng.random() < 0.2:
        rows[at] = rng.choice(rows)
    _pack(entries, key, rows)
    return f"row {at} of column {name}"


def _numbers(entries: Entries, rng: random.Random) -> str:
    """Numbers of a column or a payload, as often as not with the payload's digest mended."""
    names = [name for name in COLUMNS if name not in STRING_COLUMNS]
    starts = ("tensors/", "rendering/", "arrays/", *(f"events/{name}/c" for name in names))
    key = rng.choice([key for key in entries if key.startswith(starts) and "/c" in key])
    data = bytearray(entries[key])
    if not data:
        return "nothing"
    width = rng.choice((1, 4, 8))
    before = digest(np.frombuffer(bytes(data), np.uint8))
    for _ in range(rng.choice((1, 1, 8))):
        at = rng.randrange(0, len(data), width)
        value = rng.choice(_PATTERNS) if rng.random() < 0.7 else rng.randbytes(8)
        data[at : at + width] = value[:width]
    entries[key] = bytes(data)
    if rng.random() < 0.5 and "events/digest/c/0/0" in entries:
        after = digest(np.frombuffer(entries[key], np.uint8))
        entries["events/digest/c/0/0"] = entries["events/digest/c/0/0"].replace(before, after)
        return f"numbers of {key}, with their digest"
    return f"numbers of {key}"


def _entry(entries: Entries, rng: random.Random) -> str:
    name = rng.choice(list(entries))
    what = rng.choice(("drop", "swap", "shorten", "lengthen", "rename", "add"))
    if what == "drop":
        del entries[name]
    elif what == "swap":
        other = rng.choice(list(entries))
        entries[name], entries[other] = entries[other], entries[name]
    elif what == "shorten":
        entries[name] = entries[name][: rng.randrange(len(entries[name]) + 1)]
    elif what == "lengthen":
        entries[name] += rng.randbytes(rng.choice((1, 8, 4096)))
    elif what == "rename":
        new = rng.choice(("../../escaped", "/tmp/escaped", "x", "events", "\x1b[31m", "a\nb"))
        entries[new] = entries.pop(name)
    else:
        entries["../" * 6 + "tmp/escaped"] = b"x"
    return f"{what} {name}"


def _shape(entries: Entries, rng: random.Random) -> str:
    """An absurd shape that columns and metadata agree on; or a bomb, with chunks of zeros."""
    rows = _unpacked(entries["events/payload/c/0"])
    at = rng.choice([i for i, row in enumerate(rows) if row])
    key = f"{rows[at]}/zarr.json"
    document = json.loads(entries[key])
    chunks = rng.choice((1, 4, 300, 2000))
    bomb = rng.random() < 0.2
    shape = [chunks << 18] if bomb else rng.choice(_SHAPES)
    chunk = [1 << 18] if bomb else rng.choice((shape, [1] * len(shape), [1 << 30] * len(shape)))
    document["shape"] = shape
    document["chunk_grid"]["configuration"]["chunk_shape"] = chunk
    if bomb:
        document["codecs"] = [document["codecs"][0], TEXTS.codec_json(4)]
        entries.update({f"{rows[at]}/c/{i}": _ZEROS for i in range(chunks)})
    entries[key] = _json(document)
    shapes = _unpacked(entries["events/shape/c/0"])
    shapes[at] = json.dumps(shape)
    _pack(entries, "events/shape/c/0", shapes)
    return f"{'a bomb' if bomb else 'shape'} {shape} at {key}"


_SHAPES: Final = (
    [0], [], [1 << 57], [1 << 31, 1 << 26], [1] * 64, [1] * 65, [0, 1 << 57], [3, 0, 5], [1 << 20],
    [2, 2, 2, 2, 2, 2, 2, 2], [1, 64], [64, 1],
)  # fmt: skip


def _table(entries: Entries, rng: random.Random) -> str:
    """The table of samples: what its rows point to, and what they have in common."""
    keys = [key for key in entries if key.startswith("samples/") and "/c/" in key]
    if not keys:
        return _metadata(entries, rng)
    if rng.random() < 0.3:
        document = json.loads(entries["samples/zarr.json"])
        entries["samples/zarr.json"] = _json(_nested(document, rng))
        return "a value in samples/zarr.json"
    key = rng.choice(keys)
    data = bytearray(decompress(entries[key], stated_size(entries[key])))
    at = 8 * rng.randrange(12)
    data[at : at + 8] = rng.choice((*_PATTERNS, b"\1" + bytes(7), b"\3" + bytes(7)))
    entries[key] = compress(np.frombuffer(data, "<i8"), TEXTS)
    return f"a number of {key}"


def _folder(target: Path, rng: random.Random) -> str:
    """What is no file of the format, where one should be."""
    what, change = rng.choice(_FOLDER)
    files = sorted(p for p in target.rglob("*") if p.is_file())
    file = rng.choice([p for p in files if "rank" not in what or p.parent.name == "0"])
    change(file)
    return f"{file.name}: {what}"


def _replaced(by: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.unlink()
        by(file)

    return change


_FOLDER: Final[tuple[tuple[str, Callable[[Path], Any]], ...]] = (
    ("gone", Path.unlink),
    ("a folder", _replaced(Path.mkdir)),
    ("a pipe", _replaced(os.mkfifo)),
    ("a link to nothing", _replaced(lambda file: file.symlink_to("nothing"))),
    ("a link to itself", _replaced(lambda file: file.symlink_to(file.name))),
    ("a link to all zeros", _replaced(lambda file: file.symlink_to("/dev/zero"))),
    ("a link to a folder above", _replaced(lambda file: file.symlink_to(".."))),
    ("a copy of another step", lambda file: shutil.copy(file, file.with_name("00000007.zip"))),
    ("a copy of a huge step", lambda file: shutil.copy(file, file.with_name("9" * 18 + ".zip"))),
    ("a name that acts", lambda file: shutil.copy(file, file.with_name(f"{MARK[:3]}\n.tmp"))),
    ("another rank", lambda file: shutil.copytree(file.parent, file.parent.with_name("1"))),
    ("a huge rank", lambda file: shutil.copytree(file.parent, file.parent.with_name("9" * 30))),
)


def _unpacked(data: bytes) -> list[str]:
    whole = decompress(data, stated_size(data))
    return decode_strings(whole, int.from_bytes(whole[:4], "little"))


def _pack(entries: Entries, key: str, rows: list[str]) -> None:
    safe = [row.encode("utf-8", "replace").decode() for row in rows]
    entries[key] = compress(np.frombuffer(encode_strings(safe), np.uint8), TEXTS)


def _json(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "replace")


def _nested(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """The value with one place in it replaced, somewhere at random."""
    if isinstance(value, dict) and value and (depth < 1 or rng.random() < 0.85):
        key = rng.choice(list(value))
        if rng.random() < 0.08:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _nested(value[key], rng, depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], _nested(value[at], rng, depth + 1), *value[at + 1 :]]
    return rng.choice(_NASTY)
