"""`tracediff demo`: three acts on the real fine-tune of `examples/clinical_lora`.

Every recording runs in its own process through the command line, as a user would run it.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.rule import Rule

from tracediff.bisection import bisect
from tracediff.errors import ScriptError, StackError, UsageError
from tracediff.report.terminal import render
from tracediff.verdict import Verdict

EXAMPLE: Final = Path(__file__).resolve().parents[2] / "examples" / "clinical_lora"

_TEMPLATE_CALL: Final = "text = tokenizer.apply_chat_template(messages, tokenize=False)\n"
_FAULT: Final = '    text = text.replace("assistant\\n", "assistant")  # the planted fault\n'
_STEPS: Final = 2


def run(console: Console, workdir: Path | None, keep: bool) -> int:
    """Records, compares and reports the three acts.

    Args:
        workdir: Where traces are written; a temporary folder if None, removed unless `keep`.

    Returns:
        0 if each act ends as it should, 1 otherwise.

    Raises:
        UsageError: The example is not there: the demo needs a checkout of the project.
        StackError: A stack is not installed.
        ScriptError: A recording failed.
    """
    _check_installed()
    with ExitStack() as stack:
        if workdir is None and not keep:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tracediff-")))
        else:
            folder = workdir or Path(tempfile.mkdtemp(prefix="tracediff-"))
            folder.mkdir(parents=True, exist_ok=True)
        acts = _Acts(console, folder)
        passed = [acts.as_first_run(), acts.mended(), acts.planted()]
        if keep or workdir:
            console.print(f"The traces are in {folder}")
    console.print(Rule())
    for text, ok in passed:
        console.print(f"{'✓' if ok else '✗'} {text}")
    return 0 if all(ok for _, ok in passed) else 1


class _Acts:
    def __init__(self, console: Console, folder: Path) -> None:
        self._console = console
        self._folder = folder
        self._started = time.monotonic()
        self._say("preparing SmolLM2-135M-Instruct: real weights, tokenizer and chat template")
        model = EXAMPLE / "build" / "model"
        _python([str(EXAMPLE / "prepare.py"), "--out", str(model), "--mend"])
        self._model, self._mended = model, model.with_name("model-mended")
        self._baseline = self._folder / "pytorch.zarr"

    def as_first_run(self) -> tuple[str, bool]:
        self._act("1. The pair as a user would first run it")
        self._record(self._baseline, "train_pytorch.py", self._model, _STEPS)
        verdict = self._compare("mlx.zarr", "train_mlx.py", self._model, 1)
        first = verdict.first
        found = (
            first is not None
            and any("rope_theta" in name for name, _, _ in first.settings)
            and first.stage == "forward"
        )
        return "the rotary base, which nobody planted, was found", found

    def mended(self) -> tuple[str, bool]:
        self._act("2. The same pair, with rope_theta where mlx-lm looks for it")
        verdict = self._compare("mlx-mended.zarr", "train_mlx.py", self._mended, _STEPS)
        return "the mended pair agrees", verdict.outcome == "equivalent"

    def planted(self) -> tuple[str, bool]:
        self._act("3. The mended pair, with a newline dropped from the chat template's text")
        script = self._folder / "train_mlx_faulty.py"
        source = (EXAMPLE / "train_mlx.py").read_text(encoding="utf-8")
        if _TEMPLATE_CALL not in source:
            raise UsageError(
                f"{EXAMPLE / 'train_mlx.py'} was changed: the fault has no place in it"
            )
        faulty = source.replace(_TEMPLATE_CALL, _TEMPLATE_CALL + _FAULT)
        faulty = faulty.replace(
            "HERE = Path(__file__).resolve().parent", f"HERE = Path({str(EXAMPLE)!r})"
        )
        script.write_text(faulty, encoding="utf-8")
        verdict = self._compare("mlx-faulty.zarr", str(script), self._mended, 1)
        first = verdict.first
        found = first is not None and (first.stage, first.kind) == ("rendering", "text")
        return "the planted rendering fault was named", found

    def _compare(self, name: str, script: str, model: Path, steps: int) -> Verdict:
        target = self._folder / name
        self._record(target, script, model, steps)
        self._say(f"tracediff bisect {self._baseline.name} {name}")
        verdict = bisect(self._baseline, target)
        self._console.print(render(verdict))
        return verdict

    def _record(self, trace: Path, script: str, model: Path, steps: int) -> None:
        path = script if Path(script).is_absolute() else str(EXAMPLE / script)
        self._say(f"tracediff record -o {trace.name} -- {Path(path).name} --steps {steps}")
        command = ["-m", "tracediff", "record", "--overwrite", "-o", str(trace), "--", path]
        command += ["--model", str(model), "--steps", str(steps)]
        _python([*command, "--out", str(trace.with_suffix(".json"))])

    def _act(self, title: str) -> None:
        self._console.print(Rule(title, align="left"))

    def _say(self, what: str) -> None:
        seconds = time.monotonic() - self._started
        self._console.print(f"[{seconds:4.0f} s] {what}", markup=False, highlight=False)


def _check_installed() -> None:
    if not (EXAMPLE / "train_mlx.py").is_file():
        raise UsageError(
            "the demo runs the example of a checkout: clone the project and call `make demo`"
        )
    for module in ("torch", "peft", "mlx_lm"):
        if importlib.util.find_spec(module) is None:
            raise StackError(f"the demo needs {module}: pip install 'tracediff-ml[all,examples]'")


def _python(arguments: Sequence[str]) -> None:
    """Runs this Python; its output is shown only if it fails."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise ScriptError(f"{' '.join(arguments[:3])} failed: {' '.join(last)}")
