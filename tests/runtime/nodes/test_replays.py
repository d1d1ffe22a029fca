"""Stories of the checker's world, told with live nodes: what once was a bug, and ways that nobody chose.

The driver hands endpoints exactly the events of a story, in its order, and carries out what they answer: it leaves out
nothing, adds nothing, and waits for nothing.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from pdflow.methods.catalogue import METHODS
from pdflow_sim.check.counterexamples.counterexample import CounterexampleFile, read
from pdflow_sim.check.scopes.method_scopes import BY_METHOD, STOPS
from pdflow_sim.check.scopes.scope import ENDLESS, TOKENS, Scope
from pdflow_sim.check.state.digest import digest
from tests.runtime.support.held import HeldTransfers, Wires
from tests.runtime.support.live_replay import LiveReplay, NotReplayable, digest_of
from tests.runtime.support.method_live_replay import replay_of

REPLAYS = sorted((Path(__file__).resolve().parents[2] / "replays").glob("*.json"))
STEPS = 50
WALKS = 12
TROUBLE = {
    "abort",
    "abort prefill",
    "cancel prefill",
    "withdraw",
    "preempt",
    "timer",
    "drop",
    "delay",
    "duplicate",
    "lose",
    "restart",
    "error",
    "lose notice",
    "flush fails",
    "unreachable",
    "falsely refused",
}
"""What leads away from where most of it is to be seen."""


def not_live(scope: Scope) -> str:
    """Why live nodes cannot tell a story of this scope; "" if they can."""
    if not scope.dialect.control_frames:
        return "only strict is spoken live"
    if scope.method and METHODS[scope.method].stores:
        return "a store's node has a driver of its own"
    if scope.orphan:
        return "no rank outlives its engine: they are in one process"
    if scope.down:
        return "a live engine that has died is started again at once here"
    if scope.attempts:
        return "the router's driver has tests of its own"
    if scope.lagging:
        return "endpoints of one engine are in one process: what one tells another comes in the same turn"
    if scope.horizon:
        return "clocks of their own"
    return ""


COUNTEREXAMPLES = {file.stem: read(file) for file in REPLAYS}
REPLAYABLE = {
    name: counterexample for name, counterexample in COUNTEREXAMPLES.items() if not not_live(counterexample.scope)
}


def test_every_replay_is_run_or_has_a_reason_to_be_skipped() -> None:
    left_out = {
        name: why for name, counterexample in COUNTEREXAMPLES.items() if (why := not_live(counterexample.scope))
    }
    lagging = "endpoints of one engine are in one process: what one tells another comes in the same turn"
    assert left_out == {
        "a-cancelled-prefill-that-d-was-not-told-of": lagging,
        "a-fence-counts-for-a-later-read": lagging,
        "a-flush-of-what-d-had-discarded": "clocks of their own",
        "a-heartbeat-that-waited-for-its-connection": "only strict is spoken live",
        "a-lost-p-that-writes": "only strict is spoken live",
        "failed-for-a-restart-before-its-prompt": "the router's driver has tests of its own",
        "taken-before-the-rank-knew-of-it": lagging,
    }
    assert REPLAYABLE


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdflow_runtime.nodes.ranked_node.RankLinks", Wires)
    monkeypatch.setattr("pdflow_runtime.nodes.ranks.InFlightTransfers", HeldTransfers)
    for module in ("prefill_node", "decode_node"):
        monkeypatch.setattr(f"pdflow_runtime.nodes.{module}.digest_of", digest_of)


@pytest.mark.parametrize("name", REPLAYABLE)
@pytest.mark.trio
async def test_recorded_counterexamples_are_replayed_live(name: str, mock_clock: MockClock) -> None:
    counterexample: CounterexampleFile = REPLAYABLE[name]
    async with trio.open_nursery() as nursery:
        live_replay = replay_of(counterexample.scope, nursery)
        await live_replay.begin()
        for step in counterexample.steps:
            await live_replay.make_named(step.move)
            assert digest(live_replay.world, live_replay.state) == step.after
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_write_of_a_former_incarnation_is_not_accepted(mock_clock: MockClock) -> None:
    """Its notice comes when D has met P's next life (S8)."""
    async with trio.open_nursery() as nursery:
        live_replay = replay_of(Scope(p_restart=1, sync=1), nursery)
        await live_replay.begin()
        for move in (
            "finish x0",
            "decode u0-d0000000",
            "admit u0-d0000000",
            "handshake D.r0 -> P.r0",
            "deliver Register u0-d0000000 D.r0 -> P.r0",
            "handshake P.r0 -> D.r0",
            "land PostWrite u0-d0000000 r0->r0 by P.r0",
            "restart P",
            "timer SYNC P at D",
            "deliver Sync #1 u0-d0000000 D.r0 -> P.r0",
            "deliver SyncReply #1 nothing P.r0 -> D.r0",
            "handshake D.r0 -> P.r0",
            "notice PostWrite u0-d0000000 r0->r0 by P.r0",
        ):
            await live_replay.make_named(move)
        nursery.cancel_scope.cancel()


