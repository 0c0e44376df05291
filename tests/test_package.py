"""The wheel is complete: built, installed in a fresh environment, run from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PACKAGED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src", "recorders", "replayers")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path | str = ROOT, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= variables
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that the build leaves nothing in the working tree."""
    copy = tmp_path_factory.mktemp("source")
    run("cp", "-a", *(ROOT / part for part in PACKAGED), copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=source_tree)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tracediff` of a fresh environment that has the wheel, and our dependencies by path."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet", wheel)
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # Later on sys.path than the wheel itself; an editable install's own .pth is not read there.
    dependencies = Path(purelib) / "dependencies.pth"
    dependencies.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "bin" / "tracediff"


def test_the_wheel_holds_every_module_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    held = {name for name in names if name.endswith(".py")}
    core, tracediff = ROOT / "src", Path("tracediff")
    written = {str(path.relative_to(core)) for path in core.rglob("*.py")}
    for folder in ("recorders", "replayers"):
        written |= {
            str(tracediff / path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")
        }
    assert held == written
    assert len(names) == len(set(names))
    assert "tracediff/py.typed" in names


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (sdist,) = wheel.parent.glob("*.tar.gz")
    run("tar", "-xzf", sdist, "-C", tmp_path)
    (unpacked,) = tmp_path.iterdir()
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", cwd=unpacked)
    (again,) = (unpacked / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is here")
def test_without_a_compiler_only_the_c_code_is_missing(wheel: Path, source_tree: Path) -> None:
    folder = source_tree / "uncompiled"
    build = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder)
    shutil.rmtree(source_tree / "build", ignore_errors=True)
    run(*build, cwd=source_tree, CC="false")
    (other,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as compiled, zipfile.ZipFile(other) as uncompiled:
        (missing,) = {*compiled.namelist()} - {*uncompiled.namelist()}
    assert missing.startswith("tracediff/kernels/_native.")


def test_stacks_are_found_from_anywhere(command: Path) -> None:
    listed = run(command, "stacks", cwd="/")
    assert {line.split()[0] for line in listed.splitlines()[1:]} >= {"pytorch", "mlx"}


def test_the_installed_package_is_the_one_that_runs(command: Path) -> None:
    where = run(
        command.parent / "python", "-c", "import tracediff; print(tracediff.__file__)", cwd="/"
    )
    assert Path(where.strip()).is_relative_to(command.parent.parent)
    assert run(command, "--version", cwd="/").startswith("tracediff ")
