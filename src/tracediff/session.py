"""Recording a run: the context manager `record`, and running a script under it."""

from __future__ import annotations

import os
import platform
import re
import runpy
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

from tracediff.collector import paced
from tracediff.errors import ScriptError, TracediffError, UsageError
from tracediff.events import Run
from tracediff.launched import await_rank_zero, launched_rank
from tracediff.recording import Policy, Recorder, Tape, attached
from tracediff.rerun import Rerun, RerunEnded
from tracediff.snapshots import attach_rerun, attach_snapshots, watch_python_generators
from tracediff.stacks import guess, imported, load_recorder
from tracediff.trace import BufferedWriter, TraceWriter, create_trace, place
from tracediff.trace.buffered import ON_FULL
from tracediff.trace.remote import url_of
from tracediff.trace.summary import digest_value

_ENVIRONMENT_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "PYTHONHASHSEED",
    "TOKENIZERS_PARALLELISM",
)


@contextmanager
def record(
    output: str | Path,
    *,
    stack: str | None = None,
    level: str = "module",
    steps: str | None = None,
    sketch_every: int = 100,
    sketch_state: int = 100,
    only: str | None = None,
    snapshot_every: int | None = None,
    keep_snapshots: int | None = None,
    rerun: Rerun | None = None,
    compress: bool = False,
    seal: bool = False,
    max_buffer: int | str = 0,
    on_full: str = "wait",
    overwrite: bool = False,
    on_error: str = "stop",
    argv: Sequence[str] = (),
    source: str = "",
    settings: Mapping[str, Any] | None = None,
    recorder: Callable[[Tape], Recorder] | None = None,
) -> Iterator[Tape]:
    """Records everything that runs inside the `with` block into a trace.

    Args:
        output: Where the trace is written, a path or a URL such as `s3://bucket/run.zarr`; must
            not exist unless `overwrite`.
        stack: `pytorch`, `mlx`, or the name of an installed third-party stack; by default the
            one whose framework this process has imported.
        level: `digest`, `module`, `op-digest` or `op`.
        steps: Steps whose payloads are kept and whose operations are recorded, such as
            `0:3,100`; all by default.
        sketch_every: At level `digest`, steps at which every event keeps a sketch; at the others
            what modules return keeps one of 32 buckets.
        sketch_state: At level `digest`, steps at which parameters, updates and gradients keep a
            whole one, in place of a short one of 32 buckets.
        only: Module path or pattern, to which payloads and operations are restricted.
        on_error: `stop` raises what the file system refuses inside the block, `continue` ends the
            recording with a warning and lets the block run on.
        snapshot_every: Write a snapshot before every Nth step; by default none.
        keep_snapshots: How many snapshots stay, the latest ones; by default all.
        compress: Compress payloads and snapshots, for archives.
        seal: Keep a SHA-256 of every file, for evidence; see docs/trace-format.md.
        max_buffer: How much may wait to be written by a thread beside the block, in bytes or as
            `256M`; 0 writes at once.
        on_full: What happens when that much waits: `wait`, or `drop` payloads.
        rerun: A recording of the same script, the first steps of which are skipped.
        settings: Further settings of the run, for the manifest.
        recorder: Makes the recorder; by default that of the stack.

    Raises:
        UsageError: An option is out of its range.
        StackError: The stack is unknown or not installed.
        TraceExistsError: `output` holds something.
    """
    policy = Policy(
        level=level,
        steps=parse_steps(steps),
        sketch_every=sketch_every,
        state_every=sketch_state,
        only=only,
    )
    stack = stack or imported()
    make = recorder or load_recorder(stack)
    run = Run(
        stack=stack,
        argv=tuple(argv or sys.argv),
        level=level,
        source_digest=digest_value(source).hex() if source else "",
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        settings={
            "steps": steps,
            "sketch_every": sketch_every,
            "only": only,
            "compress": compress,
            **(settings or {}),
        },
    )
    writer = _writer(
        output,
        run,
        on_error,
        max_buffer=parse_size(max_buffer),
        on_full=on_full,
        overwrite=overwrite,
        compress=compress,
        seal=seal,
        rank=launched_rank() if rerun is None else 0,
    )
    tape = Tape(writer, policy)
    attachable = make(tape)
    if rerun is not None:
        attach_rerun(tape, attachable, rerun)
    tape.emit_settings(_environment(attachable))
    watch_python_generators(tape)
    if snapshot_every is not None:
        attach_snapshots(tape, attachable, snapshot_every, keep_snapshots)
    try:
        with paced() as adapt, attached(attachable), _recorded_warnings(tape):
            tape.on_step_end.append(lambda: adapt(tape.recorded))
            yield tape
    except RerunEnded:
        tape.finish("finished")
        return
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # `sys.exit(main())` that went well
            tape.finish("finished")
        else:
            tape.finish("failed", _one_line(error))
        raise
    tape.finish("finished")


def _writer(
    output: str | Path, run: Run, on_error: str, *, on_full: str, rank: int, **options: Any
) -> TraceWriter | BufferedWriter:
    if on_error not in ("stop", "continue"):
        raise UsageError(f"--on-error is {on_error!r}: it is stop or continue")
    if on_full not in ON_FULL:
        raise UsageError(f"--on-full is {on_full!r}: it is {' or '.join(ON_FULL)}")
    if rank and url_of(output):
        raise UsageError(f"rank {rank} cannot join {output}: record several ranks into a folder")
    if rank:
        await_rank_zero(Path(output), rank)
    options |= {"on_refusal": _tell if on_error == "continue" else None, "rank": rank}
    return create_trace(output, run, on_full=on_full, **options)


