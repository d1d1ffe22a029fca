"""Commands that check: the protocol (check), and a scenario file (validate)."""

from __future__ import annotations

import importlib
from typing import Any

import click

from pdflow.cli.options import SET, print_view


@click.command()
@click.argument("what", default="quick")
@click.option("--dialect", type=click.Choice(["strict", "vllm-compat", "vllm-stock"]), help="Check only this dialect.")
@click.option(
    "--only", metavar="WORDS", help="Check only rows whose names contain WORDS; nightly scopes need --large as well."
)
@click.option("--large", is_flag=True, help="Include the nightly scopes: minutes, and up to 6 GB.")
@click.option("--budget", type=float, metavar="SECONDS", help="Stop after SECONDS; exit 3 if work is left.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Number of processes. Default: one per CPU.")
@click.option("--seed", type=int, default=1, metavar="N", help="First seed of the random walks. Default: 1.")
@click.option(
    "--runs",
    type=click.IntRange(1),
    metavar="N",
    help="Random walks of each dialect. Default: 500 in quick, 6,400 in all; walk runs for 30 s.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="With scope: set a field of it, as in drop=1 or chunks=2. Repeatable.",
)
@click.option(
    "--list", "as_list", is_flag=True, help="List the names that WHAT checks, or the fields of a scope; check nothing."
)
@click.option(
    "--out", type=click.Path(file_okay=False), default="check", metavar="DIR", help="Directory for counterexamples."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with a row per scope, race or mutant.")
@click.option("--replay", type=click.Path(), metavar="FILE", help="Replay a counterexample; fail on divergence.")
@click.option(
    "--diagram",
    type=click.Path(),
    metavar="FILE",
    help="Draw a counterexample, or a race such as R13, as text and Mermaid.",
)
@click.option(
    "--trace",
    type=click.Path(),
    metavar="FILE",
    help="Replay recorded events: the events.jsonl of SCENARIO.toml, or without WHAT a file or folder of vLLM's.",
)
@click.pass_context
def check(ctx: click.Context, /, what: str, as_json: bool, as_list: bool, **options: Any) -> None:
    """Check the protocol: explore every order of events.

    WHAT is quick (default, about 30 s on 2 cores), all (CPU minutes), scopes, methods, routers, walk, mutants, races,
    scope (one of your own, with --set) or a SCENARIO.toml. Prints the coverage. If an invariant is violated, writes
    the shortest counterexample into --out and exits with 1.
    """
    command = importlib.import_module("pdflow_sim.check.command")
    replay, diagram, trace = (options.pop(name) for name in ("replay", "diagram", "trace"))
    if trace is not None and not what.endswith(".toml"):
        ctx.exit(command.trace(trace, as_json=as_json))
    if replay is not None or diagram is not None:
        ctx.exit(command.replay(replay) if replay is not None else command.diagram(diagram, options["dialect"]))
    chosen = command.options(json=as_json, **options)
    ctx.exit(command.names(what, chosen) if as_list else command.check(what, chosen, trace))


@click.command()
@click.argument("scenario", metavar="FILE", type=click.Path())
@SET
def validate(scenario: str, overrides: tuple[str, ...]) -> None:
    """Check a scenario FILE without running it.

    Prints every problem in it; if there is none, the memory of its engines and the speed of its links.
    """
    from pdflow.scenario.reading.load import load
    from pdflow.scenario.show import scenario_view

    print_view(scenario_view(load(scenario, overrides=overrides)))
