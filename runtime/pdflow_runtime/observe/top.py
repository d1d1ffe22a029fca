"""The command `pdflow top`: shows the state of a live cluster, drawn again and again."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import trio
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdflow.errors import EXIT_BAD_INPUT, EXIT_DONE, PdflowError
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.tls_socket import client_context
from pdflow_runtime.process.processes import run_to_exit_code
from pdflow_runtime.process.reports import ROUTER
from pdflow_runtime.security.signed import operators_signer

STATE: Final = "/admin/state"
OLDEST: Final = 8
"""Requests that are named."""


class NoClusterError(PdflowError):
    """No router of pdflow answers at this address."""

    exit_code = EXIT_BAD_INPUT


def view(state: dict[str, Any]) -> Group:
    """Return a table of the engines, and below it the requests that have been there for the longest."""
    table = Table(box=None, pad_edge=False)
    staging_column = ("beside",) if any(engine and engine.get("beside") for engine in state["engines"].values()) else ()
    for name in ("engine", "blocks", "used", "quar.", *staging_column, "wait", "load", "run", "open", "links", "steps"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    oldest: list[tuple[float, str, str, str]] = []
    for name, engine in state["engines"].items():
        label = f"{name} (drained)" if name in state["drained"] else name
        label = f"{name} (silent)" if name in state["silent"] else label
        if engine is None:
            table.add_row(Text(label, "red"), "no answer")
            continue
        if not engine.get("backing", {"up": True})["up"]:
            label += " (its store server is unavailable)"
        used = engine["blocks"] - engine["free"]
        table.add_row(
            label,
            f"{engine['blocks']:,}",
            f"{used / engine['blocks']:.0%}",
            f"{engine['quarantined']:,}",
            *(room(engine.get("beside")) for _ in staging_column),
            *(f"{engine[key]:,}" for key in ("waiting", "loading", "running", "open", "links", "steps")),
        )
        oldest += [(request["age_s"], name, request["state"], request["request_id"]) for request in engine["requests"]]
    requests = Table(box=None, pad_edge=False)
    for name in ("oldest requests", "at", "state"):
        requests.add_column(name)
    requests.add_column("age", justify="right")
    for age_s, name, phase, request_id in sorted(oldest, reverse=True)[:OLDEST]:
        requests.add_row(request_id, name, phase, f"{age_s:.1f} s")
    head = Text(f"{state['open']:,} requests open at the router")
    return Group(head, Text(), table, Text(), requests) if oldest else Group(head, Text(), table)


def room(staging: dict[str, Any] | None) -> str:
    """Return how much of an engine's staging memory is used, and how many requests wait for some."""
    if staging is None:
        return ""
    waiting = f" +{staging['waiting']:,}" if staging["waiting"] else ""
    return f"{1 - staging['free'] / max(1, staging['bytes']):.0%}{waiting}"


async def ask(client: HttpClient, host: str, port: int) -> dict[str, Any]:
    try:
        signed = operators_signer(host, port).sign(ROUTER, "GET", STATE, b"")
        async with client.request("GET", host, port, STATE, signed) as response:
            answer = await response.read()
        if response.status == 200:
            state: dict[str, Any] = msgspec.json.decode(answer)
            return state
    except (UpstreamError, msgspec.DecodeError) as error:
        raise NoClusterError(f"{host}:{port}: {error}") from None
    secret = "; set PDFLOW_SECRET to the cluster's secret" if response.status == 401 else ""
    raise NoClusterError(
        f"{host}:{port} is not a pdflow router, or rejects this request: HTTP {response.status}{secret}"
    )


def main(url: str, every_s: float, once: bool) -> int:
    """Run the command; return the exit code."""
    split_url = urlsplit(url if "//" in url else f"http://{url}")
    tls = split_url.scheme == "https"
    host, port = split_url.hostname or "127.0.0.1", split_url.port or (443 if tls else 80)

    async def run() -> None:
        client = HttpClient(tls=client_context() if tls else None)
        try:
            console = Console(highlight=False)
            if once:
                console.print(view(await ask(client, host, port)))
                return
            with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
                while True:
                    live.update(view(await ask(client, host, port)), refresh=True)
                    await trio.sleep(every_s)
        finally:
            client.close()

    return run_to_exit_code(run) or EXIT_DONE
