"""Commands that check: the protocol (check), and a scenario file (validate)."""

from __future__ import annotations

import importlib
from typing import Any

import click

from pdflow.cli.options import SET, print_view


@click.command()
@click.argument("what", default="all")
@click.option("--dialect", type=click.Choice(["strict", "vllm-compat", "vllm-stock"]), help="Only this dialect.")
@click.option("--only", metavar="WORDS", help="Only rows with these words in their names; of scopes, nightly ones too.")
@click.option("--large", is_flag=True, help="The nightly scopes too: minutes, and up to 6 GB.")
@click.option("--budget", type=float, metavar="SECONDS", help="Stop after so long; exit 3 if that came first.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Processes; as many as there are processors.")
@click.option("--seed", type=int, default=1, metavar="N", help="Of random walks.")
@click.option(
    "--runs",
    type=click.IntRange(1),
    metavar="N",
    help="So many random walks of each dialect; else all does 6,400, and walk as many as 30 s allow.",
)
@click.option("--out", type=click.Path(file_okay=False), default="check", metavar="DIR", help="Where stories go.")
@click.option("--json", "as_json", is_flag=True, help="One object with a row per scope, race or mutant.")
@click.option("--replay", type=click.Path(), metavar="FILE", help="Tell one story again, strictly.")
@click.option(
    "--diagram", type=click.Path(), metavar="FILE", help="Draw a story, or a race as R13, in text and Mermaid."
)
@click.option(
    "--trace",
    type=click.Path(),
    metavar="FILE",
    help="Follow an events.jsonl of a SCENARIO.toml; or one of vLLM's, or its folder, by itself.",
)
@click.pass_context
def check(ctx: click.Context, /, what: str, as_json: bool, **options: Any) -> None:
    """Check the protocol: what can happen, in every order.

    WHAT is all, scopes, methods, walk, mutants, races or a SCENARIO.toml. Says what was covered, or writes the shortest
    story that breaks an invariant into --out and exits with 1.
    """
    command = importlib.import_module("pdflow_sim.check.command")
    replay, diagram, trace = (options.pop(name) for name in ("replay", "diagram", "trace"))
    if trace is not None and not what.endswith(".toml"):
        ctx.exit(command.trace(trace, as_json=as_json))
    if replay is not None or diagram is not None:
        ctx.exit(command.replay(replay) if replay is not None else command.diagram(diagram, options["dialect"]))
    ctx.exit(command.check(what, command.options(json=as_json, **options), trace))


@click.command()
@click.argument("scenario", metavar="FILE", type=click.Path())
@SET
def validate(scenario: str, overrides: tuple[str, ...]) -> None:
    """Check a scenario FILE without a run.

    Says what is wrong, or else what its engines hold and how fast its links are.
    """
    from pdflow.scenario.reading.load import load
    from pdflow.scenario.show import scenario_view

    print_view(scenario_view(load(scenario, overrides=overrides)))
