"""Random scripts in vLLM's order of hooks: requests, aborts, failed and held operations, idle engines, small pools.

Each must end at rest, and on the way no operation may reach a block that is free or another request's, nor vLLM be told
of a request that it does not know.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdflow.protocol.values import NO_BLOCK, S
from pdflow_runtime.vllm.instance import Instance
from tests.runtime.vllm.support.fake_engine import Request, Status
from tests.runtime.vllm.support.pair import Pair

HELD = ("WRITE", "READ", "Register", "handshake", "Cancel", "CancelAck", "word", "SyncReply", "fence")
FAILING = ("WRITE", "READ", "handshake", "word")


class Script:
    """Args: `seed` decides on everything, but for the sliding `windows` of the KV cache groups."""

    def __init__(self, seed: int, windows: tuple[int | None, ...] = (None,)) -> None:
        self.rng = random.Random(seed)
        how = {"recompute": self.flip(), "defers_alloc": self.flip(0.3)}
        # A prompt at the head of vLLM's queue that has no room keeps it from looking at those that are loaded behind
        # it: D's pool must hold what is open together.
        pools = self.engine((5, 8, 12, 64)), self.engine((12, 16, 64)) | how
        for pool in pools:
            pool["num_blocks"] *= len(windows)
        self.pair = Pair(self.flip(), self.rng.choice((1, 2)), *pools, progressive=self.flip(), windows=windows)
        self.count = 0
        self.prompts: dict[str, int] = {}
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
            xid, tokens = f"x{self.count}", self.rng.choice((20, 40, 60))
            self.prompts[xid] = tokens
            self.pair.submit_prefill(xid, tokens)

    def decode(self) -> None:
        answers = self.pair.p.answers
        taken = (f"x{n}" for n in range(1, self.count + 1))
        ready = [x for x in taken if f"d-{x}" not in self.decodes and answers.get(f"p-{x}", (0, None))[1] is not None]
        if ready:
            xid = self.rng.choice(ready)
            tokens = self.prompts[xid]
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


SLIDING = [(None, 29), (16, None, 33), (32,)]
"""A load of 60 tokens that is laid out for the token behind them keeps 28 of 29 that its last token attends to."""


@pytest.mark.parametrize("windows", SLIDING, ids=str)
def test_random_scripts_of_sliding_windows_end_at_rest(windows: tuple[int | None, ...]) -> None:
    """Some loads have holes at D, which P may not have where D has none (`Pair.assert_has_what_d_keeps`)."""
    loads = []
    for seed in range(100):
        script = Script(seed, windows)
        script.play(60)
        loads += script.pair.moved
    assert all(len(allocation.tables) == len(windows) for allocation in loads)
    assert sum(any(NO_BLOCK in table for table in allocation.tables) for allocation in loads) >= 20


def test_scripts_find_windows_that_are_laid_out_for_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instance, "exchanged", lambda _, prompt_tokens: prompt_tokens)
    scripts = [Script(seed, SLIDING[0]) for seed in range(40)]
    with pytest.raises(AssertionError, match="attends to what is not kept"):
        any(script.play(60) for script in scripts)


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
