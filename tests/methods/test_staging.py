"""Memory beside the blocks: who waits is served in turn and whole, no byte is given out twice, all comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdflow.memory.paged import PoolError
from pdflow.methods.method import Memory
from pdflow.methods.staging import KvSize, PagedStaging, RingStaging, Staging, TooLargeError, staging_of
from pdflow.protocol.values import Allocation

SIZE = KvSize(2, 100)
"""Two layers, 100 bytes of a token in each."""
MEMORIES: dict[str, Callable[[], Staging]] = {
    "ring": lambda: RingStaging.of_bytes(SIZE, 4096, step_bytes=64),
    "ring of blocks": lambda: RingStaging.of_bytes(SIZE, 8192, step_bytes=64, block_size=4),
    "buffer and pool": lambda: staging_of(Memory.BUFFER, SIZE, 0, 3000, 4096),
    "tensors": lambda: staging_of(Memory.TENSORS, SIZE, 0, 0, 0),
    "store": lambda: staging_of(Memory.STORE, SIZE, 0, 4000, 0),
    "pages": lambda: PagedStaging(SIZE, 4, 8),
    "pages of a store": lambda: PagedStaging(SIZE, 4, 8, evicts=True),
    "lookup buffer": lambda: staging_of(Memory.LOOKUP, SIZE, 0, 4000, 0),
}


class InTurn(RuleBasedStateMachine):
    """Against two lists: who waits, and who holds what."""

    @initialize(kind=st.sampled_from(sorted(MEMORIES)))
    def begin(self, kind: str) -> None:
        self.staging = MEMORIES[kind]()
        self.waiting: list[str] = []
        self.held: dict[str, Allocation] = {}
        self.count = 0

    @rule(tokens=st.integers(1, 30))
    def want(self, tokens: int) -> None:
        self.count += 1
        name = f"x{self.count}"
        try:
            self.staging.want(name, tokens)
        except TooLargeError:
            assert not self.staging.fits_ever(tokens)
            return
        self.waiting.append(name)
        self.serve()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        allocation = self.held.pop(name)
        self.staging.release(allocation)
        with pytest.raises(PoolError, match="not held"):
            self.staging.release(allocation)
        self.serve()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.waiting))
        assert self.staging.forget(name)
        assert not self.staging.forget(name)
        self.waiting.remove(name)
        self.serve()

    @precondition(lambda self: self.waiting)
    @rule()
    def evict(self) -> None:
        """If a memory names victims, their leaving serves whoever is first, and nobody's has been in vain."""
        victims = self.staging.victims()
        assert victims == list(self.held)[: len(victims)]
        for name in victims:
            assert self.staging.serve() is None
            self.staging.release(self.held.pop(name))
        before = len(self.waiting)
        self.serve()
        assert not victims or len(self.waiting) < before

    def serve(self) -> None:
        while (served := self.staging.serve()) is not None:
            name, allocation = served
            assert name == self.waiting.pop(0), "somebody was overtaken"
            assert allocation.generation not in [other.generation for other in self.held.values()]
            self.held[name] = allocation

    @invariant()
    def nobody_waits_at_an_empty_memory(self) -> None:
        if hasattr(self, "staging"):
            assert self.held or not self.waiting

    @invariant()
    def no_byte_belongs_to_two(self) -> None:
        if hasattr(self, "staging"):
            parts = [part for allocation in self.held.values() for part in allocation.blocks]
            if not isinstance(self.staging, RingStaging):
                return
            assert len(parts) == len(set(parts)) == SIZE.layers * len(self.held)

    @invariant()
    def a_fork_is_alike(self) -> None:
        if hasattr(self, "staging"):
            assert self.staging.fork().fingerprint() == self.staging.fingerprint()


TestInTurn = InTurn.TestCase
TestInTurn.settings = settings(max_examples=150, stateful_step_count=30, derandomize=True, deadline=None)


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_large_prompt_is_not_overtaken_for_ever(kind: str) -> None:
    """Small ones that come later wait behind it, though there is room for them."""
    staging = MEMORIES[kind]()
    staging.want("first", 8)
    _, first = staging.serve() or pytest.fail("an empty memory had no room")
    staging.want("large", 9)
    staging.want("small", 1)
    served = staging.serve()
    if served is not None:
        assert served[0] == "large"
        return
    staging.release(first)
    assert staging.serve() is not None
    assert "large" not in staging.waiting


def test_where_a_ring_has_room_can_be_said_however_often_it_has_been_gone_round() -> None:
    """Frames have 32 bits for it. Positions went beyond them after 4 GiB, and D's process ended; so would bytes of a
    ring that is larger."""
    for staging, tokens in (
        (RingStaging.of_bytes(SIZE, 4096, step_bytes=64), 12),
        (RingStaging.of_bytes(KvSize(2, 1 << 20), 8_000_000_000), 3000),
    ):
        steps = staging.ring.capacity_bytes // staging.ring.step_bytes
        for number in range(20):
            staging.want(f"x{number}", tokens)
            served = staging.serve()
            assert served is not None
            _, allocation = served
            assert all(0 <= part < steps < 1 << 32 for part in allocation.blocks)
            staging.release(allocation)
