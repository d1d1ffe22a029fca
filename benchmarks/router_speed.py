"""pdflow's router compared with vllm-router and smg: python -m benchmarks.router_speed [--peers DIR]

Engines are stubs (router_stub.py), everything is on loopback, each router is one process (router_processes.py), which
chooses among two engines of each kind, and among two P and two D. CPU is that of all its processes, user and system.
Chunks are relayed at 20 ms each; requests are of 1 KiB with 32 chunks that come at once, over 32 connections; added
time to first token is at 100 requests/s, half of them past the router, drawn one by one, so that both halves see the
same machine. Routers take turns in each round; each figure is the median of the rounds, with the least and the most in
brackets. At the end: requests/s with one and two processes of pdflow's router in front of the same engines, where
clients choose between the two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.router_processes import BOTH_LEGS, INSTALL, ONE_LEG, PDFLOW, PEERS, Running, engines, router

LEGS = {"one leg": ONE_LEG, "P and D": BOTH_LEGS}
END = b"0\r\n\r\n"
AT = b'"at":'


class Load(NamedTuple):
    """How much is measured in one round."""

    streams: tuple[int, ...] = (32, 128)
    chunks: int = 150
    """Of each stream, 20 ms apart."""
    times: int = 100
    """Requests of each of 32 connections."""
    seconds: float = 10
    """Of arrivals, for times to first token."""


class Client(asyncio.Protocol):
    """A connection that asks again and again; `firsts` are times to first chunk, `transits` those of each chunk."""

    def __init__(self, request: bytes, times: int) -> None:
        self.request = request
        self.left = times
        self.firsts_ns: list[int] = []
        self.transits_ns: list[int] = []
        self.chunks = 0
        self.tail = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.first = True
        self.asked_ns = time.monotonic_ns()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        marks = data.split(AT)[1:]
        if self.first and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(f"the router refused a request: {data.decode()}"))
            self.transport.abort()
            return
        if self.first and marks:
            self.first = False
            self.firsts_ns.append(now - self.asked_ns)
        self.chunks += len(marks)
        for mark in marks:
            sent, found, _ = mark.partition(b"}")
            if found:  # else cut in two: its transit is not counted
                self.transits_ns.append(now - int(sent))
        self.tail = (self.tail + data)[-len(END) :]
        if self.tail == END:
            self.tail = b""
            self.left -= 1
            if self.left:
                self.ask()
            else:
                self.transport.close()
                self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("closed early"))


def request(chunks: int, pace_ms: float) -> bytes:
    fields = {"model": "stub", "prompt": "x" * 900, "max_tokens": chunks, "stream": True, "pace_ms": pace_ms}
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-request-id: r1\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def ask_all(ports: Sequence[int], count: int, times: int, asked: bytes) -> list[Client]:
    """Ask over so many connections, in turn to these ports."""
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    for number in range(count):
        port = ports[number % len(ports)]
        clients.append((await loop.create_connection(lambda: Client(asked, times), "127.0.0.1", port))[1])
    await asyncio.gather(*(client.done for client in clients))
    return clients


async def chunk_cost(running: Running, streams: int, chunks: int, legs: str) -> dict[str, float]:
    """Microseconds of CPU per relayed chunk, requests included, and its transit from the engine to the client."""
    before = running.cpu_ns()
    clients = await ask_all([running.port], streams, 1, request(chunks, 20))
    used = running.cpu_ns() - before
    transits = sorted(ns for client in clients for ns in client.transits_ns)
    assert sum(client.chunks for client in clients) == streams * chunks
    return {
        f"CPU us/chunk, {streams} streams, {legs}": used / 1e3 / (streams * chunks),
        f"chunk transit p50 ms, {streams} streams, {legs}": quantile(transits, 0.5) / 1e6,
        f"chunk transit p99 ms, {streams} streams, {legs}": quantile(transits, 0.99) / 1e6,
    }


async def request_cost(routers: Sequence[Running], times: int, legs: str) -> dict[str, float]:
    """Microseconds of CPU per request, and requests per second with the generator on the same cores."""
    before, began = sum(running.cpu_ns() for running in routers), time.monotonic()
    await ask_all([running.port for running in routers], 32, times, request(32, 0))
    took = time.monotonic() - began
    used = sum(running.cpu_ns() for running in routers) - before
    return {f"CPU us/request, {legs}": used / 1e3 / (32 * times), f"requests/s, {legs}": 32 * times / took}


async def first_tokens(engine: int, router: int, seconds: float, legs: str) -> dict[str, float]:
    """What the router adds to the time to the first token, at 100 requests/s; median and p99 of each half."""
    loop = asyncio.get_running_loop()
    rng = random.Random(1)
    asked = request(16, 10)
    at = loop.time()
    until = at + seconds
    halves: dict[int, list[Client]] = {engine: [], router: []}
    opening: list[asyncio.Task[None]] = []

    async def one(port: int) -> None:
        client = (await loop.create_connection(lambda: Client(asked, 1), "127.0.0.1", port))[1]
        halves[port].append(client)
        await client.done

    while at < until:
        await asyncio.sleep(at - loop.time())
        opening.append(asyncio.create_task(one(rng.choice((engine, router)))))
        at += rng.expovariate(100)
    await asyncio.gather(*opening)
    direct, through = (sorted(client.firsts_ns[0] for client in halves[port]) for port in (engine, router))
    return {
        f"added TTFT p50 ms, {legs}": (quantile(through, 0.5) - quantile(direct, 0.5)) / 1e6,
        f"added TTFT p99 ms, {legs}": (quantile(through, 0.99) - quantile(direct, 0.99)) / 1e6,
    }


def quantile(ordered: Sequence[int], q: float) -> int:
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


async def measured(name: str, ports: dict[str, int], load: Load, peers: Path | None = None) -> dict[str, float]:
    """One round of one router: one leg, then two."""
    figures: dict[str, float] = {}
    for legs, roles in LEGS.items():
        with router(name, ports, roles, peers) as running:
            await ask_all([running.port], 32, 2, request(32, 0))  # connections and caches are warm
            for streams in load.streams:
                figures |= await chunk_cost(running, streams, load.chunks, legs)
            figures |= await request_cost([running], load.times, legs)
            figures |= await first_tokens(ports[f"{roles[-1]}-0"], running.port, load.seconds, legs)
    return figures


async def measured_together(count: int, ports: dict[str, int], load: Load) -> dict[str, float]:
    """One round of so many of pdflow's routers in front of the same engines."""
    figures: dict[str, float] = {}
    for legs, roles in LEGS.items():
        with ExitStack() as stack:
            routers = [stack.enter_context(router(PDFLOW, ports, roles)) for _ in range(count)]
            await ask_all([running.port for running in routers], 32, 2, request(32, 0))
            figures |= await request_cost(routers, load.times, legs)
    return figures


