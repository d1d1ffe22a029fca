"""The front door: one function per subcommand, no logic.

Each opens what it needs when it is called, so that `--help` is quick and `sim/` is imported by `simulate` alone. Bad
input goes to stderr, one problem a line, with exit code 2 (`pdflow.errors` lists the codes).
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdflow.bench_options import bench_options
from pdflow.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, MissingBackendError, PdflowError
from pdflow.version import compiled, version

if TYPE_CHECKING:
    from pdflow.scenario.schema import Scenario


class _Front(click.Group):
    """Errors meant for people become lines on stderr and an exit code, for every subcommand alike."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PdflowError as error:
            click.echo(str(error), err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)


_SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace one value of the scenario, as in router.policy=least-loaded or pool.decode.tp=2. Repeatable.",
)


@click.group(cls=_Front, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(version() + (" (compiled)" if compiled() else ""), prog_name="pdflow")
def cli() -> None:
    """Prefill/decode-disaggregated LLM serving, simulated with the protocol that serves.

    Exit codes: 0 done; 1 what was asked about is not so; 2 bad input or a missing backend; 3 a budget ran out first;
    130 interrupted.
    """


@cli.command()
@click.argument("scenario", type=click.Path())
@click.option("--out", type=click.Path(file_okay=False), metavar="DIR", help="Write results.json and requests.jsonl.")
@click.option("--seed", type=int, metavar="N", help="Seed of the run, instead of the scenario's.")
@click.option("--seeds", type=click.IntRange(2), metavar="N", help="N runs from that seed on: means with intervals.")
@_SET
@click.option("--exact", is_flag=True, help="Advance token by token, without closed forms. Slow; the same results.")
@click.option("--events", is_flag=True, help="Write DIR/events.jsonl: every event into and effect out of an endpoint.")
@click.option("--check-invariants", is_flag=True, help="Check the safety invariants on every event; exit 1 if broken.")
@click.option("--save-detailed", is_flag=True, help="Put each request's lengths and times into results.json too.")
@click.option("--timeline", is_flag=True, help="Write DIR/timeline.json.gz, which ui.perfetto.dev opens.")
@click.option("--html", is_flag=True, help="Write DIR/report.html: figures, curves and the scenario on one page.")
@click.option("--quiet", is_flag=True, help="Nothing while it runs, and no tables.")
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
    """Simulate a SCENARIO file: its cluster and its workload."""
    from pdflow.scenario.load import load

    _into(out, flags)
    ctx.exit(_simulate(load(scenario, overrides=overrides, seed=seed), seeds, out=out, **flags))


def _into(out: str | Path | None, flags: Mapping[str, bool]) -> None:
    """What writes into --out DIR needs one."""
    for flag in ("events", "save_detailed", "timeline", "html"):
        if flags.get(flag) and out is None:
            raise click.UsageError(f"--{flag.replace('_', '-')} writes into --out DIR, which is missing")


def _simulate(scenario: Scenario, seeds: int | None, **options: Any) -> int:
    """Run it in the simulated world; the exit code. Options are those of the command, by name."""
    if seeds is not None:
        several = importlib.import_module("sim.seeds").simulate_seeds(scenario, seeds, command=sys.argv[1:], **options)
        return int(several.exit_code)
    run = importlib.import_module("sim.run")
    result = run.simulate(scenario, command=sys.argv[1:], **options)
    return int(result.exit_code)


@cli.command()
@click.argument("scenario", type=click.Path())
@click.option("--port", type=click.IntRange(0, 65_535), metavar="N", help="The router's port, instead of serve.port.")
@_SET
@click.option(
    "--role", type=click.Choice(["router", "prefill", "decode", "store"]), help="One part only, the others elsewhere."
)
@click.option("--name", metavar="NAME", help="With --role: which engine, as in decode-0.")
@click.option("--host", metavar="ADDRESS", help="With --role: where it listens, instead of serve.host or engine_host.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="When it has ended, write results.json and requests.jsonl of what was served, as simulate does.",
)
@click.option("--events", is_flag=True, help="Write DIR/events.jsonl: every event into and effect out of an endpoint.")
@click.option("--timeline", is_flag=True, help="Write DIR/timeline.json.gz, which ui.perfetto.dev opens.")
@click.option("--html", is_flag=True, help="Write DIR/report.html: figures, curves and the scenario on one page.")
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    scenario: str,
    port: int | None,
    overrides: tuple[str, ...],
    role: str | None,
    name: str | None,
    host: str | None,
    out: Path | None,
    **flags: bool,
) -> None:
    """Serve a SCENARIO file: the whole cluster, or one part.

    Starts a router and every engine, each a process of its own. The first line on stdout is the URL that answers
    OpenAI's API; logs go to stderr. Ctrl-C lets what has begun end. With --role and --name it is that part, whose
    engines report to the router; docs/hosts.md says how to run a cluster on several hosts.
    """
    _into(out, flags)
    said = overrides if port is None else (*overrides, f"serve.port={port}")
    if role is not None:
        if flags["timeline"] or flags["html"]:
            raise click.UsageError("--timeline and --html are of a whole cluster, and --role is one part of it")
        said = said if host is None else (*said, f"serve.{'host' if role == 'router' else 'engine_host'}={host}")
        ctx.exit(
            _live(lambda: importlib.import_module("runtime.role")).main(scenario, said, role, name, out=out, **flags)
        )
    if name is not None or host is not None:
        raise click.UsageError("--name and --host go with --role")
    ctx.exit(_live(lambda: importlib.import_module("runtime.cluster")).main(scenario, said, out=out, **flags))


