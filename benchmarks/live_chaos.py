"""A live cluster that is treated badly: python -m benchmarks.live_chaos [--requests N] [--seed N] [--method NAME]
[--transport NAME] [--tls]

Engines, nodes of the store and the router are killed, stopped and woken; connections between any two processes of the
cluster are cut, cut with all that is under way on them (frames are lost, or break off in the middle), and slowed to a
trickle; clients hang up: all while requests are under way at a concurrency of 16. Judged:

- wrong: answers whose tokens are not those of an undisturbed cluster; it must be 0;
- unanswered: requests that had no end within their deadline; it must be 0;
- leaked: blocks that anybody holds when all is quiet again; it must be 0;
- exceptions: tracebacks in the log; it must be 0.

Failed requests, with an error that says so, are what happens when an engine dies under them; they are counted. So are
answers that another engine continued, and requests whose router died: their connections break.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import trio
import trustme

from benchmarks.live_cuts import Wire, disconnect, lose, pace, wires
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.security.tls import KEYS
from tests.runtime.support.certificates import certify
from tests.runtime.support.served import Served, served

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples/serve-quickstart.toml"
CONCURRENCY = 16
PROMPTS = 48
DEADLINE_S = 60.0
TOKENS = 32
ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
ROUTER = "pdflow_runtime.router.front"
RESUMED = "pdflow_router_answers_resumed_total "
STALLED = "pdflow_router_engines_stalled_total "
HANGING = "pdflow_router_requests_hanging_total "
TRICKLE = 20_000
"""Bytes per second."""
QUIET_S = 90.0
"""After the last answer: leases are 30 s, and a dead peer is given up after 15 s."""


class Counts:
    """A counter of processes that start again at 0."""

    def __init__(self) -> None:
        self.before = self.last = 0.0

    def see(self, value: float) -> None:
        if value < self.last:
            self.before += self.last
        self.last = value

    @property
    def total(self) -> float:
        return self.before + self.last


class Chaos:
    """Args: how many requests, where its randomness starts, how many prompts they choose from, and which processes are
    harmed."""

    def __init__(
        self,
        cluster: Served,
        requests: int,
        seed: int,
        prompts: int = PROMPTS,
        targets: Sequence[str] = ENGINES,
    ) -> None:
        self.cluster = cluster
        self.targets = targets
        self.requests = requests
        self.random = random.Random(seed)
        self.prompts = [self.prompt(number) for number in range(prompts)]
        self.right: list[list[int]] = []
        self.outcomes: Counter[str] = Counter()
        self.deeds: Counter[str] = Counter()
        self.counted: dict[str, Counts] = {name: Counts() for name in (RESUMED, STALLED, HANGING)}
        self.wrong = self.unanswered = self.bytes_lost = 0

    def prompt(self, number: int) -> list[int]:
        length = 1 + int(self.random.random() ** 2 * 600)
        return [(number * 7919 + at * 31) % 500 + 5 for at in range(length)]

    async def run(self) -> bool:
        for tokens in self.prompts:
            answer = await self.cluster.ask(prompt=tokens, max_tokens=TOKENS, ignore_eos=True)
            assert answer.status == 200, answer.body
            self.right.append(answer.tokens)
        left = self.requests_to_send()
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.harm)
            nursery.start_soon(self.count)
            async with trio.open_nursery() as clients:
                for _ in range(CONCURRENCY):
                    clients.start_soon(self.client, left)
            nursery.cancel_scope.cancel()
        lasted = trio.current_time() - begun
        await self.count_once()
        leaked = await self.quiet()
        log = self.cluster.log.read_text()
        exceptions = log.count("Traceback (most recent call last)")
        summary = ", ".join(f"{count:,} {name}" for name, count in sorted(self.outcomes.items()))
        done = ", ".join(f"{count} {name}" for name, count in sorted(self.deeds.items()))
        resumed, stalled, hung = (counts.total for counts in self.counted.values())
        sys.stdout.write(
            f"{self.outcomes.total():,} requests in {lasted:.0f} s: {summary}\n{done}, {self.bytes_lost:,} bytes lost\n"
            f"answers continued {resumed:,.0f}  engines that stalled {stalled:,.0f}  requests that hung {hung:,.0f}\n"
            f"wrong {self.wrong}  unanswered {self.unanswered}  leaked {leaked}  exceptions {exceptions}\n"
        )
        if exceptions:
            sys.stdout.write(log[max(0, log.index("Traceback") - 2000) :][:6000])
        return not (self.wrong or self.unanswered or leaked or exceptions)

    def requests_to_send(self) -> Iterator[int]:
        """One item for each request; all clients take from it."""
        return iter(range(self.requests))

    async def client(self, left: Iterator[int]) -> None:
        for _ in left:
            number = self.random.randrange(len(self.prompts))
            hang_up_after_s = self.random.uniform(0, 0.3) if self.random.random() < 0.1 else None
            with trio.move_on_after(hang_up_after_s if hang_up_after_s is not None else DEADLINE_S) as scope:
                await self.ask(number)
            if scope.cancelled_caught:
                self.outcomes["hung up on"] += hang_up_after_s is not None
                self.unanswered += hang_up_after_s is None

    async def ask(self, number: int) -> None:
        try:
            answer = await self.cluster.ask(
                prompt=self.prompts[number],
                max_tokens=TOKENS,
                ignore_eos=True,
                stream=self.random.random() < 0.5,
            )
        except (UpstreamError, AssertionError, msgspec.DecodeError, KeyError):
            self.outcomes["broken off"] += 1
            return
        self.outcomes[str(answer.status)] += 1
        if answer.status == 503:
            await trio.sleep(1)  # as a client does that is told that nobody is there
        if answer.status == 200 and answer.tokens != self.right[number]:
            self.wrong += 1
            sys.stdout.write(f"wrong: prompt {number}: {answer.tokens} for {self.right[number]}\n")

    async def harm(self) -> None:
        """Something every second, to engines that are up and to what connects them."""
        deeds = (self.kill, self.stop, self.stop, self.disconnect, self.lose, self.lose, self.slow)
        while True:
            await trio.sleep(self.random.uniform(0.2, 2))
            try:
                await self.random.choice(deeds)()
            except (LookupError, OSError):
                continue  # who was to be harmed has gone by itself

    async def kill(self) -> None:
        os.kill(self.someone("killed"), signal.SIGKILL)

    async def stop(self) -> None:
        pid = self.someone("stopped and woken")
        os.kill(pid, signal.SIGSTOP)
        try:
            await trio.sleep(self.random.choice((0.05, 0.5, 2, 7)))
        finally:
            os.kill(pid, signal.SIGCONT)

    async def disconnect(self) -> None:
        for wire in self.some_wires():
            disconnect(wire)
            self.deeds["links cut"] += 1

    async def lose(self) -> None:
        """One side stands still first, so that something is under way."""
        found = self.some_wires()
        slow = found[0].ends[self.random.randrange(2)].pid
        os.kill(slow, signal.SIGSTOP)
        try:
            await trio.sleep(self.random.choice((0.01, 0.1, 0.5)))
            for wire in found:
                self.bytes_lost += lose(wire)
                self.deeds["links cut with what was under way"] += 1
        finally:
            os.kill(slow, signal.SIGCONT)

    async def slow(self) -> None:
        """Everything between two processes."""
        found = [wire for wire in self.some_wires() if wire.kind == "tcp"]
        for wire in found:
            pace(wire, TRICKLE)
            self.deeds["links slowed"] += 1
        await trio.sleep(self.random.choice((0.5, 2, 7)))
        for wire in found:
            pace(wire)

    def someone(self, deed: str) -> int:
        target = self.random.choice(self.targets)
        pid = self.cluster.pid_of(target)
        self.deeds[f"{deed} ({'router' if target == ROUTER else target.partition('-')[0]})"] += 1
        return pid

    async def count(self) -> None:
        """A router that dies takes its counts with it, but for what has come after the last look."""
        while True:
            await trio.sleep(0.25)
            await self.count_once()

    async def count_once(self) -> None:
        with trio.move_on_after(2), suppress(UpstreamError, OSError):
            _, body = await self.cluster.exchange("GET", "/metrics")
            for line in body.decode().splitlines():
                for name, counts in self.counted.items():
                    if line.startswith(name):
                        counts.see(float(line.removeprefix(name)))

    def some_wires(self) -> list[Wire]:
        """One connection, or all between one pair of processes."""
        pids = []
        for name in {*self.targets, ROUTER}:
            with suppress(LookupError):
                pids.append(self.cluster.pid_of(name))
        found = wires(pids)
        if not found:
            raise LookupError("nobody is connected")
        one = self.random.choice(found)
        if self.random.random() < 0.5:
            return [one]
        pair = {end.pid for end in one.ends}
        return [wire for wire in found if {end.pid for end in wire.ends} == pair]

    async def quiet(self) -> int:
        """Blocks that are held though nobody asks any more."""
        held = -1
        with trio.move_on_after(QUIET_S):
            while held:
                await trio.sleep(0.5)
                status, body = await self.cluster.exchange("GET", "/admin/state")
                engines = msgspec.json.decode(body)["engines"].values() if status == 200 else [None]
                if None not in engines:
                    held = sum(holds(engine) for engine in engines)
        return held


def holds(engine: dict[str, Any]) -> int:
    """Blocks; of a store, which is there to keep them, prompts that are being put or got."""
    if engine["role"] == "store":
        return int(engine["waiting"] + engine["loading"] + engine["running"])
    return int(engine["blocks"] - engine["free"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--method", default="nixl-push")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--tls", action="store_true", help="certificates of one authority for all components")
    asked = parser.parse_args()
    overrides = (
        f"transfer.method={asked.method}",
        f"serve.transport={asked.transport}",
        "router.on_failure=retry",
        "router.max_attempts=3",
    )
    stores = ("store-0", "store-1") if asked.method == "kv-store" else ()
    overrides += ("transfer.store_nodes=2",) if stores else ()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if asked.tls:
            certify(folder, trustme.CA())
            overrides += tuple(f"serve.{key}={folder / key}" for key in KEYS)
        cluster = stack.enter_context(served(folder, QUICKSTART, *overrides))
        chaos = Chaos(cluster, asked.requests, asked.seed, targets=(*ENGINES, *stores, ROUTER))
        good = trio.run(chaos.run)
        sys.stdout.write("" if good else f"the log's last lines:\n{cluster.log.read_text()[-3000:]}\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