def show(rounds: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'':44}" + "".join(f"{name:>28}" for name in rounds))
    for figure in next(iter(rounds.values()))[0]:
        values = ([results[figure] for results in of_one] for of_one in rounds.values())
        shown = (f"{statistics.median(seen):9.2f} [{min(seen):7.2f} ..{max(seen):8.2f}]" for seen in values)
        print(f"{figure:44}" + "".join(f"{text:>28}" for text in shown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="a virtual environment with the peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a third of the work")
    args = parser.parse_args()
    folders: dict[str, Path | None] = {PDFLOW: None}
    for name, version in PEERS.items():
        if args.peers is not None and (args.peers / "bin" / name).is_file():
            folders[name] = args.peers
        else:
            print(f"{name} {version} is left out: {INSTALL}")
    load = Load(chunks=50, times=30, seconds=3) if args.quick else Load()
    busy = os.getloadavg()[0]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    together: dict[str, list[dict[str, float]]] = {"one process": [], "two processes": []}
    with engines() as ports:
        for _ in range(args.rounds):
            for name, folder in folders.items():
                rounds[name].append(asyncio.run(measured(name, ports, load, folder)))
            for count, results in enumerate(together.values(), 1):
                results.append(asyncio.run(measured_together(count, ports, load)))
    print(f"load average {busy:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} processors")
    show(rounds)
    show(together)


if __name__ == "__main__":
    main()
