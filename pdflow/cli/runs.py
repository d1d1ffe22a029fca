"""Commands that make runs and compare them: simulate, compare, calibrate."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdflow.cli.interrupts import sigterm_as_ctrl_c
from pdflow.cli.options import SET, live, need_out, print_view
from pdflow.errors import before_simulating

if TYPE_CHECKING:
    from pdflow.scenario.reading.editable import Scenario


@click.command()
@click.argument("scenario", type=click.Path())
@click.option(
    "--out",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Write results.json, requests.jsonl and scenario.toml into DIR.",
)
@click.option("--seed", type=int, metavar="N", help="Seed of the run. Default: the scenario's.")
@click.option(
    "--seeds",
    type=click.IntRange(2),
    metavar="N",
    help="Run N times with consecutive seeds; report means with intervals.",
)
@SET
@click.option(
    "--exact", is_flag=True, help="Simulate every step by itself, without closed forms. Slower; same results."
)
@click.option("--events", is_flag=True, help="Write DIR/events.jsonl: every event and effect of every endpoint.")
@click.option(
    "--check-invariants", is_flag=True, help="Check the safety invariants on every event; exit 1 on a violation."
)
@click.option("--save-detailed", is_flag=True, help="Add each request's lengths and times to results.json.")
@click.option("--timeline", is_flag=True, help="Write DIR/timeline.json.gz for ui.perfetto.dev.")
@click.option("--html", is_flag=True, help="Write DIR/report.html: figures, charts and the scenario on one page.")
@click.option("--quiet", is_flag=True, help="Print no progress and no tables.")
@click.pass_context
def simulate(
    ctx: click.Context,
    /,
    scenario: str,
    seed: int | None,
    seeds: int | None,
    overrides: tuple[str, ...],
    out: str | None,
    **flags: bool,
) -> None:
    """Simulate a SCENARIO file: its cluster and its workload.

    Prints latencies, goodput and where the time to first token went.
    """
    need_out(out, flags)
    with sigterm_as_ctrl_c():
        with before_simulating():
            from pdflow.scenario.reading.editable import Scenario

            written = Scenario.of_command(scenario, overrides, seed)
        code = _simulate(written, seeds, out=out, **flags)
    ctx.exit(code)


def _simulate(scenario: Scenario, seeds: int | None, **options: Any) -> int:
    """Run it in the simulated world; the exit code. Options are those of the command, by name."""
    with before_simulating():
        module = importlib.import_module("pdflow_sim.run" if seeds is None else "pdflow_sim.experiments.seeds")
    if seeds is None:
        ran = module.simulate(scenario.resolved, written=scenario, command=sys.argv[1:], **options)
    else:
        ran = module.simulate_seeds(scenario.resolved, seeds, written=scenario, command=sys.argv[1:], **options)
    return int(ran.exit_code)


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@SET
@click.option(
    "--seeds", type=click.IntRange(2), metavar="N", help="Simulate each scenario with N seeds, for intervals over runs."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def compare(runs: tuple[Path, ...], overrides: tuple[str, ...], seeds: int | None, as_json: bool) -> None:
    """Compare runs with the first of them.

    Each RUN is a folder that `simulate --out` wrote (with or without `--seeds`), or a SCENARIO.toml, which is
    simulated now; `--set` applies to all of these. Prints the figures of both runs, stage by stage, and their
    differences with 95 % intervals.
    """
    from pdflow.results.comparison.compare import Comparisons
    from pdflow.results.files.read import read_runs

    if len(runs) < 2:
        raise click.UsageError("compare needs at least two runs")
    if any(run.suffix == ".toml" for run in runs):
        with sigterm_as_ctrl_c():
            compared = importlib.import_module("pdflow_sim.experiments.compare").gathered(runs, overrides, seeds)
    elif overrides or seeds:
        raise click.UsageError("--set and --seeds need a scenario file (.toml) among the runs")
    else:
        compared = [read_runs(run) for run in runs]
    found = Comparisons.of(compared)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        print_view(found)


@click.command()
@click.argument("scenario", type=click.Path())
@click.argument("seen", metavar="[SEEN.csv]", required=False, type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", required=True, metavar="PATH", help="The cost file to write; for a running cluster, a folder."
)
@click.option("--pool", metavar="NAME", help="The pool whose step times to correct, if there are several.")
@click.option("--url", metavar="URL", help="URL of the cluster's router. Default: as in [serve].")
@SET
@click.pass_context
def calibrate(
    ctx: click.Context,
    /,
    scenario: str,
    seen: Path | None,
    out: str,
    pool: str | None,
    url: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Measure a running cluster, or correct step times.

    Without SEEN.csv: measures the cluster that `pdflow serve SCENARIO` started. Writes PATH/scenario.toml with the
    measured times of steps, links and messages, a cost file for each pool, and links.toml.

    With SEEN.csv: fits three factors of a pool's cost to requests of a real engine, by simulation. SCENARIO has the
    traffic that the engine served. SEEN.csv has the columns request (its number in that traffic, from 0), ttft_ms and
    tpot_ms; ten requests are enough.
    """
    if seen is None:
        if pool is not None:
            raise click.UsageError("--pool needs SEEN.csv: without it all pools of the running cluster are measured")
        cluster = live(lambda: importlib.import_module("pdflow_runtime.calibrate.command"))
        ctx.exit(cluster.main(scenario, overrides, url, Path(out), sys.argv[1:]))
    if url is not None:
        raise click.UsageError("--url cannot be combined with SEEN.csv: it names a running cluster")
    from pdflow.results.files.write import guarding, replacing
    from pdflow.scenario.reading.load import load

    text, file = importlib.import_module("pdflow_sim.experiments.calibrate").calibrated(
        load(scenario, overrides=overrides), seen, pool, sys.argv[1:]
    )
    path = Path(out)
    with replacing(path) as written, guarding(path):
        written.write(file.encode())
    click.echo(f'{text}\n\nwritten to {out}. Use it in a pool: cost = {{ model = "measured", path = "{out}" }}')
