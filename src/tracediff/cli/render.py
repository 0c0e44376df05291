"""`tracediff render DATA.jsonl --route NAME:PATH --route NAME:PATH ...`."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracediff.cli import options, output
from tracediff.errors import UsageError

if TYPE_CHECKING:
    from tracediff.rendering.recorded import Recorded
    from tracediff.rendering.records import Record, Settings

Data = Annotated[
    Path | None,
    typer.Argument(
        metavar="DATA.jsonl",
        help="Conversations, one JSON object per line: 'messages', or 'question' and 'answer'.",
    ),
]
RecordedRun = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="RUN.zarr",
        help="Render the conversations of a recorded run again, instead of a file, and compare "
        "each route with what was recorded.",
    ),
]
Routes = Annotated[
    list[str] | None,
    typer.Option(
        "--route",
        metavar="NAME:PATH",
        help="A route and its folder: hf, hf2, mlx, jinja, bpe or js. Give it twice or more; with "
        "--trace, once or more.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, metavar="N", help="Render the first N records only."),
]
GenerationPrompt = Annotated[
    bool,
    typer.Option("--add-generation-prompt", help="End each text with the header of an answer."),
]
Tools = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A JSON list of tool schemas, for records without tools."),
]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A template variable; the value is JSON or text."
    ),
]
TurnByTurn = Annotated[
    bool,
    typer.Option(
        "--turns",
        help="Also check that the rendering of the first turns begins that of all turns.",
    ),
]


def render(
    data: Data = None,
    trace: RecordedRun = None,
    route: Routes = None,
    json: options.Json = None,
    limit: Limit = None,
    add_generation_prompt: GenerationPrompt = False,
    tools: Tools = None,
    variables: Variables = None,
    turns: TurnByTurn = False,
) -> int:
    """Render conversations through several routes and compare text and token IDs."""
    from tracediff.rendering.checking import check
    from tracediff.rendering.recorded import Recorded
    from tracediff.rendering.records import Settings, read_tools
    from tracediff.rendering.routes import Named, open_route
    from tracediff.report.json import dumps
    from tracediff.report.rendering import TRACE, to_json, to_text

    specs = route or []
    if (data is None) == (trace is None):
        raise UsageError("give either a file of conversations or --trace RUN.zarr")
    if len(set(specs)) < (2 if trace is None else 1) or len(set(specs)) < len(specs):
        raise UsageError("give two or more different --route NAME:PATH to compare")
    if trace is not None and (add_generation_prompt or tools or variables):
        raise UsageError("--trace renders what was recorded: leave out --set, --tools and the like")
    output.check_writable(json)
    settings = Settings(
        add_generation_prompt,
        read_tools(tools) if tools else None,
        dict(_variable(text) for text in variables or ()),
    )
    routes = [open_route(spec) for spec in specs]
    if trace is not None:
        recorded = Recorded(trace, routes)
        records = _counted(recorded, limit)
        routes.append(Named(f"{TRACE}:{trace}", recorded))
        if recorded.others:
            output.tell(f"{recorded.others} samples have no messages: they cannot be rendered")
    else:
        assert data is not None
        records = _watched(data, settings, limit, data.stat().st_size)
    result = check(routes, records, turns=turns)
    if json is not None:
        output.write(json, dumps(to_json(result)))
    if json != output.STDOUT:
        output.show(to_text(result), whole_lines=True)
    return result.exit_code


def _watched(data: Path, settings: Settings, limit: int | None, size: int) -> Iterator[Record]:
    """The records of a file, with a progress bar over its bytes."""
    from tracediff.rendering.records import read_records

    with output.progress() as progress:
        for record in read_records(data, settings, limit):
            yield record
            if progress is not None:
                progress("rendering", record.offset, size)


def _counted(recorded: Recorded, limit: int | None) -> Iterator[Record]:
    """The recorded conversations, with a progress bar."""
    with output.progress() as progress:
        for done, record in enumerate(recorded.records(limit), 1):
            yield record
            if progress is not None:
                progress(
                    "rendering", done, min(limit or recorded.conversations, recorded.conversations)
                )


def _variable(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--set {text!r} is no NAME=VALUE: write it as enable_thinking=false")
    try:
        return name, json_text.loads(value)
    except ValueError:
        return name, value
