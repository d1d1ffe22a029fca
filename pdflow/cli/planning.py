"""The command that finds a cluster for a scenario's traffic: plan."""

from __future__ import annotations

import importlib
import os
from typing import Any

import click

from pdflow.cli.interrupts import sigterm_as_ctrl_c
from pdflow.cli.options import SET
from pdflow.errors import before_simulating


@click.command()
@click.argument("scenario", type=click.Path())
@click.option(
    "--slo",
    metavar="LEVEL",
    help="What must be met, as in ttft=500ms@p99,itl=50ms@p99,attainment=95%. Latencies: ttft, tpot, itl, e2e; @p99: "
    "for 99 % of requests (ITL: of tokens); @mean; attainment: the share of requests that meet all bounds. Default: "
    "the scenario's [slo], met by 95 % of requests.",
)
@click.option("--gpus", type=int, metavar="N", help="Find the best cluster of N GPUs.")
@click.option("--rate", type=float, metavar="R", help="Find the smallest cluster that serves R requests per second.")
@click.option(
    "--gpu",
    multiple=True,
    metavar="TYPE[=PRICE]",
    help="A type of GPU to use, and its price in $ per hour, as in h100-sxm=2.80. Repeatable; prefill and decode may "
    "then differ. Default: the scenario's GPUs.",
)
@click.option(
    "--search",
    metavar="KEY,...",
    help="What to search: tp, ep, xpyd (numbers of P and D), chunk, policy, method, block_size, dispatch, conditional; "
    "none: the scenario's own cluster alone. Default: all.",
)
@click.option(
    "--values",
    multiple=True,
    metavar="KEY=VALUE,...",
    help="The values of one key to search, as in tp=2,4. Repeatable.",
)
@click.option(
    "--kind",
    type=click.Choice(["aggregated", "disaggregated"]),
    help="Search clusters of this kind only. Default: both, which says whether to disaggregate.",
)
@click.option(
    "--target",
    type=click.Choice(["goodput-per-gpu", "cost", "min-gpus"]),
    help="What to compare designs by. Default: goodput-per-gpu; with --rate min-gpus, or cost if all prices are given.",
)
@SET
@click.option("--seeds", type=click.IntRange(1), default=3, metavar="N", help="Runs of each finalist. Default: 3.")
@click.option(
    "--requests", type=click.IntRange(100), metavar="N", help="Requests of a whole run. Default: the scenario's."
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Run N simulations at once. Default: one per core.")
@click.option(
    "--executor",
    type=click.Choice(["process", "ray"]),
    default="process",
    help="Run simulations in processes of this machine, or as tasks of a Ray cluster: that of RAY_ADDRESS, or else a "
    "local one of N workers. Default: process.",
)
@click.option("--budget", type=click.FloatRange(1), metavar="S", help="End after S seconds with the best so far.")
@click.option("--robust/--no-robust", default=True, help="Whether to put the finalists under stress. Default: yes.")
@click.option(
    "--out", type=click.Path(file_okay=False), metavar="DIR", help="Write the plan and the best scenario there."
)
@click.option("--resume", is_flag=True, help="Go on with the plan in DIR: runs that it has are not run again.")
@click.option("--quiet", is_flag=True, help="Print no progress and no verdict.")
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    scenario: str,
    overrides: tuple[str, ...],
    jobs: int | None,
    executor: str,
    budget: float | None,
    out: str | None,
    resume: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Find the best cluster for the traffic of a SCENARIO file.

    Searches aggregated and disaggregated clusters for the highest rate within a service level, and says which is best,
    what binds it, what would help, and what it survives. Exits with 1 if no design meets the service level.
    """
    if resume and out is None:
        raise click.UsageError("--resume needs --out DIR")
    with sigterm_as_ctrl_c():
        with before_simulating():
            command = importlib.import_module("pdflow_sim.plan.command")
            request = importlib.import_module("pdflow_sim.plan.request")
        code = command.plan(
            scenario,
            request.PlanOptions(**options),
            overrides=overrides,
            jobs=jobs or os.cpu_count() or 1,
            executor=executor,
            budget_s=budget,
            out=out,
            resume=resume,
            quiet=quiet,
        )
    ctx.exit(code)
