"""The bugs of benchmarks/hand_bugs.py can still be made; what docs/bugs.md found unjudged is judged."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from benchmarks.hand_bugs import FIRST, HAND, SECOND
from benchmarks.mutation.sample import ROOT, by_hand, diff
from pdflow.protocol.consumer.cells import ConsumerCells
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.effects import NOTHING, Effects, SendLocal
from pdflow.protocol.events import FrameOrdered, ShardReleased
from pdflow.protocol.messages import Sync
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.values import Instant
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import Counterexample, shortest


def test_every_bug_that_was_written_still_applies() -> None:
    assert len(FIRST) == len(SECOND) == 10
    assert len({name for name, *_ in HAND}) == 20
    assert all(diff(bug, (ROOT / "pdflow" / bug.file).read_bytes()) for bug in by_hand(ROOT))


def broken(scope: Scope) -> Counterexample:
    found = shortest(relation(scope))
    assert found is not None
    return found


def test_a_deadline_that_comes_nearer_wakes_its_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    put = ConsumerCells.put

    def asleep(self: ConsumerCells, before: Any, after: Any, now: Instant) -> Effects:
        effects = put(self, before, after, now)
        self.deadlines.heap.clear()
        return effects

    monkeypatch.setattr(ConsumerCells, "put", asleep)
    counterexample = broken(Scope(abort=0, deadline=0))
    assert counterexample.broken.name == "S10"
    assert counterexample.broken.what == "at D, STALL of u0-d0000000 is armed, but schedules no wake-up"


@pytest.mark.parametrize("dropped", ["open", "interest"])
def test_a_sync_names_all_open_registrations_and_all_interest(dropped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ConsumerScheduler._sync

    def less(self: ConsumerScheduler, peer: Any) -> Effects:
        effects: list[Any] = []
        for effect in original(self, peer):
            assert isinstance(effect, SendLocal)
            assert isinstance(effect.event, FrameOrdered)
            assert isinstance(effect.event.message, Sync)
            message = msgspec.structs.replace(effect.event.message, **{dropped: ()})
            effects.append(SendLocal(effect.to, FrameOrdered(effect.event.to, message)))
        return tuple(effects)

    monkeypatch.setattr(ConsumerScheduler, "_sync", less)
    counterexample = broken(Scope(sync=1, deadline=0, stall=0))
    assert counterexample.broken.name == "L5"
    assert counterexample.broken.what.startswith("D's SYNC names [] and wants [], not ")


def test_p_reports_a_prompt_as_sent_when_all_of_it_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = ProducerScheduler._shard_released

    def last_word(self: ProducerScheduler, event: ShardReleased, now: Instant) -> Effects:
        product = self.products.get(event.xid)
        if product is None:
            return NOTHING
        self.products[event.xid] = msgspec.structs.replace(product, code=event.code)
        return counted(self, event, now)

    monkeypatch.setattr(ProducerScheduler, "_shard_released", last_word)
    counterexample = broken(Scope(p_tp=2, abort=0, deadline=0, stall=0))
    assert counterexample.broken.name == "S7"
    assert counterexample.broken.what == "P reports x0 as sent, but not all of it has landed"


def test_the_longest_time_between_two_cancels_is_no_missing_wake_up() -> None:
    """In a scope without clocks a CANCEL may be repeated at once, with the same next deadline as before."""
    assert shortest(relation(Scope(drop=1, deadline=0, stall=0, cancel=7))) is None
