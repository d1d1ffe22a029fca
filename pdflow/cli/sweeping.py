"""The command that runs many points of a scenario: sweep."""

from __future__ import annotations

import importlib

import click

from pdflow.cli.completion import complete_override
from pdflow.cli.interrupts import sigterm_as_ctrl_c
from pdflow.errors import before_simulating


@click.command()
@click.argument("scenario", type=click.Path())
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE,...",
    shell_complete=complete_override,
    help="The values of one key, as in pool.decode.replicas=3,4,5. Repeatable: every combination is run, the last key "
    "changing fastest. One value alone holds for all runs.",
)
@click.option("--csv", "to_csv", type=click.Path(dir_okay=False), metavar="FILE", help="Write all figures of each run.")
@click.option("--seeds", type=click.IntRange(1), default=1, metavar="N", help="Run each point with N seeds.")
@click.option("--jobs", type=click.IntRange(1), default=1, metavar="N", help="Run N points at once, in processes.")
@click.option(
    "--executor",
    type=click.Choice(["process", "ray"]),
    default="process",
    help="Run simulations in processes of this machine, or as tasks of a Ray cluster: that of RAY_ADDRESS, or else a "
    "local one of N workers. Default: process.",
)
@click.option(
    "--cache",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Keep each finished run there: the same command then runs only what is missing.",
)
@click.option("--quiet", is_flag=True, help="Print no progress and no table.")
@click.pass_context
def sweep(
    ctx: click.Context,
    /,
    scenario: str,
    sets: tuple[str, ...],
    to_csv: str | None,
    seeds: int,
    jobs: int,
    executor: str,
    cache: str | None,
    quiet: bool,
) -> None:
    """Simulate a SCENARIO file with several values of its keys.

    Prints a table with a row for each run. Exits with 2 if a point could not be run; the other rows are complete.
    """
    with sigterm_as_ctrl_c():
        with before_simulating():
            command = importlib.import_module("pdflow_sim.experiments.sweep_command")
        code = command.sweep(
            scenario, sets, seeds=seeds, jobs=jobs, executor=executor, cache=cache, to_csv=to_csv, quiet=quiet
        )
    ctx.exit(code)
