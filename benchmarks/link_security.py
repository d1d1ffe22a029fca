"""What protecting the requests between router and engines costs the router: python -m benchmarks.link_security

The router is pdflow's, in front of stub engines (router_stub.py), all on loopback. Its requests are protected in one
of these variants, which take turns in each round:

    token          a token for each incarnation of an engine, as on one host
    signed         a signature for each request, as between hosts
    TLS            mutual TLS 1.3, without signatures
    TLS, signed    both
    Unix           Unix sockets, without signatures

Figures are the router's CPU, user and system: per chunk of 32 streams with 20 ms between chunks, and per request of
1 KiB with 32 chunks that come at once, over 32 connections; connections to engines are open already. Each line is
that of a variant: the ratio of its median to that of `token`, the median, the least and the most.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import trio
import trustme

from benchmarks.router_processes import PDFLOW, Launch, engines, router
from benchmarks.router_speed import LEGS, Load, ask_all, chunk_cost, request, request_cost
from pdflow_runtime.http import client
from pdflow_runtime.router import front
from pdflow_runtime.security.local_secret import new_secret
from pdflow_runtime.security.secret import VARIABLE
from pdflow_runtime.security.tls import KEYS
from tests.runtime.support.certificates import certify

STREAMS: Final = 32


class Variant(NamedTuple):
    """How the router is started, and the ports of the engines that it is in front of."""

    launch: Launch
    ports: dict[str, int]


@contextmanager
def variants() -> Iterator[dict[str, Variant]]:
    """Run engines for all variants."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certify(folder, trustme.CA())
        plain = stack.enter_context(engines())
        tls = stack.enter_context(engines("--tls", str(folder)))
        unix = stack.enter_context(engines("--unix", str(folder)))
        files = [f"serve.{key}={folder / key}" for key in KEYS]
        signed = {VARIABLE: new_secret()}
        over_unix = ("-m", "benchmarks.link_security", "--router-at", str(folder))
        yield {
            "token": Variant(Launch(), plain),
            "signed": Variant(Launch(environment=signed), plain),
            "TLS": Variant(Launch(overrides=files, environment={}), tls),
            "TLS, signed": Variant(Launch(overrides=files, environment=signed), tls),
            "Unix": Variant(Launch(over_unix, environment={}), unix),
        }


async def measured(variant: Variant, load: Load) -> dict[str, float]:
    """One round of one variant: one leg, then two."""
    figures: dict[str, float] = {}
    for legs, roles in LEGS.items():
        with router(PDFLOW, variant.ports, roles, launch=variant.launch) as running:
            await ask_all([running.port], STREAMS, 4, request(32, 0))  # connections and caches are warm
            figures |= await chunk_cost(running, STREAMS, load.chunks, legs)
            figures |= await request_cost([running], load.times, legs)
    return {name: value for name, value in figures.items() if name.startswith("CPU")}


def show(rounds: dict[str, list[dict[str, float]]]) -> None:
    first = next(iter(rounds.values()))
    for figure in first[0]:
        print(figure)
        base = statistics.median(results[figure] for results in first)
        for name, of_one in rounds.items():
            seen = [results[figure] for results in of_one]
            median = statistics.median(seen)
            print(f"    {name:12} {median / base:5.2f} {median:9.2f} [{min(seen):8.2f} ..{max(seen):8.2f}]")


def route_over_unix(folder: Path, arguments: list[str]) -> int:
    """Run a router that connects to the Unix socket of an engine in place of its port: the product cannot."""

    async def connect(_: str, port: int) -> socket.socket:
        sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        await sock.connect(str(folder / str(port)))
        return socket.socket(fileno=sock.detach())

    client.connect = connect  # type: ignore[attr-defined]
    return front.main(arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a third of the work")
    parser.add_argument("--router-at", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    asked, of_router = parser.parse_known_args()
    if asked.router_at is not None:
        return route_over_unix(asked.router_at, of_router)
    load = Load(chunks=50, times=30) if asked.quick else Load()
    busy = os.getloadavg()[0]
    with variants() as made:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in made}
        for _ in range(asked.rounds):
            for name, variant in made.items():
                rounds[name].append(asyncio.run(measured(variant, load)))
    print(f"load average {busy:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} processors")
    show(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
