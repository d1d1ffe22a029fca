"""The command `pdflow top`: shows the state of a live cluster, drawn again and again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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
from pdflow_runtime.http.errors import OpenAIError, UpstreamError
from pdflow_runtime.observe.router_figures import Rates, RouterFigures, rates
from pdflow_runtime.process.processes import run_to_exit_code
from pdflow_runtime.process.reports import ROUTER
from pdflow_runtime.security.signed import operators_signer
from pdflow_runtime.security.tls import operators_client
from pdflow_runtime.tls_socket import client_context

STATE: Final = "/admin/state"
ONCE_S: Final = 1.0
"""The most time over which rates are shown, if only once."""
OLDEST: Final = 8
"""Requests that are named."""


class NoClusterError(PdflowError):
    """No router of pdflow answers at this address."""

    exit_code = EXIT_BAD_INPUT


def view(state: dict[str, Any], since: Rates | None = None) -> Group:
    """Return the router's line, a table of the engines, and below it the requests that have been there for the longest.
    Args: `since`: what happened since the state before."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    staging_column = ("beside",) if any(engine and engine.get("beside") for engine in state["engines"].values()) else ()
    for name in ("engine", "blocks", "used", "quar.", *staging_column, "wait", "load", "run", "open", "links", "steps"):
        is_name = name == "engine"
        table.add_column(name, justify="left" if is_name else "right", no_wrap=True)
    oldest: list[tuple[float, str, str, str]] = []
    for name, engine in state["engines"].items():
        label = f"{name} (drained)" if name in state["drained"] else name
        label = f"{name} (silent)" if name in state["silent"] else label
        label = f"{name} (stalled)" if name in state["stalled"] else label
        if engine is None:
            table.add_row(Text(label, "red"), "no answer")
            continue
        if not engine.get("backing", {"up": True})["up"]:
            label += " (store server down)"
        used = engine["blocks"] - engine["free"]
        table.add_row(
            label,
            short(engine["blocks"]),
            f"{used / engine['blocks']:.0%}",
            short(engine["quarantined"]),
            *(room(engine.get("beside")) for _ in staging_column),
            *(short(engine[key]) for key in ("waiting", "loading", "running", "open", "links", "steps")),
        )
        oldest += [(request["age_s"], name, request["state"], request["request_id"]) for request in engine["requests"]]
    requests = Table(box=None, pad_edge=False)
    for name in ("oldest requests", "at", "state"):
        requests.add_column(name, no_wrap=True)
    requests.add_column("age", justify="right")
    for age_s, name, phase, request_id in sorted(oldest, reverse=True)[:OLDEST]:
        requests.add_row(request_id, name, phase, f"{age_s:.1f} s")
    head = Text("\n".join(router_lines(state["open"], since)))
    return Group(head, Text(), table, Text(), requests) if oldest else Group(head, Text(), table)


def router_lines(open_requests: int, since: Rates | None) -> list[str]:
    """Return what the router does, in lines of at most 80 characters."""
    lines = [f"{open_requests:,} requests open at the router"]
    if since is not None:
        lines[0] += f"; CPU {since.cpu:.0%} of a core"
        failed = f" ({since.failed_per_s:,.1f} failed/s)" if since.failed_per_s else ""
        lines.append(f"{since.requests_per_s:,.1f} requests/s{failed}, {since.tokens_per_s:,.0f} tokens/s")
        if since.ttft_p50_ms is not None and since.ttft_p95_ms is not None:
            lines.append(f"TTFT of streams: {since.ttft_p50_ms:,.0f} ms median, {since.ttft_p95_ms:,.0f} ms p95")
    return lines


def rates_of(before: dict[str, Any], after: dict[str, Any]) -> Rates | None:
    """Return what happened between two states; None if one is of a router that does not report it."""
    if "router" not in before or "router" not in after:
        return None
    return rates(*(msgspec.convert(state["router"], RouterFigures) for state in (before, after)))


def short(count: int) -> str:
    """Return the count in at most four characters."""
    if count < 10_000:
        return str(count)
    unit, name = next((unit, name) for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")) if count >= unit)
    return f"{count / unit:.1f}{name}" if count < 9.95 * unit else f"{count // unit}{name}"


def room(staging: dict[str, Any] | None) -> str:
    """Return how much of an engine's staging memory is used, and how many requests wait for some."""
    if staging is None:
        return ""
    waiting = f" +{short(staging['waiting'])}" if staging["waiting"] else ""
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
    refusal = OpenAIError.from_response(response.status, answer)
    problem = f"HTTP {response.status}" if refusal is None else f"HTTP {response.status}: {refusal}"
    secret = "; set PDFLOW_SECRET to the cluster's secret" if response.status == 401 else ""
    raise NoClusterError(f"{host}:{port} is not a pdflow router, or rejects this request: {problem}{secret}")


def client_of(tls: bool, files: Sequence[Path]) -> HttpClient:
    """Return the client of a router, with the certificate in these files, if there are any. NoClusterError if they
    cannot be used."""
    if not files:
        return HttpClient(tls=client_context() if tls else None)
    try:
        return operators_client(*files)
    except OSError as error:
        raise NoClusterError(f"{', '.join(map(str, files))}: {error}") from None


def main(url: str, every_s: float, once: bool, files: Sequence[Path] = ()) -> int:
    """Run the command; return the exit code. Args: `files`: of this side's certificate, its key, and the authority of
    the cluster; empty where the router asks for no certificate."""
    split_url = urlsplit(url if "//" in url else f"{'https' if files else 'http'}://{url}")
    tls = split_url.scheme == "https"
    host, port = split_url.hostname or "127.0.0.1", split_url.port or (443 if tls else 80)

    async def run() -> None:
        client = client_of(tls, files)
        try:
            console = Console(highlight=False)
            before = await ask(client, host, port)
            if once:
                await trio.sleep(min(every_s, ONCE_S))
                state = await ask(client, host, port)
                console.print(view(state, rates_of(before, state)))
                return
            with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
                live.update(view(before), refresh=True)
                while True:
                    await trio.sleep(every_s)
                    state = await ask(client, host, port)
                    live.update(view(state, rates_of(before, state)), refresh=True)
                    before = state
        finally:
            client.close()

    return run_to_exit_code(run) or EXIT_DONE
