"""Random scripts in vLLM's order of hooks: requests, aborts, failed and held operations, idle engines, small pools.

Each must end at rest, and on the way no operation may reach a block that is free or another request's, nor vLLM be told
of a request that it does not know.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdflow.protocol.values import S
from tests.runtime.vllm.support.fake_engine import Request, Status
from tests.runtime.vllm.support.pair import Pair

HELD = ("WRITE", "READ", "Register", "handshake", "Cancel", "CancelAck", "word", "SyncReply", "fence")
FAILING = ("WRITE", "READ", "handshake", "word")


class Script:
    """Args: `seed` decides on everything."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        how = {"recompute": self.flip(), "defers_alloc": self.flip(0.3)}
        # A prompt at the head of vLLM's queue that has no room keeps it from looking at those that are loaded behind
        # it: D's pool must hold what is open together.
        pools = self.engine((5, 8, 12, 64)), self.engine((12, 16, 64)) | how
        self.pair = Pair(self.flip(), self.rng.choice((1, 2)), *pools, progressive=self.flip())
        self.count = 0
        self.decodes: list[str] = []

    def flip(self, chance: float = 0.5) -> bool:
        return self.rng.random() < chance

    def engine(self, num_blocks: tuple[int, ...]) -> dict[str, Any]:
        rng = self.rng
        budget = rng.choice((17, 32, 64))
        return {
            "num_blocks": rng.choice(num_blocks),
            "max_num_batched_tokens": budget,
            "async_scheduling": self.flip(),
        }

    def play(self, length: int) -> None:
        acts = (self.prefill, self.decode, self.abort_decode, self.abort_prefill, self.hold, self.fail, self.idle)
        for _ in range(length):
            self.rng.choice((*acts, self.compute, *[self.step] * 4))()
        self.pair.holding = set()
        self.pair.step(60)
        self.pair.idle(31 * S)
        self.pair.assert_at_rest()

    def step(self) -> None:
        self.pair.step(self.rng.randrange(1, 4))

    def prefill(self) -> None:
        if self.count < 5:
            self.count += 1
            self.pair.submit_prefill(f"x{self.count}", self.rng.choice((20, 40, 60)))

    def decode(self) -> None:
        answers = self.pair.p.answers
        taken = (f"x{n}" for n in range(1, self.count + 1))
        ready = [x for x in taken if f"d-{x}" not in self.decodes and answers.get(f"p-{x}", (0, None))[1] is not None]
        if ready:
            xid = self.rng.choice(ready)
            tokens = self.pair.params_of(xid).num_tokens
            self.decodes.append(f"d-{xid}")
            self.pair.submit_decode(f"d-{xid}", xid, tokens, self.rng.choice((1, 3, 12)), self.rng.choice((0, 0, 16)))

    def compute(self) -> None:
        """A request that D serves alone."""
        if len(self.pair.d.requests) < 4 and self.flip(0.4):
            self.pair.d.add_request(Request(f"alone-{self.pair.now}-{self.rng.random()}", 20, 12))

    def abort_decode(self) -> None:
        if self.decodes:
            self.pair.d.abort(self.rng.choice(self.decodes))

    def abort_prefill(self) -> None:
        if self.count:
            self.pair.p.abort(f"p-x{self.rng.randrange(self.count) + 1}")

    def hold(self) -> None:
        self.pair.holding = set(self.rng.sample(HELD, self.rng.randrange(3)))

    def fail(self) -> None:
        items = [item for item in self.pair.pending if item.kind in FAILING]
        if items:
            self.pair.carry_out(self.rng.choice(items), ok=False)

    def idle(self) -> None:
        if self.flip(0.2):
            self.pair.idle(self.rng.choice((1, 5, 16, 31)) * S)


@pytest.mark.parametrize("seeds", [range(start, start + 40) for start in range(0, 200, 40)], ids=str)
def test_random_scripts_end_at_rest(seeds: range) -> None:
    for seed in seeds:
        Script(seed).play(60)


@pytest.mark.nightly
def test_many_random_scripts_end_at_rest() -> None:
    for seed in range(1_000, 21_000):
        Script(seed).play(60)


def test_random_scripts_reach_what_they_are_for() -> None:
    """Requests that end well, are aborted, and fail, preempted ones, and drops that vLLM answers a step later."""
    ends: set[Status] = set()
    codes: set[str] = set()
    core_events: set[str] = set()
    for seed in range(120):
        script = Script(seed)
        script.play(60)
        ends |= {status for status, _ in script.pair.d.answers.values()}
        codes |= {effect.code.name for effect in script.pair.record["D"] if hasattr(effect, "code")}
        core_events |= {*script.pair.core_events("D"), *script.pair.core_events("P")}
    assert ends == {Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_ABORTED, Status.FINISHED_ERROR}
    assert {"NONE", "CANCELLED", "IO", "PEER_DEAD"} <= codes
    assert {"update_output: EngineDropped", "request_finished: RequestAborted EngineDropped"} <= core_events
