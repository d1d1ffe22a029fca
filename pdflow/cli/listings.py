"""Commands that list what a scenario may name: schema, methods, presets."""

from __future__ import annotations

import json

import click

from pdflow.cli.completion import complete_method, complete_preset
from pdflow.cli.options import print_view


@click.command()
def schema() -> None:
    """Print the JSON Schema of scenario files."""
    from pdflow.scenario.schema.jsonschema import schema_json

    click.echo(json.dumps(schema_json(), indent=2))


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_method)
@click.option(
    "--dialect",
    type=click.Choice(["strict", "as-published"]),
    default="strict",
    show_default=True,
    help="Dialect of the printed request.",
)
def methods(names: tuple[str, ...], dialect: str) -> None:
    """List the transfer methods.

    Prints who initiates, the pieces, memories and messages, what happens when memory is full or a message is lost,
    limits and sources. With NAME, also prints one request step by step.
    """
    from pdflow.methods.catalogue import METHODS
    from pdflow.methods.show import methods_view

    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise click.UsageError(f"unknown method {unknown[0]}; expected one of {', '.join(METHODS)}")
    for name in names:
        from pdflow_sim.observe.text_trace import one_request

        print_view(methods_view(METHODS, (name,)))
        click.echo("\n  One request:\n")
        for line in one_request(name, dialect):
            click.echo(f"  {line}")
        click.echo()
    if not names:
        print_view(methods_view(METHODS, ()))


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_preset)
def presets(names: tuple[str, ...]) -> None:
    """List the presets of models, GPUs, networks and step costs.

    With NAME, prints every value of that preset and its source.
    """
    from pdflow.scenario.show import presets_view

    print_view(presets_view(names))
