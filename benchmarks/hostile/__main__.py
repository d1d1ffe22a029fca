"""A cluster under hostile clients: python -m benchmarks.hostile [--seconds N] [--sockets N] [--scenario FILE]
[--set KEY=VALUE]

A whole cluster (`pdflow serve`, by default the quickstart) answers two honest clients, on a new connection for each
request, in turn alone and during an attack:

- long prompts, again and again: three clients with prompts of 4 MB, one with 15 MB, one with a prompt that is too long
  but not refused for its bytes;
- malformed requests: chunks of 2^64 - 1 bytes, no Host, two of them, `Upgrade: h2c` with a body;
- slow sockets: a process opens so many, sends a byte of a request every few seconds on each, and opens those anew that
  the router closes, at most 200 a second; /health is asked meanwhile.

Printed are the times of honest requests and their ratio to those without an attack, what the attackers got in the last
round, and the router's resident memory before, at most and after. The attackers share the machine with the cluster.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import trio

from pdflow_runtime.http.errors import UpstreamError
from tests.runtime.support.served import Served, served

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples/serve-quickstart.toml"
ROUTER = "pdflow_runtime.router.front"
HONEST = {"prompt": "A prefill engine computes", "max_tokens": 8}
HONEST_CLIENTS = 2
ROUNDS = 3
REOPENED_PER_S = 200
BYTE_EVERY_S = 5.0
RESERVE = 64
"""File descriptors of the slow process that are no slow socket."""
SETTLE_S = 5.0
COUNTED = 16_500
"""Words of a prompt that is refused, but not for its bytes alone: of two bytes each, twice as many as the quickstart's
context has tokens."""
HEAD = b"POST /v1/completions HTTP/1.1\r\n"
CHUNKED = HEAD + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n"
PROMPT = msgspec.json.encode({**HONEST, "max_tokens": 1})
MALFORMED = {
    "chunk of 16 F's": CHUNKED + b"F" * 16 + b"\r\n",
    "chunk of 15 F's": CHUNKED + b"F" * 15 + b"\r\n",
    "size line without end": CHUNKED + b"1;" + b"e" * 8192,
    "no Host": HEAD + b"Content-Length: 0\r\n\r\n",
    "two Hosts": HEAD + b"Host: x\r\nHost: y\r\nContent-Length: 0\r\n\r\n",
    "Upgrade: h2c": HEAD
    + b"Host: x\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    + b"Content-Length: %d\r\n\r\n" % len(PROMPT)
    + PROMPT,
}


class Measured:
    """The times of honest requests, in seconds, and what did not succeed."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.health: list[float] = []
        self.failed: Counter[str] = Counter()
        self.cpu_s = self.wall_s = 0.0
        """Of the router."""

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.times)

    @property
    def p95_ms(self) -> float:
        return 1e3 * sorted(self.times)[int(0.95 * len(self.times))]


