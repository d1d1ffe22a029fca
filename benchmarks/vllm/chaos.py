"""Row 10: all faults at random. 1,000 requests, 16 at a time, with three kills of each side.

Each request draws what is done to it. While a side is killed and started anew no new request begins, as with a router
that looks at /health; those that are under way end as they may. An instance whose engine core has died by itself is
started anew as well, and counted. CHAOS_REQUESTS in the environment changes the number.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final

import trio

from benchmarks.vllm.cases import case
from benchmarks.vllm.client import ASK_PREFILL, Legs, Reply, new_request_id
from benchmarks.vllm.instances import Instance
from benchmarks.vllm.model import prompt
from benchmarks.vllm.request_faults import LEASE_S, MALFORMED
from benchmarks.vllm.scene import Finding, Scene, Setup, cell, unknown

REQUESTS: Final = int(os.environ.get("CHAOS_REQUESTS", "1000"))
CONCURRENCY: Final = 16
PROMPTS: Final = 300
KILLS: Final = 3
"""Of each side."""
OUTPUT: Final = 16
SEED: Final = 18
HELD_S: Final = 40.0
"""Leases of prompts that nobody came for end meanwhile."""


def drawn(index: int) -> list[int]:
    """Return the prompt of this index: a third of them begin as another one does."""
    random = Random(f"chaos/{index}")
    length = random.randint(1, 200) if random.random() < 0.5 else random.randint(200, 1500)
    shared = prompt(256, f"chaos/prefix/{index % 5}") if random.random() < 0.33 else []
    return shared + prompt(length, f"chaos/{index}")


class Chaos:
    """Requests with faults drawn for each, against one scene."""

    def __init__(self, scene: Scene, requests: int) -> None:
        self._scene = scene
        self._requests = requests
        self._random = Random(SEED)
        self._open = trio.Event()
        self._open.set()
        self._kinds: dict[str, tuple[int, Callable[[list[int]], Awaitable[Reply | Legs | None]]]] = {
            "plain": (55, self.plain),
            "decode leg aborted": (10, self.decode_aborted),
            "prefill leg aborted": (5, self.prefill_aborted),
            "never matches": (5, self.never_matches),
            "malformed": (5, self.malformed),
            "another prompt's parameters": (5, self.foreign),
            "request id twice": (5, self.twice),
            "after the lease": (5, self.late),
            "transfer fails": (5, self.transfer_fails),
        }
        self.begun = 0
        self.ended: list[tuple[str, list[int], Reply | Legs | None]] = []
        self.kills: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._kill_now_and_then)
            nursery.start_soon(self._restart_the_dead)
            async with trio.open_nursery() as clients:
                for _ in range(CONCURRENCY):
                    clients.start_soon(self._client)
            nursery.cancel_scope.cancel()

    async def _client(self) -> None:
        while self.begun < self._requests:
            await self._open.wait()
            self.begun += 1
            weights = [weight for weight, _ in self._kinds.values()]
            (kind,) = self._random.choices(list(self._kinds), weights)
            tokens = drawn(self._random.randrange(PROMPTS))
            self.ended.append((kind, tokens, await self._kinds[kind][1](tokens)))

    async def _again(self, instance: Instance, side: str, counter: Counter[str]) -> None:
        self._open = trio.Event()
        counter[side] += 1
        await instance.kill()
        instance.start()
        await instance.ready()
        self._open.set()

    async def _kill_now_and_then(self) -> None:
        for index in range(2 * KILLS):
            due = (index + 1) * self._requests // (2 * KILLS + 1)
            while self.begun < due or not self._open.is_set():
                await trio.sleep(0.05)
            side = "PD"[index % 2]
            await self._again(self._scene.p if side == "P" else self._scene.d, side, self.kills)

    async def _restart_the_dead(self) -> None:
        while True:
            await trio.sleep(2.0)
            for side, instance in (("P", self._scene.p), ("D", self._scene.d)):
                if self._open.is_set() and not await instance.client.healthy() and self._open.is_set():
                    await self._again(instance, side, self.deaths)

    async def _params(self, tokens: list[int], name: str) -> dict[str, Any] | None:
        reply = await self._scene.p.client.complete(tokens, 1, request_id=name, params=ASK_PREFILL)
        return reply.params

    async def _decoded(
        self, tokens: list[int], name: str, change: Callable[[dict[str, Any]], Any], **named: Any
    ) -> Reply | None:
        params = await self._params(tokens, name)
        return None if params is None else await self._scene.decode(tokens, change(params), name, OUTPUT, **named)

    async def plain(self, tokens: list[int]) -> Legs:
        return await self._scene.send(tokens, OUTPUT)

    async def decode_aborted(self, tokens: list[int]) -> None:
        await self._decoded(tokens, new_request_id(), dict, timeout_s=self._random.uniform(0.001, 0.3))

    async def prefill_aborted(self, tokens: list[int]) -> None:
        await self._scene.send(tokens, OUTPUT, timeout_s=self._random.uniform(0.001, 0.1))

    async def never_matches(self, tokens: list[int]) -> Reply | None:
        params = await self._params(tokens, new_request_id())
        if params is None:
            return None
        return await self._scene.decode(tokens, unknown(params), new_request_id(), OUTPUT)

    async def malformed(self, tokens: list[int]) -> Reply | None:
        change = self._random.choice([each for name, each in MALFORMED.items() if not name.startswith("pdflow")])
        return await self._decoded(tokens, new_request_id(), change)

    async def foreign(self, tokens: list[int]) -> Reply | None:
        name = new_request_id()
        params = await self._params(drawn(self._random.randrange(PROMPTS)), name)
        return None if params is None else await self._scene.decode(tokens, params, name, OUTPUT)

    async def twice(self, tokens: list[int]) -> Legs:
        name = new_request_id()
        await self._decoded(drawn(self._random.randrange(PROMPTS)), name, dict, timeout_s=0.005)
        return await self._scene.send(tokens, OUTPUT, request_id=name)

    async def late(self, tokens: list[int]) -> Reply | None:
        name = new_request_id()
        params = await self._params(tokens, name)
        await trio.sleep(LEASE_S + 1)
        return None if params is None else await self._scene.decode(tokens, params, name, OUTPUT)

    async def transfer_fails(self, tokens: list[int]) -> Legs:
        self._scene.order("fail-transfer")
        return await self._scene.send(tokens, OUTPUT)


@case(
    "10",
    f"1,000 requests, {CONCURRENCY} at a time, all of the above at random, {KILLS} kills of each side",
    "0 wrong tokens, 0 hung, 0 leaked",
    Setup(lease_s=LEASE_S, faulty_nixl=True),
)
async def chaos(scene: Scene) -> Finding:
    """Random faults for each request, and kills of both sides meanwhile."""
    it = Chaos(scene, REQUESTS)
    await it.run()
    counts: Counter[str] = Counter()
    bad: list[str] = []
    for kind, tokens, reply in it.ended:
        if kind in ("decode leg aborted", "prefill leg aborted"):
            counts["aborted"] += 1
            continue
        verdict = await scene.verdict_of(reply, tokens, OUTPUT)
        counts[verdict] += 1
        if verdict in ("WRONG tokens", "hung"):
            bad.append(f"{kind}: {verdict}, {len(tokens)} tokens")
    alive = await scene.alive()
    held = await scene.held(HELD_S)
    sane = await scene.sane("chaos")
    met = not bad and not it.deaths and all(alive.values()) and not any(held.values()) and sane
    observed = f"{REQUESTS:,} requests: " + ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    observed += (
        f"; engine cores that died: {dict(it.deaths) or 0}; blocks held: {cell(held)}; next request right: {cell(sane)}"
    )
    facts = {"counts": dict(counts), "bad": bad, "kills": dict(it.kills), "deaths": dict(it.deaths), "held": held}
    return Finding(met, observed, facts)