@cli.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--every", type=click.FloatRange(0.1), default=1.0, metavar="S", help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="One look, and no more.")
@click.pass_context
def top(ctx: click.Context, /, url: str, every: float, once: bool) -> None:
    """Watch a live cluster, whose router is at URL.

    Each engine's pool, streams and queue, blocks in quarantine, and the requests that have been there for the longest,
    with the states that they are in.
    """
    ctx.exit(_live(lambda: importlib.import_module("runtime.top")).main(url, every, once))


def _live(opened: Callable[[], Any]) -> Any:
    """A part of the live world, which is an extra."""
    try:
        return opened()
    except ModuleNotFoundError as missing:
        raise MissingBackendError(f"this needs {missing.name}: pip install 'pdflow[live]'") from None


@cli.command()
@bench_options
@click.pass_context
def bench(ctx: click.Context, /, more: tuple[str, ...], goodput: tuple[str, ...], **options: Any) -> None:
    """Send a workload to a server and measure it.

    Any server that answers OpenAI's API, with `vllm bench serve`'s options and result file. Draws its requests as
    simulate does, so that `pdflow compare` puts a simulation beside a run with --out.
    """
    if more and not goodput:
        raise click.UsageError(f"unexpected {more[0]!r}")
    ctx.exit(
        _live(lambda: importlib.import_module("runtime.bench.command")).bench(
            sys.argv[1:], goodput=(*goodput, *more), **options
        )
    )


@cli.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@_SET
@click.option(
    "--seeds", type=click.IntRange(2), metavar="N", help="Run each scenario with N seeds: intervals between runs."
)
@click.option("--json", "as_json", is_flag=True, help="The figures and differences as one JSON object.")
def compare(runs: tuple[Path, ...], overrides: tuple[str, ...], seeds: int | None, as_json: bool) -> None:
    """Compare runs with the first of them.

    Each RUN is a folder that `simulate --out` wrote, with `--seeds` or without, or a SCENARIO.toml, which is simulated
    now; `--set` is for all of these. Shows figures side by side, stage by stage, and the differences with 95 %
    intervals.
    """
    from pdflow.results.compare import Comparisons
    from pdflow.results.read import read_runs

    if len(runs) < 2:
        raise click.UsageError("it takes two runs to compare")
    if any(run.suffix == ".toml" for run in runs):
        compared = importlib.import_module("sim.compare").gathered(runs, overrides, seeds)
    elif overrides or seeds:
        raise click.UsageError("--set and --seeds are for scenario files, of which none is named")
    else:
        compared = [read_runs(run) for run in runs]
    found = Comparisons.of(compared)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _print(found)


