"""Commands of live clusters: serve, top, bench."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from pdflow.cli.bench_options import bench_options
from pdflow.cli.options import SET, as_utf8, client, live, need_out

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("scenario", type=click.Path())
@click.option("--port", type=click.IntRange(0, 65_535), metavar="N", help="The router's port, instead of serve.port.")
@SET
@click.option("--role", type=click.Choice(["router", "prefill", "decode", "store"]), help="Run one component only.")
@click.option("--name", metavar="NAME", help="With --role: the name of the engine, such as decode-0.")
@click.option(
    "--host", metavar="ADDRESS", help="With --role: the address to listen on, instead of serve.host or engine_host."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="At exit, write results.json and requests.jsonl, in the format of simulate.",
)
@click.option(
    "--events", is_flag=True, help="Write DIR/events.jsonl: all events and effects of all protocol endpoints."
)
@click.option("--timeline", is_flag=True, help="Write DIR/timeline.json.gz, for ui.perfetto.dev.")
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
    """Serve a SCENARIO file: the whole cluster, or one component.

    Starts a router and every engine, each in its own process. The first line on stdout is the URL of the
    OpenAI-compatible API; logs go to stderr. Ctrl-C drains open requests, then stops. With --role and --name it runs
    one component, and engines report to the router: docs/hosts.md shows how to run a cluster on several hosts.
    """
    need_out(out, flags)
    overrides = overrides if port is None else (*overrides, f"serve.port={port}")
    if role is not None:
        if flags["timeline"] or flags["html"]:
            raise click.UsageError("--timeline and --html need the whole cluster, and --role runs one component")
        overrides = (
            overrides if host is None else (*overrides, f"serve.{'host' if role == 'router' else 'engine_host'}={host}")
        )
        ctx.exit(
            live(lambda: importlib.import_module("pdflow_runtime.process.role")).main(
                scenario, overrides, role, name, out=out, **flags
            )
        )
    if name is not None or host is not None:
        raise click.UsageError("--name and --host require --role")
    ctx.exit(
        live(lambda: importlib.import_module("pdflow_runtime.process.one_host")).main(
            scenario, overrides, out=out, **flags
        )
    )


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--every", type=click.FloatRange(0.1), default=1.0, metavar="S", help="Seconds between two updates.")
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@click.option("--cert", type=FILE, metavar="FILE", help="Certificate for a router's cluster port (PEM).")
@click.option("--key", type=FILE, metavar="FILE", help="The certificate's key (PEM).")
@click.option("--ca", type=FILE, metavar="FILE", help="The cluster's authority (PEM), serve.tls_ca.")
@click.pass_context
def top(ctx: click.Context, /, url: str, every: float, once: bool, **files: Path | None) -> None:
    """Show the state of a live cluster whose router is at URL.

    A router with serve.cluster_port is asked at that port, with --cert, --key and --ca: https://10.0.0.1:8443.

    For the router: open requests, requests and tokens per second, its CPU, and times to first token since the update
    before. For each engine: KV blocks, blocks in quarantine, queues and connections. Then the oldest requests.
    """
    given = [path for path in files.values() if path is not None]
    if given and len(given) != len(files):
        raise click.UsageError("--cert, --key and --ca belong together: a router's cluster port needs all three")
    if given and url.startswith("http://"):
        raise click.UsageError("--cert, --key and --ca are for a URL that begins with https://")
    ctx.exit(client(lambda: importlib.import_module("pdflow_runtime.observe.top")).main(url, every, once, given))


@click.command()
@bench_options
@click.pass_context
def bench(ctx: click.Context, /, more: tuple[str, ...], goodput: tuple[str, ...], **options: Any) -> None:
    """Send a workload to a server and measure it.

    Works with any OpenAI-compatible server. Options and result file are those of `vllm bench serve`. Requests are drawn
    as in simulate, so `pdflow compare` can compare a simulation with a run that used --out.
    """
    if more and not goodput:
        raise click.UsageError(f"unexpected argument {more[0]!r}")
    options |= {name: as_utf8(options[name]) for name in ("model", "header", "extra_body", "label", "metadata")}
    ctx.exit(
        client(lambda: importlib.import_module("pdflow_runtime.bench.command")).bench(
            sys.argv[1:], goodput=(*goodput, *more), **options
        )
    )