class Hostile:
    """Args: the cluster, and how long each phase lasts."""

    def __init__(self, cluster: Served, seconds: float) -> None:
        self.cluster = cluster
        self.seconds = seconds
        self.router = cluster.pid_of(ROUTER)
        self.peak_mb = 0.0

    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self.router}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6

    def cpu_s(self) -> float:
        """Return the CPU time of the router so far."""
        fields = Path(f"/proc/{self.router}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def run(self, sockets: int) -> None:
        self.sockets = sockets
        await self.measure(5, Measured())
        before = self.rss_mb()
        await self.compare("long prompts", self.long_prompts)
        await self.compare("malformed requests", self.malformed)
        await self.compare("slow sockets", self.slow_sockets)
        await trio.sleep(SETTLE_S)
        after = self.rss_mb()
        sys.stdout.write(
            f"router's resident memory: {before:.0f} MB before, {self.peak_mb:.0f} MB at most, {after:.0f} MB after "
            f"({after / before:.2f} times)\n"
        )

    async def compare(self, what: str, attack: Callable[[Measured], Awaitable[list[str]]]) -> None:
        """Measure in turn without and with the attack: what else the machine does changes from minute to minute."""
        alone, attacked = Measured(), Measured()
        for _ in range(ROUNDS):
            await self.measure(self.seconds, alone)
            lines = await attack(attacked)
        self.show(f"{what}: without ", alone, alone)
        self.show(f"{what}: with    ", attacked, alone)
        sys.stdout.writelines(f"  {line}\n" for line in lines)
        sys.stdout.flush()

    async def measure(self, seconds: float, found: Measured) -> None:
        cpu_s, begun = self.cpu_s(), time.perf_counter()
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for _ in range(HONEST_CLIENTS):
                    nursery.start_soon(self._honest, found)
                nursery.start_soon(self._health, found)
                nursery.start_soon(self._watch_memory)
        found.cpu_s += self.cpu_s() - cpu_s
        found.wall_s += time.perf_counter() - begun

    async def _honest(self, found: Measured) -> None:
        while True:
            begun = time.perf_counter()
            try:
                answer = await self.cluster.ask(**HONEST)
            except UpstreamError as error:
                found.failed[error.kind] += 1
                continue
            if answer.status == 200:
                found.times.append(time.perf_counter() - begun)
            else:
                found.failed[str(answer.status)] += 1

    async def _health(self, found: Measured) -> None:
        while True:
            await trio.sleep(0.5)
            begun = time.perf_counter()
            try:
                status, _ = await self.cluster.exchange("GET", "/health")
            except UpstreamError as error:
                found.failed[f"/health {error.kind}"] += 1
                continue
            found.health.append(time.perf_counter() - begun)
            if status != 200:
                found.failed[f"/health {status}"] += 1

    async def _watch_memory(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, self.rss_mb())
            await trio.sleep(0.1)

    def show(self, what: str, found: Measured, alone: Measured) -> None:
        ratio = found.median_ms / alone.median_ms, found.p95_ms / alone.p95_ms
        failed = ", ".join(f"{count} x {name}" for name, count in sorted(found.failed.items())) or "none"
        sys.stdout.write(
            f"{what} {len(found.times)} honest requests, median {found.median_ms:.1f} ms ({ratio[0]:.2f} times), "
            f"95 % within {found.p95_ms:.1f} ms ({ratio[1]:.2f} times); failed: {failed}; "
            f"/health {len(found.health)} times, at most {1e3 * max(found.health):.1f} ms; "
            f"the router used {100 * found.cpu_s / found.wall_s:.0f} % of a core\n"
        )

    async def long_prompts(self, found: Measured) -> list[str]:
        bodies = {
            "4 MB": msgspec.json.encode({"prompt": "a " * 1_999_000, "max_tokens": 1}),
            "15 MB": msgspec.json.encode({"prompt": "a " * 7_500_000, "max_tokens": 1}),
            "33 kB": msgspec.json.encode({"prompt": "a " * COUNTED, "max_tokens": 1}),
        }
        statuses: Counter[str] = Counter()
        times: dict[str, list[float]] = {name: [] for name in bodies}

        async def attack(name: str) -> None:
            while True:
                begun = time.perf_counter()
                try:
                    status, _ = await self.cluster.exchange("POST", "/v1/completions", bodies[name])
                except UpstreamError as error:
                    statuses[f"{name}: {error.kind}"] += 1
                    continue
                times[name].append(time.perf_counter() - begun)
                statuses[f"{name}: {status}"] += 1

        async with trio.open_nursery() as nursery:
            four, *others = bodies
            for name in (four, four, four, *others):
                nursery.start_soon(attack, name)
            await self.measure(self.seconds, found)
            nursery.cancel_scope.cancel()
        lines = [f"{name}, {count} times" for name, count in sorted(statuses.items())]
        return lines + [
            f"{name}: answered within {1e3 * max(of_one):.0f} ms" for name, of_one in times.items() if of_one
        ]

    async def malformed(self, found: Measured) -> list[str]:
        statuses: Counter[str] = Counter()
        slowest = 0.0

        async def attack() -> None:
            nonlocal slowest
            while True:
                for name, data in MALFORMED.items():
                    begun = time.perf_counter()
                    answer = b""
                    with suppress(OSError, trio.BrokenResourceError):
                        async with await trio.open_tcp_stream(self.cluster.host, self.cluster.port) as stream:
                            await stream.send_all(data)
                            answer = await stream.receive_some()
                    slowest = max(slowest, time.perf_counter() - begun)
                    statuses[f"{name}: {answer[9:12].decode() or 'closed'}"] += 1
                    await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attack)
            await self.measure(self.seconds, found)
            nursery.cancel_scope.cancel()
        lines = [f"{name}, {count} times" for name, count in sorted(statuses.items())]
        return [*lines, f"answered within {1e3 * slowest:.0f} ms"]

    async def slow_sockets(self, found: Measured) -> list[str]:
        command = [sys.executable, "-m", "benchmarks.hostile", "--sockets", str(self.sockets)]
        command += ["--attack", f"{self.cluster.host}:{self.cluster.port}"]
        with subprocess.Popen(
            [*command, "--sockets", str(self.sockets)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                opened = await trio.to_thread.run_sync(process.stdout.readline)
                await self.measure(self.seconds, found)
                process.stdin.close()
                ended = await trio.to_thread.run_sync(process.stdout.readline)
            finally:
                process.kill()
        return [opened.strip(), ended.strip()]


class SlowSockets:
    """Opens sockets, and sends on each a byte of a request every few seconds."""

    def __init__(self, host: str, port: int, most: int) -> None:
        self.address = host, port
        self.most = most
        self.open: dict[int, socket.socket] = {}
        self.poll = select.epoll()
        self.opened = self.closed = 0

    def add(self) -> None:
        sock = socket.socket()
        try:
            sock.connect(self.address)
            sock.setblocking(False)
            sock.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        except OSError:
            sock.close()
            self.closed += 1
            return
        self.open[sock.fileno()] = sock
        self.poll.register(sock.fileno(), select.EPOLLIN | select.EPOLLHUP)
        self.opened += 1

    def reap(self, wait_s: float) -> None:
        """Close what the server has closed."""
        for fd, _ in self.poll.poll(wait_s):
            self.drop(fd)

    def drop(self, fd: int) -> None:
        sock = self.open.pop(fd, None)
        if sock is not None:
            self.poll.unregister(fd)
            sock.close()
            self.closed += 1

    def run(self) -> None:
        while self.opened < self.most:
            self.add()
            self.reap(0)
        sys.stdout.write(f"{self.opened:,} slow sockets were opened; {len(self.open):,} of them are open at once\n")
        sys.stdout.flush()
        step_s = 0.05
        while not select.select([sys.stdin], [], [], 0)[0]:
            for fd in random.sample(list(self.open), int(len(self.open) * step_s / BYTE_EVERY_S)):
                try:
                    self.open[fd].send(b"s")
                except OSError:
                    self.drop(fd)
            for _ in range(min(int(REOPENED_PER_S * step_s), self.most - len(self.open))):
                self.add()
            self.reap(0)
            time.sleep(step_s)
        sys.stdout.write(f"{self.opened:,} slow sockets in all, {self.closed:,} of them closed by the router\n")


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.hostile", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each phase, of which there are 18")
    parser.add_argument("--sockets", type=int, default=10_000, help="slow sockets")
    parser.add_argument("--scenario", type=Path, default=QUICKSTART)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--attack", metavar="HOST:PORT", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sockets = min(asked.sockets, most - RESERVE)
    if asked.attack:
        host, _, port = asked.attack.rpartition(":")
        SlowSockets(host, int(port), sockets).run()
        return 0
    if sockets < asked.sockets:
        sys.stdout.write(f"{sockets:,} slow sockets instead of {asked.sockets:,}: ulimit -Hn is {most:,}\n")
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), asked.scenario, *asked.overrides) as cluster,
    ):
        trio.run(Hostile(cluster, asked.seconds).run, sockets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