SCOPES = {
    "frames lost and doubled": Scope(drop=1, delay=1, dup=1, sync=1, cancel=1),
    "two ranks at P": Scope(p_tp=2, lose=1, err=1),
    "two ranks at D": Scope(d_tp=2, dup=1, unreachable=1),
    "reconnect refused, P running": Scope(requests=2, lose=2, refused=2, sync=3, cancel=2),
    "pull, reconnect refused, P running": Scope(pulls=True, requests=2, lose=2, refused=2, sync=3),
    "one prompt twice, deaths": Scope(requests=2, same_product=True, p_restart=1, d_restart=1),
    "in pieces": Scope(chunks=2, done_is_remote=False, err=1, dup=1),
    "one pool": Scope(requests=3, pool=1, err=1),
    "other blocks, some of them here": Scope(d_block=8, hit_tokens=16, requests=2),
    "two P and two D engines": Scope(p_engines=2, d_engines=2, requests=4, pool_blocks=8, p_restart=1),
    "pull": Scope(pulls=True, drop=1, err=1, sync=1, unreachable=1),
    "pull, two ranks at P, a death": Scope(pulls=True, p_tp=2, requests=2, same_product=True, p_restart=1),
    "mooncake": Scope(method="mooncake-v1", requests=2, err=1, dup=1),
    "nixl push, as a method": Scope(method="nixl-push", p_tp=2, err=1),
    "nixl pull, as a method": Scope(method="nixl-pull", pulls=True, drop=1),
    "slow engines": Scope(requests=2, late=True, decodes=True, preempt=1, prefill_abort=1),
    "all of it is here": Scope(hit_tokens=TOKENS, requests=2, prefill_abort=1),
    "progressive": Scope(method="nixl-push", progressive=True, err=1, prefill_abort=1),
    "progressive, two ranks at D": Scope(method="nixl-push", progressive=True, d_tp=2, dup=1, prefill_abort=1),
    "progressive, WRITE completes before it lands": Scope(
        method="nixl-push", progressive=True, done_is_remote=False, err=1, requests=2
    ),
    "progressive, slow engines": Scope(
        method="mooncake-v1", progressive=True, requests=2, late=True, decodes=True, preempt=1
    ),
    "cpu-staged": Scope(method="cpu-staged", err=1, prefill_abort=1),
    "cpu-staged, small rings": Scope(method="cpu-staged", requests=3, pool=1, p_pool=1),
    "cpu-staged, copies that take time": Scope(method="cpu-staged", requests=2, pool=1, p_pool=1, late=True),
    "cpu-staged, WRITE completes before it lands": Scope(method="cpu-staged", done_is_remote=False, drop=1, err=1),
    "cpu-staged, both start again": Scope(method="cpu-staged", requests=2, p_restart=1, d_restart=1),
    "p2p-nccl-put": Scope(method="p2p-nccl-put", p_tp=2, d_tp=2, err=1),
    "p2p-nccl-put, slow engines": Scope(method="p2p-nccl-put", requests=2, pool=1, late=True, decodes=True, preempt=1),
    "p2p-nccl-put-async": Scope(method="p2p-nccl-put-async", requests=2, same_product=True, prefill_abort=1, sync=1),
    "p2p-nccl-put-async, two ranks": Scope(method="p2p-nccl-put-async", p_tp=2, d_tp=2, err=1, lose=1),
    "p2p-nccl-get": Scope(method="p2p-nccl-get", pulls=True, requests=2, p_pool=1, withdraw=1, err=1),
    "p2p-nccl-get, slow engines": Scope(
        method="p2p-nccl-get", pulls=True, requests=2, late=True, decodes=True, preempt=1, withdraw=1
    ),
    "mooncake-v0": Scope(method="mooncake-v0", pulls=True, requests=2, p_pool=1, err=1, drop=1),
    "mooncake-v0, both start again": Scope(method="mooncake-v0", pulls=True, requests=2, p_restart=1, d_restart=1),
    "pull, other blocks": Scope(pulls=True, d_block=32, d_tp=2, lose=1),
}

