"""The command that explains the latency of a finished run's requests: explain."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import click

from pdflow.cli.interrupts import sigterm_as_ctrl_c
from pdflow.cli.options import print_view


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("request_id", metavar="[REQUEST_ID]", required=False)
@click.option("--itl", is_flag=True, help="Explain the request's worst inter-token latency instead of its TTFT.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Run N simulations at once. Default: one per core.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables; times in ns.")
def explain(run_dir: Path, request_id: str | None, itl: bool, jobs: int | None, as_json: bool) -> None:
    """Explain the latency of a request, or of the slowest ones.

    RUN_DIR is a folder that `simulate --out` wrote. Without REQUEST_ID: prints what p99 TTFT and the worst ITL are made
    of, and three requests that show it. With it (17 or r17): prints the stages of the request's TTFT, what each of them
    waited for, and what they would have been with pull instead of push, larger blocks, faster links, one more P or one
    more D. For this, the run is simulated again until the request has ended.
    """
    if itl and request_id is None:
        raise click.UsageError("--itl needs a REQUEST_ID")
    with sigterm_as_ctrl_c():
        command = importlib.import_module("pdflow_sim.explain.command")
        found = command.explain(run_dir, request_id, itl=itl, jobs=jobs or os.cpu_count() or 1)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        print_view(found)
