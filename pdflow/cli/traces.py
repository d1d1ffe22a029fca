"""Commands that look at a recorded workload, or make a model of it: trace describe, trace model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.group()
def trace() -> None:
    """Describe a recorded workload, or make a model of it."""


def _known_format(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """One of the schema's formats; it is loaded only if one is named."""
    if value is not None:
        from typing import get_args

        from pdflow.scenario.schema.workload import TraceFormat

        if value not in get_args(TraceFormat):
            raise click.BadParameter(f"{value!r} is not one of {', '.join(get_args(TraceFormat))}")
    return value


def _of_trace(command: Any) -> Any:
    """The arguments and options that say which trace, and what its columns mean."""
    for option in (
        click.option(
            "--dataset", metavar="PATH", help="servegen: file with the client's lengths. Default: next to the trace."
        ),
        click.option(
            "--column",
            "columns",
            multiple=True,
            metavar="KEY=NAME",
            help="CSV: the name of a column, for example input_tokens=in. Repeatable. Not needed for common names "
            "such as timestamp, prompt_tokens or output_tokens.",
        ),
        click.option(
            "--format", "form", metavar="FORMAT", callback=_known_format, help="Format of the file. Default: detected."
        ),
        click.option(
            "--end-s", type=click.FloatRange(0, min_open=True), metavar="S", help="Use only requests before this time."
        ),
        click.option("--start-s", type=click.FloatRange(0), metavar="S", help="Use only requests from this time on."),
        click.argument("path", metavar="FILE"),
    ):
        command = option(command)
    return command


@trace.command("describe")
@_of_trace
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def describe_trace(as_json: bool, **asked: Any) -> None:
    """Describe a trace FILE.

    Prints counts, rates, burstiness, lengths, possible prefix hits, classes, and a plot of the rate over time.
    """
    from pdflow.workload.traces.command import TraceOptions, described_trace

    click.echo(described_trace(TraceOptions(**asked), as_json), nl=False)


@trace.command("model")
@_of_trace
@click.option("-o", "--out", required=True, metavar="MODEL.toml", help="The file to write.")
@click.option("--title", metavar="TEXT", help="Title of the model. Default: the trace's count and format.")
def model_trace(out: str, title: str | None, **asked: Any) -> None:
    """Make a model of a trace FILE, for `like` in a scenario.

    The model has rates, quantiles and probabilities, but no row of the trace, so you can share the shape of traffic
    without the traffic. Prints statistics of the trace and of the model side by side.
    """
    from pdflow.results.files.write import guarding, replacing
    from pdflow.workload.traces.command import TraceOptions, modelled_trace

    path = Path(out)
    command = ("pdflow", "trace", "model", "-o", out)
    text, likeness = modelled_trace(TraceOptions(**asked, command=command), path.stem, title)
    with replacing(path) as file, guarding(path):
        file.write(text.encode())
    click.echo(f'{likeness}\n\nwritten to {out}. Use it in a scenario: [workload] like = "{out}"')
