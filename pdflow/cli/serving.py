"""Commands of the live world: serve, top, bench."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from pdflow.cli.bench_options import bench_options
from pdflow.cli.options import SET, live, need_out


@click.command()
@click.argument("scenario", type=click.Path())
@click.option("--port", type=click.IntRange(0, 65_535), metavar="N", help="The router's port, instead of serve.port.")
@SET
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
    need_out(out, flags)
    overrides = overrides if port is None else (*overrides, f"serve.port={port}")
    if role is not None:
        if flags["timeline"] or flags["html"]:
            raise click.UsageError("--timeline and --html are of a whole cluster, and --role is one part of it")
        overrides = (
            overrides if host is None else (*overrides, f"serve.{'host' if role == 'router' else 'engine_host'}={host}")
        )
        ctx.exit(
            live(lambda: importlib.import_module("pdflow_runtime.process.role")).main(
                scenario, overrides, role, name, out=out, **flags
            )
        )
    if name is not None or host is not None:
        raise click.UsageError("--name and --host go with --role")
    ctx.exit(
        live(lambda: importlib.import_module("pdflow_runtime.process.cluster")).main(
            scenario, overrides, out=out, **flags
        )
    )


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--every", type=click.FloatRange(0.1), default=1.0, metavar="S", help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="One look, and no more.")
@click.pass_context
def top(ctx: click.Context, /, url: str, every: float, once: bool) -> None:
    """Watch a live cluster, whose router is at URL.

    Each engine's pool, streams and queue, blocks in quarantine, and the requests that have been there for the longest,
    with the states that they are in.
    """
    ctx.exit(live(lambda: importlib.import_module("pdflow_runtime.observe.top")).main(url, every, once))


@click.command()
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
        live(lambda: importlib.import_module("pdflow_runtime.bench.command")).bench(
            sys.argv[1:], goodput=(*goodput, *more), **options
        )
    )
