"""The router's HTTP side beside uvicorn with aiohttp: python -m benchmarks.router_speed [--peer-python PYTHON]

Backends are stubs (router_processes.py), everything is on loopback, each part is a process. CPU is the router's process
alone, by its own count. Chunks are relayed at 20 ms each; requests are of 1 KiB with 32 chunks that come at once, over
32 connections; added time to first token is at 100 requests/s, half of them past the router, drawn one by one, so that
both halves see the same machine. Each figure is the median of the rounds, with the least and the most in brackets.

The peer needs uvicorn, uvloop, httptools, starlette and aiohttp in PYTHON's environment, and is left out without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.runtime.support.tied import tied

HERE = Path(__file__).resolve().parent
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
    head = "POST /v1/completions HTTP/1.1\r\nhost: stub\r\nx-request-id: r1\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def cpu_ns(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /cpu HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return int(answer.rpartition(b"\r\n\r\n")[2])


async def ask_all(port: int, count: int, times: int, asked: bytes) -> list[Client]:
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(lambda: Client(asked, times), "127.0.0.1", port))[1] for _ in range(count)]
    await asyncio.gather(*(client.done for client in clients))
    return clients


async def chunk_cost(port: int, streams: int, chunks: int) -> dict[str, float]:
    """Microseconds of CPU per relayed chunk, and its transit from the engine to the client."""
    before = await cpu_ns(port)
    clients = await ask_all(port, streams, 1, request(chunks, 20))
    used = await cpu_ns(port) - before
    transits = sorted(ns for client in clients for ns in client.transits_ns)
    assert sum(client.chunks for client in clients) == streams * chunks
    return {
        f"CPU us/chunk, {streams} streams": used / 1e3 / (streams * chunks),
        f"chunk transit p50 ms, {streams} streams": quantile(transits, 0.5) / 1e6,
        f"chunk transit p99 ms, {streams} streams": quantile(transits, 0.99) / 1e6,
    }


async def request_cost(port: int, times: int, legs: str) -> dict[str, float]:
    """Microseconds of CPU per request, and requests per second with the generator on the same cores."""
    before, began = await cpu_ns(port), time.monotonic()
    await ask_all(port, 32, times, request(32, 0))
    took = time.monotonic() - began
    used = await cpu_ns(port) - before
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


@contextlib.contextmanager
def process(*command: str) -> Iterator[int]:
    """Its port, while it runs, and no longer than we do."""
    with subprocess.Popen(tied(*command), stdout=subprocess.PIPE, text=True, cwd=HERE.parent) as running:
        assert running.stdout
        try:
            yield int(running.stdout.readline())
        finally:
            running.terminate()


async def measured(command: Sequence[str], engine: int, load: Load) -> dict[str, float]:
    """One round of one router: one leg, then two."""
    figures: dict[str, float] = {}
    with process(*command, str(engine)) as router:
        await ask_all(router, 32, 2, request(32, 0))  # connections and caches are warm
        for streams in load.streams:
            figures |= await chunk_cost(router, streams, load.chunks)
        figures |= await request_cost(router, load.times, "one leg")
        figures |= await first_tokens(engine, router, load.seconds, "one leg")
    with process(*command, str(engine), "--pd") as router:
        await ask_all(router, 32, 2, request(32, 0))
        figures |= await request_cost(router, load.times, "P and D")
        figures |= await first_tokens(engine, router, load.seconds, "P and D")
    return figures


def available(python: str) -> bool:
    imports = "import aiohttp, httptools, starlette, uvicorn, uvloop"
    return subprocess.run([python, "-c", imports], check=False, capture_output=True).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a third of the work")
    args = parser.parse_args()
    routers = {"pdflow": (sys.executable, str(HERE / "router_processes.py"), "router")}
    if available(args.peer_python):
        routers["uvicorn+aiohttp"] = (args.peer_python, str(HERE / "router_peer.py"))
    else:
        print("no peer: pip install uvicorn uvloop httptools starlette aiohttp, or name a --peer-python that has them")
    load = Load(chunks=50, times=30, seconds=3) if args.quick else Load()
    busy = os.getloadavg()[0]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in routers}
    with process(sys.executable, str(HERE / "router_processes.py"), "engine") as engine:
        for _ in range(args.rounds):
            for name, command in routers.items():
                rounds[name].append(asyncio.run(measured(command, engine, load)))
    print(f"load average {busy:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} processors")
    print(f"{'':40}" + "".join(f"{name:>28}" for name in routers))
    for figure in rounds["pdflow"][0]:
        values = ([results[figure] for results in rounds[name]] for name in routers)
        shown = (f"{statistics.median(seen):9.2f} [{min(seen):7.2f} ..{max(seen):8.2f}]" for seen in values)
        print(f"{figure:40}" + "".join(f"{text:>28}" for text in shown))


if __name__ == "__main__":
    main()