PUT_OFF = ("finish", "read", "land", "ended", "deliver", "")


async def walk(scope: Scope, seed: int) -> LiveReplay:
    """One way through the world of a scope, told as far as it can be. There is hardly any trouble before some moment,
    and moves of some kind come last: otherwise no prompt would be asked for while it is computed, and no WRITE be
    stopped."""
    chance = random.Random(seed)
    trouble_from, last = chance.randrange(STEPS // 2), chance.choice(PUT_OFF)
    async with trio.open_nursery() as nursery:
        live_replay = replay_of(scope, nursery)
        await live_replay.begin()
        with suppress(NotReplayable):
            for step in range(STEPS):
                moves: list[Any] = live_replay.world.moves(live_replay.state)
                if not moves:
                    break
                fault_free = [move for move in moves if move[0] not in TROUBLE]
                soon = [move for move in fault_free if move[0] != last]
                likes = soon or fault_free
                trouble = 0.02 if step < trouble_from else 0.3
                await live_replay.make(chance.choice(likes if likes and chance.random() >= trouble else moves))
        nursery.cancel_scope.cancel()
    return live_replay


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.trio
async def test_random_walks_are_replayed_live(name: str, mock_clock: MockClock) -> None:
    live_replays = [await walk(SCOPES[name], seed) for seed in range(WALKS)]
    assert sum(one.committed for one in live_replays), "no way led anywhere"


REACHED = STOPS | {
    "posted while being computed",
    "aborted while being computed",
    "waits for memory at P",
    "waits for memory at D",
    "withdrawn under a READ",
}


@pytest.mark.parametrize(
    "walks", [pytest.param(12, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.nightly)]
)
@pytest.mark.trio
async def test_walks_through_every_method_s_scopes_are_replayed_live(walks: int, mock_clock: MockClock) -> None:
    reached: set[str] = set()
    for named in BY_METHOD:
        if not not_live(named.scope):
            for seed in range(walks):
                reached |= (await walk(named.scope, seed)).world.space.checker.seen.keys()
    assert reached >= REACHED, f"missed: {REACHED - reached}"


CLOCKS = {
    "push": Scope(horizon=ENDLESS),
    "push, two ranks at P, errors": Scope(horizon=ENDLESS, p_tp=2, err=1),
    "push, frames lost": Scope(horizon=ENDLESS, drop=2, dup=1),
    "pull": Scope(horizon=ENDLESS, pulls=True, drop=1),
}


@pytest.mark.parametrize("name", CLOCKS)
@pytest.mark.trio
async def test_deadlines_fire_when_due_after_events_of_the_same_instant(name: str, mock_clock: MockClock) -> None:
    fired = 0
    mock_clock.jump(0.5e-9)  # so that a nanosecond is one, whatever floats make of it
    for seed in range(WALKS):
        chance = random.Random(seed)

        def together(moves: list[Any], chance: random.Random = chance) -> Any:
            return chance.choice(moves) if moves and chance.random() < 0.3 else None

        async with trio.open_nursery() as nursery:
            live_replay = replay_of(CLOCKS[name], nursery)
            await live_replay.begin()
            with suppress(NotReplayable):
                for _ in range(2 * STEPS):
                    moves = [
                        move for move in live_replay.world.moves(live_replay.state) if move[0] not in ("tick", "timer")
                    ]
                    if (moves and chance.random() < 0.5) or not await live_replay.tick(mock_clock, together):
                        if not moves:
                            break
                        await live_replay.make(chance.choice(moves))
            fired += live_replay.fired
            nursery.cancel_scope.cancel()
    assert fired > WALKS, "hardly a deadline was reached"
