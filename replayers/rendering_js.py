"""Route `js`: the JavaScript stack on Node, @huggingface/jinja and @huggingface/tokenizers.

The npm packages are installed on the first use, by lock file, into a cache folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from tracediff.rendering.files import read_files
from tracediff.rendering.records import Record
from tracediff.rendering.routes import RefusedError, Rendered, RouteError
from tracediff.rendering.routes import Route as BaseRoute

_HERE: Final = Path(__file__).resolve().parent
_WORKER: Final = _HERE / "rendering_js.mjs"
_MANIFESTS: Final = {
    "package.json": _HERE / "rendering_js.package.json",
    "package-lock.json": _HERE / "rendering_js.lock.json",
}
_INSTALL_SECONDS: Final = 120


class Route(BaseRoute):
    """A folder with a chat template and `tokenizer.json`, rendered by a Node process."""

    def __init__(self, path: Path) -> None:
        files = read_files(path)
        if files.template is None or files.tokenizer is None:
            lacking = "chat template" if files.template is None else "tokenizer.json"
            raise RouteError(f"route js: {path} has no {lacking}: give a folder with both")
        node = shutil.which("node")
        if node is None:
            raise RouteError("route js needs Node 18 or newer: install it, or leave the route out")
        what = {
            "folder": str(path.resolve()),
            "template": files.template,
            "special": dict(files.special),
        }
        self._process = subprocess.Popen(
            [node, str(_WORKER), json.dumps(what)],
            cwd=packages(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.vocabulary = files.vocabulary()
        versions = json.loads(_MANIFESTS["package.json"].read_bytes())["dependencies"]
        release = subprocess.run([node, "--version"], capture_output=True, text=True, check=True)
        self.parts = {
            "template engine": f"@huggingface/jinja {versions['@huggingface/jinja']}",
            "template set-up": "tracediff, for @huggingface/jinja",
            "tokenizer": f"@huggingface/tokenizers {versions['@huggingface/tokenizers']}",
            "Unicode tables": f"those of Node {release.stdout.strip()}",
            "template": files.template_digest,
            "vocabulary": files.tokenizer_digest,
        }

    def render(self, record: Record) -> Rendered:
        sent = {
            "messages": record.messages,
            "tools": record.tools,
            "variables": dict(record.variables),
            "add_generation_prompt": record.add_generation_prompt,
        }
        answer = self._ask(json.dumps(sent, ensure_ascii=True))
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return Rendered(answer["text"], tuple(answer["ids"]))

    def _ask(self, line: str) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise RouteError(f"route js: Node ended with exit code {self._process.wait()}")
        return dict(json.loads(answer))

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()


def packages() -> Path:
    """The folder with the npm packages, which are fetched into it if they are not there.

    Raises:
        RouteError: npm is missing or cannot fetch them.
    """
    lock = _MANIFESTS["package-lock.json"].read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "tracediff" / f"js-{sha256(lock).hexdigest()[:12]}"
    if (folder / "installed").exists():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise RouteError("route js needs npm to fetch its packages: install it with Node")
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in _MANIFESTS.items():
        shutil.copyfile(source, folder / name)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_SECONDS
        )
        told = " ".join(done.stderr.split())[:200] if done.returncode else ""
    except subprocess.TimeoutExpired:
        told = f"no answer within {_INSTALL_SECONDS} s"
    if told:
        raise RouteError(f"route js: npm could not fetch its packages ({told}): try again online")
    (folder / "installed").touch()
    return folder
