"""Whether anything grows: python -m benchmarks.soak [--minutes N | --hours N] [--load SHARE] [--method NAME]
[--transport NAME] [--csv FILE]

A whole cluster (`pdflow serve`, tiny model) serves prompts of which no two are alike at a share of what it can (which a
short run finds out first); one client in ten hangs up. Every second it is noted of every process: resident memory, and
what of it is neither a file's nor shared; file descriptors, shared memory, and of every engine the requests that are
open in it. Two things are judged:

- What is there when nothing is open, before the load and after it: as many file descriptors and as much shared memory,
  and 0 open requests. Sockets are counted by themselves: connections stay for the next request for a while, so after
  the load there may be one more for each request that was open at once.
- After the first minutes, the slope of each must have 0 within its 95 % interval, for as many requests as were open at
  the time. How many are open at a rate depends on how fast the machine is meanwhile, and everything else depends on
  that: so their own slope is shown and not judged. Requests that stay open are found by the first test.

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
T_95 = 2.110
"""Student's t for 17 degrees of freedom, two-sided."""
QUIET_S = 60.0
"""Time for requests that were hung up on to end."""
POOL_TOKENS = 8192
"""So few that each block has been used, and its memory touched, before anything is judged."""


class Sample(NamedTuple):
    at_s: float
    process: str
    rss_mb: float
    own_mb: float
    fds: int
    """But for sockets."""
    sockets: int
    shm_mb: float
    open: int
    """Requests; -1 where nobody says."""


MEASURES = ("rss_mb", "own_mb", "fds", "sockets", "shm_mb", "open")
JUDGED = ("rss_mb", "own_mb", "fds", "shm_mb")
"""By their slopes."""


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
        self.idle: list[dict[str, Sample]] = []
        """Each process when nothing is open: before the load, and after it."""

    async def run(self, seconds: float, load: float) -> None:
        capacity = await self.capacity()
        rate = load * capacity
        sys.stdout.write(
            f"{capacity:.1f} requests per second at most; {rate:.1f} are sent, for {seconds / 60:.0f} min\n"
        )
        sys.stdout.flush()
        self.idle.append(await self.quiet())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.watch)
            async with trio.open_nursery() as clients:
                with trio.move_on_after(seconds):
                    while True:
                        await trio.sleep(self.random.expovariate(rate))
                        clients.start_soon(self.ask)
            nursery.cancel_scope.cancel()
        self.idle.append(await self.quiet())

    async def quiet(self) -> dict[str, Sample]:
        """Return a sample of each process when nothing is open, or after QUIET_S."""
        samples: list[Sample] = []
        with trio.move_on_after(QUIET_S):
            while not samples or any(sample.open for sample in samples if sample.process in ENGINES):
                await trio.sleep(1)
                samples = await self.sampled(0.0)
            await trio.sleep(5)  # idle connections of clients are closed
            samples = await self.sampled(0.0)
        return {sample.process: sample for sample in samples}

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
            self.samples += await self.sampled(begun)
            await trio.sleep(1)

    async def sampled(self, begun: float) -> list[Sample]:
        status, body = await self.cluster.exchange("GET", "/admin/state")
        engines = msgspec.json.decode(body)["engines"] if status == 200 else {}
        at, states = trio.current_time() - begun, {name: engines.get(name) for name in self.pids}
        return [
            Sample(at, name, *of_process(pid), -1 if (state := states[name]) is None else state["open"])
            for name, pid in self.pids.items()
        ]


def of_process(pid: int) -> tuple[float, float, int, int, float]:
    """MB resident, and what of that is its own; file descriptors, and sockets; MB of files of ours in shared memory."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    resident, own = (int(status[key].split()[0]) * 1024 / 1e6 for key in ("VmRSS", "RssAnon"))
    targets = [target_of(folder / "fd" / number) for number in os.listdir(folder / "fd")]
    sockets = sum(target.startswith("socket:") for target in targets)
    shared = sum(file.stat().st_blocks * 512 for file in Path("/dev/shm").glob(f"pdflow-{pid}-*")) / 1e6
    return resident, own, len(targets) - sockets, sockets, shared


def target_of(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:
        return ""  # closed meanwhile


class Line(NamedTuple):
    first: float
    last: float
    slope: float
    """Per hour."""
    margin: float


def line(at_s: list[float], values: list[float], open_requests: list[float] | None = None) -> Line:
    """Through the means of blocks, with the 95 % margin of its slope; for as many open requests, if they are given."""

    def means(of: list[float]) -> Any:
        return np.array([block.mean() for block in np.array_split(np.array(of), BLOCKS)])

    hours, found = means(at_s) / 3600, means(values)
    columns = [np.ones(BLOCKS), hours - hours.mean()]
    if open_requests is not None and np.ptp(means(open_requests)):
        columns.append(means(open_requests))
    causes = np.stack(columns, axis=1)
    weights, *_ = np.linalg.lstsq(causes, found, rcond=None)
    rest = found - causes @ weights
    variance = float((rest**2).sum()) / (BLOCKS - len(columns)) * np.linalg.inv(causes.T @ causes)[1, 1]
    return Line(float(found[0]), float(found[-1]), float(weights[1]), T_95 * float(np.sqrt(variance)))


def stays(soak: Soak) -> bool:
    """Print what each idle process has, before the load and after it; True if nothing that must end is left."""
    before, after = soak.idle
    most = int(max(open_in_all(soak, 0)))
    sys.stdout.write(f"{'idle':12}{'':8}{'before':>10}{'after':>10}\n")
    left = False
    for process in soak.pids:
        for measure in MEASURES:
            first, last = getattr(before[process], measure), getattr(after[process], measure)
            allowed = {"fds": first, "shm_mb": first, "sockets": first + 2 * most, "open": 0}.get(measure, last)
            bad = last > allowed
            left |= bad
            sys.stdout.write(f"{process:12}{measure:8}{first:10.2f}{last:10.2f}{'  left over' if bad else ''}\n")
    return not left


def report(soak: Soak, warm_s: float) -> bool:
    sys.stdout.write(
        f"{soak.answered:,} answered, {soak.failed} failed, {soak.hung_up:,} hung up\n"
        f"{'process':12}{'':8}{'first':>10}{'last':>10}{'per hour':>12}{'95 %':>24}\n"
    )
    flat = True
    total = open_in_all(soak, warm_s)
    for process in soak.pids:
        mine = [sample for sample in soak.samples if sample.process == process and sample.at_s >= warm_s]
        for measure in MEASURES:
            values: list[Any] = [getattr(sample, measure) for sample in mine]
            if measure == "open" and -1 in values:
                continue
            judged = measure in JUDGED
            found = line([sample.at_s for sample in mine], values, total if judged else None)
            good = not judged or found.slope <= found.margin or np.ptp(values) == 0
            flat &= bool(good)
            interval = f"{found.slope - found.margin:.2f} to {found.slope + found.margin:.2f}"
            sys.stdout.write(
                f"{process:12}{measure:8}{found.first:10.2f}{found.last:10.2f}{found.slope:12.2f}{interval:>24}"
                f"{'' if good else '  grows'}\n"
            )
    return stays(soak) and flat


def open_in_all(soak: Soak, warm_s: float) -> list[float]:
    """Return how many requests were open in all engines, at each sample of a process."""
    total: dict[float, float] = {}
    for sample in soak.samples:
        if sample.at_s >= warm_s:
            total[sample.at_s] = total.get(sample.at_s, 0.0) + max(0, sample.open)
    return list(total.values())


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
