"""Commands that look at a recorded workload, or make a model of it: trace describe, trace model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.group()
def trace() -> None:
    """Look at a recorded workload, or make a model of it."""


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
        click.option("--dataset", metavar="PATH", help="The lengths of a servegen client, if not beside its trace."),
        click.option(
            "--column",
            "columns",
            multiple=True,
            metavar="KEY=NAME",
            help="Of CSV: the name of a column, as in arrival_s=t, input_tokens=in, class=tier. Repeatable. Common "
            "names, such as timestamp, prompt_tokens or output_tokens, are found without it.",
        ),
        click.option(
            "--format", "form", metavar="FORMAT", callback=_known_format, help="Its format, if the file leaves doubt."
        ),
        click.option(
            "--end-s", type=click.FloatRange(0, min_open=True), metavar="S", help="Only requests before then."
        ),
        click.option("--start-s", type=click.FloatRange(0), metavar="S", help="Only requests from then on."),
        click.argument("path", metavar="FILE"),
    ):
        command = option(command)
    return command


@trace.command("describe")
@_of_trace
@click.option("--json", "as_json", is_flag=True, help="The figures as one JSON object.")
def describe_trace(as_json: bool, **asked: Any) -> None:
    """Say what a trace FILE is like.

    Counts, rates, burstiness, lengths, possible prefix hits, classes, and the rate over time as a plot.
    """
    from pdflow.workload.traces.command import TraceOptions, described_trace

    click.echo(described_trace(TraceOptions(**asked), as_json), nl=False)


@trace.command("model")
@_of_trace
@click.option("-o", "--out", required=True, metavar="MODEL.toml", help="The file to write.")
@click.option("--title", metavar="TEXT", help="What the trace is, for people; the count and the format if absent.")
def model_trace(out: str, title: str | None, **asked: Any) -> None:
    """Make a model of a trace FILE, to be drawn from with `like`.

    It holds rates, quantiles and probabilities, no row of the trace, so that the shape of traffic can be shared without
    the traffic. Prints how like the trace is what the model draws.
    """
    from pdflow.results.files.write import guarding, replacing
    from pdflow.workload.traces.command import TraceOptions, modelled_trace

    path = Path(out)
    command = ("pdflow", "trace", "model", "-o", out)
    text, likeness = modelled_trace(TraceOptions(**asked, command=command), path.stem, title)
    with replacing(path) as file, guarding(path):
        file.write(text.encode())
    click.echo(f'{likeness}\n\n{out} written. In a scenario: [workload] like = "{out}"')
