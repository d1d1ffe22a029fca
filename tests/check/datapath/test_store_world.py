"""What `pdflow check methods` would find of a store whose ledger, memory or core were wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdflow.methods.method import PipelinePolicy
from pdflow.methods.store.ledger import StoreLedger
from pdflow.methods.store.memory import StoreMemory
from pdflow.serving.effects import EndCall
from pdflow.serving.store import StoreCore
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.datapath.store import SETTINGS, StoreWorld
from pdflow_sim.check.search.forward import explore


def findings() -> set[Finding]:
    return {finding for one in SETTINGS for finding in explore(StoreWorld(PipelinePolicy(), one)).counterexamples}


def test_every_setting_ends_and_nothing_is_wrong() -> None:
    for setting in SETTINGS:
        found = explore(StoreWorld(PipelinePolicy(), setting))
        assert not found.counterexamples, setting
        assert found.ends


def wrong(monkeypatch: pytest.MonkeyPatch, where: type, name: str, change: Callable[..., Any]) -> None:
    original = getattr(where, name)
    monkeypatch.setattr(where, name, lambda self, *args: change(original, self, *args))


def test_a_put_that_waits_and_is_given_up_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreMemory, "forget", lambda self, name: False)
    with pytest.raises(KeyError):
        findings()


def test_memory_that_is_exactly_enough_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = next(one for one in SETTINGS if {-(-len(prompt) // 2) for prompt in one.prompts} == {one.num_blocks})
    assert "read" in explore(StoreWorld(PipelinePolicy(), exact)).done

    def leaves_one(original: Any, self: StoreMemory, need: int, now: int) -> bool:
        return bool(original(self, need, now)) and need < self.pool.free

    wrong(monkeypatch, StoreMemory, "_make_room", leaves_one)
    assert Finding.STUCK in explore(StoreWorld(PipelinePolicy(), exact)).counterexamples


def test_the_first_that_waits_has_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_first(original: Any, self: StoreMemory, name: str, items: Any) -> None:
        original(self, name, items)
        self.waiting.move_to_end(name, last=False)

    wrong(monkeypatch, StoreMemory, "enqueue", last_first)
    assert Finding.OVERTAKEN in findings()


def test_a_tail_is_written_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole_blocks(original: Any, self: StoreMemory, name: str, items: Any, now: int) -> Any:
        placed = original(self, name, items, now)
        return placed if placed is None else type(placed)(placed.name, 0, placed.target)

    wrong(monkeypatch, StoreMemory, "_allocate_objects", whole_blocks)
    assert Finding.INDEX in findings()


def test_room_that_a_writer_may_still_reach_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def freed_at_once(original: Any, self: StoreLedger, request_id: str) -> Any:
        put = original(self, request_id)
        if put.generation:
            self.memory.release(put.generation, 0)
        return put

    wrong(monkeypatch, StoreLedger, "failed", freed_at_once)
    monkeypatch.setattr(StoreLedger, "free", lambda self, generation, now: None)
    assert Finding.TWICE in findings()


def test_memory_that_is_released_is_offered_to_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks_nobody(self: StoreCore, _: Any, effect: Any) -> None:
        self.ledger.release(effect.xid, self.now)
        self.pending_effects.append(EndCall(effect.xid))

    monkeypatch.setattr(StoreCore, "_release", asks_nobody)
    assert Finding.STUCK in findings()


def test_each_call_is_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(original: Any, self: StoreCore, port: Any, effect: Any) -> None:
        original(self, port, effect)
        self.pending_effects += self.pending_effects[:1]

    wrong(monkeypatch, StoreCore, "_resolve", twice)
    assert Finding.ANSWER in findings()
