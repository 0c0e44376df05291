"""Imports point down only, the core knows no framework, and files stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "src" / "tracediff"

TIERS = (
    {"collector", "errors", "events", "forks", "kernels", "on_demand"},
    {"verdict", "operations"},
    {"trace"},
    {"deferred", "draws", "frames", "launched", "policy", "rerun", "source_lines", "summaries"},
    {"step_values"},
    {"tape"},
    {"consumers"},
    {"recording", "replaying", "compare", "rendering", "checkpoint"},
    {"recorders"},
    {"replayers"},
    {"align", "snapshots", "stacks"},
    {"bisection", "session"},
    {"deepening", "reexecution", "selfcheck", "substitution"},
    {"postmortem", "stage_substitution"},
    {"report", "testing"},
    {"demo"},
    {"cli"},
    {"__main__"},
)
"""A part may import the parts of earlier tiers, and itself. A new part is placed here."""

RANK = {part: rank for rank, tier in enumerate(TIERS) for part in tier}
FRAMEWORKS = {"torch", "mlx", "mlx_lm", "transformers", "peft", "jax", "tensorflow"}
LONGEST = 450


def sources(*folders: Path) -> list[Path]:
    """Python files of folders; the symlinks to recorders and replayers are not followed."""
    links = {path for path in CORE.iterdir() if path.is_symlink()}
    return sorted(
        path for folder in folders for path in folder.rglob("*.py") if not links & set(path.parents)
    )


CORE_FILES = sources(CORE)
STACK_FILES = sources(ROOT / "recorders", ROOT / "replayers")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all modules (or names in modules) that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    if CORE in path.parents:
        return path.relative_to(CORE).parts[0].removesuffix(".py")
    return path.relative_to(ROOT).parts[0]


def own_imports(path: Path) -> Iterator[str]:
    """Parts of tracediff that a file imports; `from tracediff import x` counts as part x."""
    for module in imports(path):
        package, _, rest = module.partition(".")
        if package == "tracediff" and rest != "__version__":
            yield rest.split(".")[0]


def test_the_walk_sees_the_files() -> None:
    names = {name(path) for path in CORE_FILES}
    assert {"src/tracediff/events.py", "src/tracediff/cli/app.py"} <= names
    assert not any("recorders" in path.parts for path in CORE_FILES)
    assert set(own_imports(CORE / "cli" / "parser.py")) == {"cli", "errors", "kernels"}


@pytest.mark.parametrize("path", CORE_FILES + STACK_FILES, ids=name)
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return  # the public face names everything
    assert part in RANK, f"{part} has no tier: place it in TIERS"
    for other in own_imports(path):
        assert other in RANK, f"{name(path)} imports tracediff.{other}, which has no tier"
        assert other == part or RANK[other] < RANK[part], f"{name(path)} imports {other}"


@pytest.mark.parametrize("path", CORE_FILES, ids=name)
def test_the_core_imports_no_framework_and_no_stack_by_name(path: Path) -> None:
    for module in imports(path):
        assert module.split(".")[0] not in FRAMEWORKS, f"{name(path)} imports {module}"
        assert not module.startswith(("tracediff.recorders", "tracediff.replayers"))


STACKS = {
    path.stem.rpartition("_")[0]
    for path in STACK_FILES
    if path.stem.endswith(("_recorder", "_replayer"))
}


def stack_of(module: str) -> str:
    """The stack that a module belongs to, or "" for a helper that any stack may use."""
    prefix = module.split("_")[0]
    return prefix if prefix in STACKS else ""


@pytest.mark.parametrize("path", STACK_FILES, ids=name)
def test_stacks_do_not_import_each_other(path: Path) -> None:
    for module in imports(path):
        parts = module.split(".")
        if parts[:2] in (["tracediff", "recorders"], ["tracediff", "replayers"]):
            assert stack_of(parts[2]) in ("", stack_of(path.stem)), f"{name(path)}: {module}"


@pytest.mark.parametrize("path", CORE_FILES + STACK_FILES, ids=name)
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST, f"{name(path)} has {lines} lines: split it"


@pytest.mark.parametrize("path", CORE_FILES + STACK_FILES, ids=name)
def test_only_the_trace_package_knows_zarr(path: Path) -> None:
    if part_of(path) not in {"trace", "testing"}:
        assert not {"zarr", "numcodecs"} & {module.split(".")[0] for module in imports(path)}


def test_a_fresh_process_loads_no_framework() -> None:
    program = (
        "import sys, tracediff.cli.app, tracediff\n"
        "tracediff.bisect, tracediff.record, tracediff.Trace, tracediff.verify\n"
        f"print(*sorted({FRAMEWORKS!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_help_does_not_wait_for_zarr() -> None:
    program = "import sys, tracediff.cli.app; print('zarr' in sys.modules, 'xarray' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def test_comparing_loads_nothing_that_it_does_not_need() -> None:
    program = (
        "import sys; from tracediff.cli import main\n"
        "main(['bisect', 'traces/clean.zarr', 'traces/drifted.zarr', '--json', '-'])\n"
        "heavy = {'zarr', 'xarray', 'dask', 'pandas', 'scipy'}\n"
        "print(*sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert '"outcome": "diverged"' in done.stdout
    assert done.stderr.splitlines()[-1] == ""


def test_two_paths_alone_need_no_parser() -> None:
    program = (
        "import sys; from tracediff.cli import main\n"
        "main(['bisect', 'traces/clean.zarr', 'traces/drifted.zarr'])\n"
        "print(*sorted({'typer', 'pydantic'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "rope_theta" in done.stdout
    assert done.stderr.splitlines()[-1] == ""


def test_the_public_face_is_complete() -> None:
    import tracediff

    for public in tracediff.__all__:
        assert getattr(tracediff, public).__name__ == public
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tracediff.nothing
