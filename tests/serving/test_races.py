"""Races that a driver may lose, and the protocol cannot: each driver by itself (spec 8)."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from pdflow.protocol.values import S
from tests.serving.play import Pair, play
from tests.serving.script import Arrive, Call, Do, Peer
from tests.serving.setting import Setting

DECODE = Setting("nixl-push", "decode")
LATER = 100 * S
"""Behind every deadline."""


def all_but_landed() -> tuple[Pair, Any]:
    """A decode leg whose KV lands next, and what says so."""
    pair = play(DECODE, Arrive(0), Do("admit", 0), Peer("connected"))
    return pair, pair.peers[""].event(Peer("done", 0))


def decodes(calls: list[Call]) -> bool:
    return "loaded" in [call.kind for call in calls] and "answer" not in [call.kind for call in calls]


def test_r28_simulated_what_had_arrived_is_handled_before_a_deadline() -> None:
    """It has come while the engine stood still, and so has its deadline."""
    pair, done = all_but_landed()
    side = pair.simulated
    side.node.pause(side.now + LATER)
    side.node.receive(side.node.ports[done.address], done.event)
    side._run_until(side.now + LATER)
    assert side.calls == []
    side.node.resume()
    assert decodes(side.calls)


def test_r28_live_what_had_arrived_is_handled_before_a_deadline() -> None:
    """The process had no turn for as long."""
    pair, done = all_but_landed()
    side = pair.live
    with side._patched():
        side.node.put(side.node.ports[done.address], done.event)
        side.clock.now += LATER
        side.node.turn(side.now)
    assert decodes(side.calls)


@pytest.mark.parametrize("which", ["simulated", "live"])
def test_r29_a_write_of_an_idle_engine_is_ended(which: str) -> None:
    """Its last prompt is computed, and nothing else is to be done when the WRITE ends."""
    steps = (Arrive(0), Do("compute", 0, 6), Do("computed"), Peer("register", 0), Peer("connected"))
    pair = play(Setting("nixl-push", "prefill"), *steps)
    side: Any = getattr(pair, which)
    assert not side.engine.possible()
    ended = pair.peers[""].event(Peer("ended", 0))
    calls = trio.run(side.step, ended)
    assert "release blocks" in [call.kind for call in calls]


def test_r28_a_deadline_is_handled_all_the_same() -> None:
    """So that the two tests above can fail."""
    pair, _ = all_but_landed()
    side = pair.live
    with side._patched():
        side.clock.now += LATER
        side.node.turn(side.now)
    assert not decodes(side.calls)
    assert "drop" in [call.kind for call in side.calls]