def _tell(text: str) -> None:
    print(f"tracediff: {text}; the script goes on", file=sys.stderr)


class Options(TypedDict, total=False):
    """The options of `record` that `record_script` hands on; see there."""

    level: str
    steps: str | None
    sketch_every: int
    sketch_state: int
    only: str | None
    snapshot_every: int | None
    keep_snapshots: int | None
    rerun: Rerun | None
    compress: bool
    seal: bool
    max_buffer: int | str
    on_full: str
    overwrite: bool
    on_error: str
    settings: Mapping[str, Any] | None
    recorder: Callable[[Tape], Recorder] | None


def record_script(
    script: str,
    args: Sequence[str],
    *,
    output: Path,
    stack: str | None = None,
    **options: Unpack[Options],
) -> Run:
    """Runs a Python script as `python SCRIPT ARGS` would, under a recorder.

    Args:
        options: As `record` has them, with the same defaults.

    Returns:
        The manifest of the finished run.

    Raises:
        UsageError: The script does not exist.
        ScriptError: The script raised, exited with an error, or neither rendered a sample nor
            called a model. What it did until then is in the trace.
    """
    path = Path(script)
    if not path.is_file():
        raise UsageError(f"{script} is not a file: give the path of a Python script after --")
    stack = stack if stack not in (None, "auto") else guess(path)
    argv = [str(path), *args]
    try:
        with (
            record(
                output,
                stack=stack,
                argv=argv,
                source=path.read_text(encoding="utf-8", errors="replace"),
                **options,
            ) as tape,
            _as_main(path, argv),
        ):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        if error.code:
            status = error.code if isinstance(error.code, int) else 1
            what = f"exited with {error.code}"
            raise ScriptError(_kept(script, what, output), status) from None
    except (TracediffError, KeyboardInterrupt):
        raise
    except Exception as error:
        what = f"raised {_one_line(error)}"
        raise ScriptError(_kept(script, what, output), status=1) from error
    if not (tape.seen_model or tape.seen_samples):
        raise ScriptError(
            f"{script} ended without rendering a sample or calling a {stack} model, so nothing can "
            "be compared: check the script and --stack"
        )
    return tape.writer.run


def parse_steps(text: str | None) -> list[range] | None:
    """Reads `0:3,100` as steps 0, 1, 2 and 100.

    Raises:
        UsageError: It is of another form.
    """
    if text is None:
        return None
    ranges = []
    for part in text.split(","):
        start, colon, stop = part.partition(":")
        try:
            first = int(start)
            last = int(stop) if colon else first + 1
        except ValueError:
            first, last = -1, -1
        if first < 0 or last <= first:
            raise UsageError(f"--steps {text!r}: {part!r} is no step; write for example 0:3,100")
        ranges.append(range(first, last))
    return ranges


def parse_size(size: int | str) -> int:
    """Reads `256M` as bytes; K, M and G are powers of 1024.

    Raises:
        UsageError: It is of another form.
    """
    match = re.fullmatch(r"(\d{1,15})([KMG]?)", str(size))
    if match is None:
        raise UsageError(f"--max-buffer {size!r} is no size; write for example 256M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def _kept(script: str, what: str, output: Path) -> str:
    return f"{script} {what}; what was recorded until then is in {place(output)}"


def _one_line(error: BaseException) -> str:
    """`ValueError: message (train.py:41)`, the place being the last line of the user's code."""
    text = " ".join(str(error).split())
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not _is_library(frame.filename)
    ]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _is_library(filename: str) -> bool:
    return (
        "site-packages" in filename
        or filename.startswith(("<", sys.base_prefix))
        or Path(filename).parent == Path(__file__).parent
    )


@contextmanager
def _as_main(path: Path, argv: list[str]) -> Iterator[None]:
    """`sys.argv` and `sys.path[0]` as the script would find them when run by itself."""
    old_argv, old_path = sys.argv, list(sys.path)
    sys.argv = argv
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv = old_argv
        sys.path[:] = old_path


def _environment(recorder: Recorder) -> Mapping[str, Any]:
    settings: dict[str, Any] = {
        "python.version": platform.python_version(),
        "platform.system": platform.system(),
        "platform.machine": platform.machine(),
    }
    for name in ("numpy", "tokenizers", "transformers", "jinja2"):
        try:
            settings[f"version.{name}"] = version(name)
        except PackageNotFoundError:
            continue
    for name, value in recorder.versions().items():
        settings[f"version.{name}"] = value
    for name in _ENVIRONMENT_VARIABLES:
        if name in os.environ:
            settings[f"env.{name}"] = os.environ[name]
    return settings | dict(recorder.environment())


@contextmanager
def _recorded_warnings(tape: Tape) -> Iterator[None]:
    """Puts each distinct warning into the trace, and shows it as before."""
    seen: set[str] = set()
    show = warnings.showwarning

    def recorded(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        text = f"{category.__name__}: {message}"
        if text not in seen:
            tape.emit("environment", f"warning[{len(seen)}]", "out", text, kind="setting")
            seen.add(text)
        show(message, category, *args, **kwargs)

    warnings.showwarning = recorded
    try:
        yield
    finally:
        warnings.showwarning = show
