"""Whether anything grows: python -m benchmarks.soak [--minutes N | --hours N] [--load SHARE] [--method NAME]
[--transport NAME] [--csv FILE]

A whole cluster (`pdflow serve`, tiny model) serves prompts of which no two are alike at a share of what it can (which a
short run finds out first); one client in ten hangs up. Every second it is noted of every process: resident memory, and
what of it is neither a file's nor shared; file descriptors, shared memory, and of every engine the requests that are
open in it. After the first minutes, the slope of each must have 0 within its 95 % interval.

Before all that comes a burst of more at once than will be: an engine keeps the memory that its largest step has needed
(runtime/pdflow_runtime/engines/malloc.py), and that a larger one comes by chance in the second half is no leak.

What is noted one second hangs on what was noted the second before. So the time is cut into 20 blocks, each long against
that, and the line goes through the means of the blocks. What only ever has one value has the slope 0.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import trio

from pdflow_runtime.http.errors import UpstreamError
from tests.runtime.support.served import Served, served

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples/serve-quickstart.toml"
ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
ROUTER = "pdflow_runtime.router.front"
CONCURRENCY = 16
CAPACITY_S = 20
BURST = 64
"""Clients, each of whom asks again at once, for as long as the capacity is looked for."""
WARM_MINUTES = 5.0
"""Or a third of the run."""
BLOCKS = 20
T_95 = 2.101
"""Student's t for 18 degrees of freedom, two-sided."""
POOL_TOKENS = 8192
"""So few that each block has been used, and its memory touched, before anything is judged."""


class Sample(NamedTuple):
    at_s: float
    process: str
    rss_mb: float
    own_mb: float
    fds: int
    shm_mb: float
    open: int
    """Requests; -1 where nobody says."""


MEASURES = ("rss_mb", "own_mb", "fds", "shm_mb", "open")


class Soak:
    def __init__(self, cluster: Served, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.pids = {name: cluster.pid_of(name) for name in ENGINES} | {
            "router": cluster.pid_of(ROUTER),
            "supervisor": cluster.process.pid,
        }
        self.samples: list[Sample] = []
        self.answered = self.failed = self.hung_up = 0

    async def run(self, seconds: float, load: float) -> None:
        capacity = await self.capacity()
        rate = load * capacity
        sys.stdout.write(
            f"{capacity:.1f} requests per second at most; {rate:.1f} are sent, for {seconds / 60:.0f} min\n"
        )
        sys.stdout.flush()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.watch)
            async with trio.open_nursery() as clients:
                with trio.move_on_after(seconds):
                    while True:
                        await trio.sleep(self.random.expovariate(rate))
                        clients.start_soon(self.ask)
            nursery.cancel_scope.cancel()

    async def capacity(self) -> float:
        """Requests per second that are answered to some clients. Then comes the burst."""
        await self.crowd(CONCURRENCY)
        done = self.answered
        await self.crowd(BURST)
        self.answered = self.failed = self.hung_up = 0
        return done / CAPACITY_S

    async def crowd(self, clients: int) -> None:
        """So many, each of whom asks again at once."""

        async def client() -> None:
            while True:
                await self.ask(full_timeout=True)

        with trio.move_on_after(CAPACITY_S):
            async with trio.open_nursery() as nursery:
                for _ in range(clients):
                    nursery.start_soon(client)
        await trio.sleep(2)

    async def ask(self, full_timeout: bool = False) -> None:
        length = 1 + int(self.random.random() ** 2 * 600)
        tokens = [self.random.randrange(5, 505) for _ in range(length)]
        hang_up_after_s = 60.0 if full_timeout or self.random.random() > 0.1 else self.random.uniform(0, 0.3)
        status = 0
        with trio.move_on_after(hang_up_after_s) as scope:
            try:
                answer = await self.cluster.ask(
                    prompt=tokens, max_tokens=12, ignore_eos=True, stream=self.random.random() < 0.5
                )
                status = answer.status
            except (UpstreamError, AssertionError, msgspec.DecodeError):
                pass  # counted as failed
        if scope.cancelled_caught:
            self.hung_up += 1
        else:
            self.answered += status == 200
            self.failed += status != 200

    async def watch(self) -> None:
        begun = trio.current_time()
        while True:
            status, body = await self.cluster.exchange("GET", "/admin/state")
            engines = msgspec.json.decode(body)["engines"] if status == 200 else {}
            at = trio.current_time() - begun
            for name, pid in self.pids.items():
                state = engines.get(name)
                self.samples.append(Sample(at, name, *of_process(pid), -1 if state is None else state["open"]))
            await trio.sleep(1)


