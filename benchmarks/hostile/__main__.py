"""A cluster under hostile clients: python -m benchmarks.hostile [--seconds N] [--minutes N] [--sockets N]
[--scenario FILE] [--set KEY=VALUE]

A whole cluster (`pdflow serve`, by default the quickstart) answers two honest clients, on a new connection for each
request, in turn alone and during an attack:

- long prompts, again and again: three clients with prompts of 4 MB, one with 15 MB, one with a prompt that is too long
  but not refused for its bytes;
- small values: two clients with bodies of 4 MB of empty lists, objects, floats, fields, token ids, and of what is just
  allowed;
- malformed requests: chunks of 2^64 - 1 bytes, no Host, two of them, HTTP/1.0 with chunks, `Upgrade: h2c` with a body;
- pipelined bodies: 64 clients that read nothing of long answers, and send 8 MB of further requests;
- unread answers: 256 clients that read nothing;
- slow sockets: a process opens so many, sends a byte of a request every few seconds on each, and opens those anew that
  the router closes, at most 200 a second; /health is asked meanwhile.

Printed are the times of honest requests and their ratio to those without an attack, what the attackers got, and the
router's resident memory before, at most and after. The attackers are processes of their own on the cluster's machine.

With --minutes, all attacks run at once for that long, with a line of figures every ten seconds.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from benchmarks.hostile.attacks import ATTACKS
from pdflow_runtime.http.errors import UpstreamError
from tests.runtime.support.served import Served, served

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples/serve-quickstart.toml"
ROUTER = "pdflow_runtime.router.front"
HONEST = {"prompt": "A prefill engine computes", "max_tokens": 8}
HONEST_CLIENTS = 2
ROUNDS = 3
RESERVE = 64
"""File descriptors of the slow process that are no slow socket."""
SETTLE_S = 15.0
ALONE_S = 20.0
"""Before and after the attacks of --minutes."""
SAMPLE_S = 10.0


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
        return 1e3 * statistics.median(self.times or [math.nan])

    @property
    def p95_ms(self) -> float:
        return 1e3 * sorted(self.times)[int(0.95 * len(self.times))] if self.times else math.nan


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
        """Compare each attack with the time without it."""
        await self.measure(5, Measured())
        before = self.rss_mb()
        for what in ATTACKS:
            await self.compare(what, "attacks", what)
        await self.compare("slow sockets", "slow_sockets", str(sockets))
        await trio.sleep(SETTLE_S)
        self.show_memory(before)

    async def run_mixed(self, sockets: int, minutes: float) -> None:
        """Run all attacks at once for so many minutes."""
        await self.measure(5, Measured())
        alone, attacked, after = Measured(), Measured(), Measured()
        await self.measure(ALONE_S, alone)
        before = self.rss_mb()
        lines: list[str] = []
        async with self.attack(lines, "slow_sockets", str(sockets)), self.attack(lines, "attacks", *ATTACKS):
            end_s = trio.current_time() + 60 * minutes
            while (left_s := end_s - trio.current_time()) > 0:
                answered = len(attacked.times)
                await self.measure(min(SAMPLE_S, left_s), attacked)
                sys.stdout.write(
                    f"{60 * minutes - left_s:5.0f} s: {self.rss_mb():.0f} MB, "
                    f"{len(attacked.times) - answered} honest requests\n"
                )
                sys.stdout.flush()
        self.show("before     ", alone, alone)
        self.show("all attacks", attacked, alone)
        self.show_lines(lines)
        await trio.sleep(SETTLE_S)
        self.show_memory(before)
        await self.measure(ALONE_S, after)
        self.show("after      ", after, alone)
        self.show_memory(before)

    def show_memory(self, before: float) -> None:
        after = self.rss_mb()
        sys.stdout.write(
            f"router's resident memory: {before:.0f} MB before, {self.peak_mb:.0f} MB at most, {after:.0f} MB after "
            f"({after / before:.2f} times)\n"
        )

    async def compare(self, what: str, module: str, *arguments: str) -> None:
        """Measure in turn without and with the attack: what else the machine does changes from minute to minute."""
        alone, attacked = Measured(), Measured()
        for _ in range(ROUNDS):
            lines: list[str] = []
            await self.measure(self.seconds, alone)
            async with self.attack(lines, module, *arguments):
                await self.measure(self.seconds, attacked)
        self.show(f"{what}: without ", alone, alone)
        self.show(f"{what}: with    ", attacked, alone)
        self.show_lines(lines)

    @asynccontextmanager
    async def attack(self, lines: list[str], module: str, *arguments: str) -> AsyncIterator[None]:
        """Run that module of attacks, which ends with its stdin; what it says is added to `lines`."""
        at = f"{self.cluster.host}:{self.cluster.port}"
        command = [sys.executable, "-m", f"benchmarks.hostile.{module}", at, *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                lines.append((await trio.to_thread.run_sync(process.stdout.readline)).strip())
                yield
                process.stdin.close()
                lines += (await trio.to_thread.run_sync(process.stdout.read)).splitlines()
            finally:
                process.kill()

    def show_lines(self, lines: list[str]) -> None:
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
            f"/health {len(found.health)} times, at most {1e3 * max(found.health, default=math.nan):.1f} ms; "
            f"the router used {100 * found.cpu_s / found.wall_s:.0f} % of a core\n"
        )


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.hostile", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each phase, of which there are 36")
    parser.add_argument("--minutes", type=float, help="run all attacks at once for so long instead")
    parser.add_argument("--sockets", type=int, default=10_000, help="slow sockets")
    parser.add_argument("--scenario", type=Path, default=QUICKSTART)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    asked = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sockets = min(asked.sockets, most - RESERVE)
    if sockets < asked.sockets:
        sys.stdout.write(f"{sockets:,} slow sockets instead of {asked.sockets:,}: ulimit -Hn is {most:,}\n")
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), asked.scenario, *asked.overrides) as cluster,
    ):
        hostile = Hostile(cluster, asked.seconds)
        if asked.minutes is None:
            trio.run(hostile.run, sockets)
        else:
            trio.run(hostile.run_mixed, sockets, asked.minutes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
