"""Puts on their way into a store: each gets room once, in turn, or is given up, at whatever point of its way it is."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdflow.methods.store.ledger import Put, StoreLedger
from pdflow.methods.store.memory import Item, StoreMemory
from pdflow.protocol.events import DecodeAborted, DecodeAdmitted, DecodeHit, SourceWithdrawn
from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.protocol.messages import Code

BLOCKS = 8
BLOCK_TOKENS = 4


class Ledger(RuleBasedStateMachine):
    """A ledger, and the protocol as far as it matters here: what has room commits, or fails and is free some time."""

    @initialize(keeps=st.booleans())
    def build(self, keeps: bool) -> None:
        self.ledger = StoreLedger(StoreMemory(BLOCKS, keeps), BLOCK_TOKENS, lambda what, number: None)
        self.waiting: list[str] = []
        self.writing: dict[str, int] = {}
        """Request -> the generation of its room."""
        self.quarantined: list[int] = []
        """Room of requests that were given up, which a writer may still reach."""
        self.offered: set[str] = set()
        self.count = 0

    @rule(tokens=st.integers(1, BLOCK_TOKENS * (BLOCKS + 1)), shared=st.integers(0, 3))
    def put(self, tokens: int, shared: int) -> None:
        """PutStart, of a prompt that may begin as others do, and end in the middle of a block."""
        self.count += 1
        name = f"r{self.count}"
        blocks = -(-tokens // BLOCK_TOKENS)
        alike = min(shared, blocks - 1)
        items = (*(Item(f"all {index}", 1) for index in range(alike)), Item(f"own {name}", blocks - alike))
        params = KvParams(EngineInfo("p", Shards(1, 1, BLOCK_TOKENS)), f"x{self.count}", name, tokens)
        queued = self.ledger.start(Put(name, params, items, 0, 0))
        assert (queued.request_id, queued.num_blocks) == (name, blocks)
        never = self.ledger.enqueue(name)
        if blocks > BLOCKS:
            assert never == DecodeAborted(name, Code.REJECTED)
            self.ledger.failed(name)
            return
        assert never is None
        self.waiting.append(name)

    @rule()
    def admit_waiting(self) -> None:
        for event in self.ledger.admit_waiting(0):
            assert isinstance(event, (DecodeHit, DecodeAdmitted))
            assert event.request_id == self.waiting.pop(0), "somebody was overtaken, or has been given up"
            self.writing[event.request_id] = self.ledger.puts[event.request_id].generation

    def drawn(self, data: st.DataObject, names: Iterable[str]) -> str:
        return data.draw(st.sampled_from(sorted(names)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up_while_it_waits(self, data: st.DataObject) -> None:
        name = self.drawn(data, self.waiting)
        assert self.ledger.abort(name, name.replace("r", "x")) == DecodeAborted(name, Code.CANCELLED)
        assert self.ledger.failed(name).request_id == name
        self.waiting.remove(name)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def give_up_while_it_is_written(self, data: st.DataObject) -> None:
        name = self.drawn(data, self.writing)
        self.ledger.failed(name)
        self.quarantined.append(self.writing.pop(name))

    @precondition(lambda self: self.quarantined)
    @rule()
    def free(self) -> None:
        self.ledger.free(self.quarantined.pop(0), 0)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = self.drawn(data, self.writing)
        queued, finished = self.ledger.commit(name)
        assert queued.xid == finished.xid == name.replace("r", "x")
        assert self.ledger.abort(name, queued.xid) == SourceWithdrawn(queued.xid)
        assert len(finished.allocation.blocks) == -(-finished.num_tokens // BLOCK_TOKENS)
        del self.writing[name]
        self.offered.add(queued.xid)

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        xid = self.drawn(data, self.offered)
        self.offered.remove(xid)
        self.ledger.release(xid, 0)
        assert self.ledger.abort(xid.replace("x", "r"), xid) is None

    @invariant()
    def nobody_else_is_remembered(self) -> None:
        if hasattr(self, "ledger"):
            assert list(self.ledger.memory.waiting) == self.waiting
            assert set(self.ledger.puts) == {*self.waiting, *self.writing}
            assert set(self.ledger.offered) == self.offered

    def teardown(self) -> None:
        """Everything goes on, and ends."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(len(self.waiting) + 1):
            for name in list(self.writing):
                self.ledger.failed(name)
                self.ledger.free(self.writing.pop(name), 0)
            while self.quarantined:
                self.free()
            while self.offered:
                self.ledger.release(self.offered.pop(), 0)
            self.admit_waiting()
        assert not self.waiting
        assert not self.writing
        self.ledger.assert_empty("it")


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=30, derandomize=True, deadline=None)


@pytest.mark.parametrize("tokens", [29, 32], ids=["partial tail", "exact fit"])
def test_a_put_that_is_given_up_while_it_waits_for_room_gets_none_later(tokens: int) -> None:
    """What it waited for comes free, and goes to whoever is next: it ended in a KeyError."""
    it = Ledger()
    it.build(keeps=False)
    it.put(tokens, 0)
    it.admit_waiting()
    it.put(4, 0)
    it.put(8, 0)
    it.admit_waiting()
    assert (list(it.writing), it.waiting) == (["r1"], ["r2", "r3"]), "the first one fills the memory"
    it.ledger.failed("r2")
    it.waiting.remove("r2")
    it.ledger.free(it.writing.pop("r1"), 0)
    it.ledger.failed("r1")
    it.admit_waiting()
    assert list(it.writing) == ["r3"]
    it.teardown()


def test_what_is_brought_back_can_be_found_and_makes_room_again() -> None:
    counted: list[tuple[str, int]] = []
    ledger = StoreLedger(StoreMemory(2, keeps=True), BLOCK_TOKENS, lambda what, number: counted.append((what, number)))
    first, second = (Item("one", 2),), (Item("other", 2),)
    for items in (first, second, first):
        room = ledger.bring(items, 0)
        assert room is not None
        ledger.brought(room.generation, 0)
    assert counted == [("store: objects evicted", number) for number in (0, 1, 1)]
    ledger.assert_empty("the store")