@cli.command()
@click.argument("scenario", type=click.Path())
@click.argument("seen", metavar="[SEEN.csv]", required=False, type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, metavar="PATH", help="The cost file to write; of a live cluster a folder.")
@click.option("--pool", metavar="NAME", help="Whose step times to correct, if there is more than one pool.")
@click.option("--url", metavar="URL", help="The cluster's router, if it is not where [serve] says.")
@_SET
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

    Without SEEN.csv the cluster that `pdflow serve SCENARIO` has started is probed: PATH/scenario.toml then says what
    its steps, links and messages take, beside a cost file for each pool and links.toml.

    With SEEN.csv the SCENARIO has the traffic that an engine served, and the file the columns request (its number in
    that traffic, from 0), ttft_ms and tpot_ms; ten requests are enough. Three factors of a pool's cost are fitted,
    through the simulation.
    """
    if seen is None:
        if pool is not None:
            raise click.UsageError("--pool is for SEEN.csv: a running cluster's pools are all measured")
        live = _live(lambda: importlib.import_module("runtime.calibrate.command"))
        ctx.exit(live.main(scenario, overrides, url, Path(out), sys.argv[1:]))
    if url is not None:
        raise click.UsageError("--url is for a running cluster: leave SEEN.csv out")
    from pdflow.results.write import guarding, replacing
    from pdflow.scenario.load import load

    text, file = importlib.import_module("sim.calibrate").calibrated(
        load(scenario, overrides=overrides), seen, pool, sys.argv[1:]
    )
    path = Path(out)
    with replacing(path) as written, guarding(path):
        written.write(file.encode())
    click.echo(f'{text}\n\n{out} written. In a pool: cost = {{ model = "measured", path = "{out}" }}')


@cli.command()
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
@click.option("--trace", type=click.Path(), metavar="FILE", help="With a SCENARIO.toml: follow its events.jsonl.")
@click.pass_context
def check(ctx: click.Context, /, what: str, as_json: bool, **options: Any) -> None:
    """Check the protocol: what can happen, in every order.

    WHAT is all, scopes, methods, walk, mutants, races or a SCENARIO.toml. Says what was covered, or writes the shortest
    story that breaks an invariant into --out and exits with 1.
    """
    command = importlib.import_module("sim.check.command")
    replay, diagram, trace = (options.pop(name) for name in ("replay", "diagram", "trace"))
    if trace is not None and not what.endswith(".toml"):
        raise click.UsageError("--trace FILE needs the scenario that the record is of: pdflow check NAME.toml --trace")
    if replay is not None or diagram is not None:
        ctx.exit(command.replay(replay) if replay is not None else command.diagram(diagram, options["dialect"]))
    ctx.exit(command.check(what, command.options(json=as_json, **options), trace))


@cli.command()
@click.argument("scenario", metavar="FILE", type=click.Path())
@_SET
def validate(scenario: str, overrides: tuple[str, ...]) -> None:
    """Check a scenario FILE without a run.

    Says what is wrong, or else what its engines hold and how fast its links are.
    """
    from pdflow.scenario.load import load
    from pdflow.scenario.show import scenario_view

    _print(scenario_view(load(scenario, overrides=overrides)))


@cli.group()
def trace() -> None:
    """Look at a recorded workload, or make a model of it."""


def _known_format(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """One of the schema's formats; it is loaded only if one is named."""
    if value is not None:
        from typing import get_args

        from pdflow.scenario.workload_schema import TraceFormat

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
            help="Of CSV: which column says what, as in arrival_s=t, input_tokens=in, class=tier. Repeatable.",
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
    from pdflow.workload.command import Asked, described_trace

    click.echo(described_trace(Asked(**asked), as_json), nl=False)


@trace.command("model")
@_of_trace
@click.option("-o", "--out", required=True, metavar="MODEL.toml", help="The file to write.")
@click.option("--title", metavar="TEXT", help="What the trace is, for people; the count and the format if absent.")
def model_trace(out: str, title: str | None, **asked: Any) -> None:
    """Make a model of a trace FILE, to be drawn from with `like`.

    It holds rates, quantiles and probabilities, no row of the trace, so that the shape of traffic can be shared without
    the traffic. Prints how like the trace is what the model draws.
    """
    from pdflow.results.write import guarding, replacing
    from pdflow.workload.command import Asked, modelled_trace

    path = Path(out)
    text, likeness = modelled_trace(Asked(**asked), path.stem, title)
    with replacing(path) as file, guarding(path):
        file.write(text.encode())
    click.echo(f'{likeness}\n\n{out} written. In a scenario: [workload] like = "{out}"')


@cli.command()
def schema() -> None:
    """Print the JSON Schema of scenario files."""
    from pdflow.scenario.jsonschema import schema_json

    click.echo(json.dumps(schema_json(), indent=2))


@cli.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--dialect",
    type=click.Choice(["strict", "as-published"]),
    default="strict",
    show_default=True,
    help="In whose words the request of those NAMEd is told.",
)
def methods(names: tuple[str, ...], dialect: str) -> None:
    """List the transfer methods to name in a scenario.

    Who initiates, in what pieces, through which memories, with which messages; what happens when memory is full or
    something is lost; limits, and where each comes from. Of those NAMEd also one request, told in order.
    """
    from pdflow.methods.catalogue import METHODS
    from pdflow.methods.show import methods_view

    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise click.UsageError(f"no method {unknown[0]}; there are {', '.join(METHODS)}")
    for name in names:
        from sim.narration import one_request

        _print(methods_view(METHODS, (name,)))
        click.echo("\n  One request:\n")
        for line in one_request(name, dialect):
            click.echo(f"  {line}")
        click.echo()
    if not names:
        _print(methods_view(METHODS, ()))


@cli.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
def presets(names: tuple[str, ...]) -> None:
    """List models, GPUs and networks to name in a scenario.

    Of those NAMEd, every figure and its source.
    """
    from pdflow.scenario.show import presets_view

    _print(presets_view(names))


def _print(view: Any) -> None:
    from rich.console import Console

    Console(highlight=False, markup=False, emoji=False).print(view)


def main() -> None:
    """The command `pdflow`."""
    try:
        cli.main(prog_name="pdflow")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except OSError as cause:  # of files it is said where they are written: what is full here is behind stdout
        if cause.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush, at the interpreter's end
        click.echo(f"standard output: cannot write: {cause.strerror}; make room where it goes", err=True)
        sys.exit(EXIT_BAD_INPUT)