def of_process(pid: int) -> tuple[float, float, int, float]:
    """MB resident, and what of that is its own; file descriptors; MB of files of ours in shared memory."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    resident, own = (int(status[key].split()[0]) * 1024 / 1e6 for key in ("VmRSS", "RssAnon"))
    fds = len(os.listdir(folder / "fd"))
    shared = sum(file.stat().st_blocks * 512 for file in Path("/dev/shm").glob(f"pdflow-{pid}-*")) / 1e6
    return resident, own, fds, shared


class Line(NamedTuple):
    first: float
    last: float
    slope: float
    """Per hour."""
    margin: float


def line(at_s: list[float], values: list[float]) -> Line:
    """Through the means of blocks, with the 95 % margin of its slope."""
    hours = np.array([block.mean() for block in np.array_split(np.array(at_s), BLOCKS)]) / 3600
    means = np.array([block.mean() for block in np.array_split(np.array(values), BLOCKS)])
    off = hours - hours.mean()
    slope = float((off * (means - means.mean())).sum() / (off**2).sum())
    rest = means - means.mean() - slope * off
    margin = T_95 * float(np.sqrt((rest**2).sum() / (BLOCKS - 2) / (off**2).sum()))
    return Line(float(means[0]), float(means[-1]), slope, margin)


def report(soak: Soak, warm_s: float) -> bool:
    sys.stdout.write(
        f"{soak.answered:,} answered, {soak.failed} failed, {soak.hung_up:,} hung up\n"
        f"{'process':12}{'':8}{'first':>10}{'last':>10}{'per hour':>12}{'95 %':>24}\n"
    )
    flat = True
    for process in soak.pids:
        mine = [sample for sample in soak.samples if sample.process == process and sample.at_s >= warm_s]
        for measure in MEASURES:
            values: list[Any] = [getattr(sample, measure) for sample in mine]
            if measure == "open" and -1 in values:
                continue
            found = line([sample.at_s for sample in mine], values)
            good = abs(found.slope) <= found.margin or np.ptp(values) == 0
            flat &= bool(good)
            interval = f"{found.slope - found.margin:.2f} to {found.slope + found.margin:.2f}"
            sys.stdout.write(
                f"{process:12}{measure:8}{found.first:10.2f}{found.last:10.2f}{found.slope:12.2f}{interval:>24}"
                f"{'' if good else '  grows' if found.slope > 0 else '  falls'}\n"
            )
    return flat


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--hours", type=float, help="instead of minutes")
    parser.add_argument("--load", type=float, default=0.7, help="of what the cluster can")
    parser.add_argument("--method", default="nixl-push")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path, metavar="FILE")
    asked = parser.parse_args()
    minutes = asked.minutes if asked.hours is None else 60 * asked.hours
    overrides = (
        f"transfer.method={asked.method}",
        f"serve.transport={asked.transport}",
        f"pool.prefill.kv_tokens={POOL_TOKENS}",
        f"pool.decode.kv_tokens={POOL_TOKENS}",
    )
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), QUICKSTART, *overrides) as cluster:
        soak = Soak(cluster, asked.seed)
        trio.run(soak.run, 60 * minutes, asked.load)
    if asked.csv is not None:
        with asked.csv.open("w", newline="") as file:
            csv.writer(file).writerows((Sample._fields, *soak.samples))
    return 0 if report(soak, 60 * min(WARM_MINUTES, minutes / 3)) else 1


if __name__ == "__main__":
    sys.exit(main())
