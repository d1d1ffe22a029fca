"""Memory beside the blocks: who waits is served in turn and whole, no byte is given out twice, all comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdflow.memory.paged import PoolError
from pdflow.methods.method import MemoryKind
from pdflow.methods.staging import KvSize, PagedStaging, RingStaging, Staging, TooLargeError, staging_of
from pdflow.protocol.values import Allocation

SIZE = KvSize(2, 100)
"""Two layers, 100 bytes of a token in each."""
PAGE_TOKENS, PAGES = 4, 8
MEMORIES: dict[str, Callable[[], Staging]] = {
    "ring": lambda: RingStaging.of_bytes(SIZE, 4096, step_bytes=64),
    "ring of blocks": lambda: RingStaging.of_bytes(SIZE, 8192, step_bytes=64, block_size=4),
    "buffer and pool": lambda: staging_of(MemoryKind.BUFFER, SIZE, 0, 3000, 4096),
    "tensors": lambda: staging_of(MemoryKind.TENSORS, SIZE, 0, 0, 0),
    "store": lambda: staging_of(MemoryKind.STORE, SIZE, 0, 4000, 0),
    "pages": lambda: PagedStaging(SIZE, PAGE_TOKENS, PAGES),
    "pages of a store": lambda: PagedStaging(SIZE, PAGE_TOKENS, PAGES, evicts=True),
    "lookup buffer": lambda: staging_of(MemoryKind.LOOKUP, SIZE, 0, 4000, 0),
}


def pages_of(tokens: int) -> int:
    """Counted one by one."""
    return len({token // PAGE_TOKENS for token in range(tokens)})


class InTurn(RuleBasedStateMachine):
    """Against two lists: who waits, and who holds what."""

    @initialize(kind=st.sampled_from(sorted(MEMORIES)))
    def begin(self, kind: str) -> None:
        self.staging = MEMORIES[kind]()
        self.waiting: list[str] = []
        self.held: dict[str, Allocation] = {}
        self.tokens: dict[str, int] = {}
        self.count = 0

    @rule(tokens=st.integers(1, 33))
    def enqueue(self, tokens: int) -> None:
        self.count += 1
        name = f"x{self.count}"
        try:
            self.staging.enqueue(name, tokens)
        except TooLargeError:
            assert not self.staging.fits_ever(tokens)
            return
        self.waiting.append(name)
        self.tokens[name] = tokens
        self.admit_next()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        allocation = self.held.pop(name)
        self.staging.release(allocation)
        with pytest.raises(PoolError, match="not held"):
            self.staging.release(allocation)
        self.admit_next()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.waiting))
        assert self.staging.forget(name)
        assert not self.staging.forget(name)
        self.waiting.remove(name)
        self.admit_next()

    @precondition(lambda self: self.waiting)
    @rule()
    def evict(self) -> None:
        """If a memory names victims, their leaving serves whoever is first, and nobody's has been in vain."""
        victims = self.staging.victims()
        assert victims == list(self.held)[: len(victims)]
        for name in victims:
            assert self.staging.admit_next() is None
            self.staging.release(self.held.pop(name))
        before = len(self.waiting)
        self.admit_next()
        assert not victims or len(self.waiting) < before

    def admit_next(self) -> None:
        while (admission := self.staging.admit_next()) is not None:
            name, allocation = admission
            assert name == self.waiting.pop(0), "somebody was overtaken"
            assert allocation.generation not in [other.generation for other in self.held.values()]
            self.held[name] = allocation
        if self.waiting and isinstance(self.staging, PagedStaging):
            taken = sum(pages_of(self.tokens[name]) for name in self.held)
            assert pages_of(self.tokens[self.waiting[0]]) > PAGES - taken, "there was room"

    @invariant()
    def a_prompt_has_pages_for_its_last_tokens_too(self) -> None:
        if isinstance(getattr(self, "staging", None), PagedStaging):
            for name, allocation in self.held.items():
                assert len(allocation.blocks) == pages_of(self.tokens[name])

    @invariant()
    def nobody_waits_at_an_empty_memory(self) -> None:
        if hasattr(self, "staging"):
            assert self.held or not self.waiting

    @invariant()
    def no_byte_belongs_to_two(self) -> None:
        if hasattr(self, "staging"):
            extents = [extent for allocation in self.held.values() for extent in allocation.blocks]
            if isinstance(self.staging, PagedStaging):
                assert sorted([*extents, *self.staging.free]) == list(range(PAGES))
            if not isinstance(self.staging, RingStaging):
                return
            assert len(extents) == len(set(extents)) == SIZE.layers * len(self.held)

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
    staging.enqueue("first", 8)
    _, first = staging.admit_next() or pytest.fail("an empty memory had no room")
    staging.enqueue("large", 9)
    staging.enqueue("small", 1)
    admission = staging.admit_next()
    if admission is not None:
        assert admission[0] == "large"
        return
    staging.release(first)
    assert staging.admit_next() is not None
    assert "large" not in staging.waiting


@pytest.mark.parametrize("evicts", [False, True])
def test_pages_that_a_prompt_fills_exactly_and_one_that_it_only_begins(evicts: bool) -> None:
    """Eight pages of four tokens: 32 tokens fit, and so do 29; behind nine tokens, 20 fit and 21 do not."""

    def empty() -> PagedStaging:
        return PagedStaging(SIZE, PAGE_TOKENS, PAGES, evicts)

    def pages_admitted(staging: Staging, tokens: int) -> int | None:
        staging.enqueue(f"of {tokens}", tokens)
        found = staging.admit_next()
        return None if found is None else len(found[1].blocks)

    assert [pages_admitted(empty(), tokens) for tokens in (1, 4, 5, 29, 32)] == [1, 1, 2, 8, 8]
    with pytest.raises(TooLargeError, match="33 tokens"):
        empty().enqueue("x", 33)
    staging = empty()
    assert (pages_admitted(staging, 9), pages_admitted(staging, 20), pages_admitted(staging, 1)) == (3, 5, None)
    assert staging.victims() == (["of 9"] if evicts else [])
    assert not staging.free
    staging = empty()
    assert (pages_admitted(staging, 9), pages_admitted(staging, 21)) == (3, None)
    assert staging.victims() == (["of 9"] if evicts else [])
    assert staging.forget("of 21")
    assert pages_admitted(staging, 20) == 5


def test_no_more_have_to_go_than_the_first_needs() -> None:
    """Three pages come back with nine tokens, which is what twelve take."""
    staging = PagedStaging(SIZE, PAGE_TOKENS, PAGES, evicts=True)
    for tokens in (9, 20):
        staging.enqueue(f"of {tokens}", tokens)
        assert staging.admit_next() is not None
    staging.enqueue("next", 12)
    assert staging.victims() == ["of 9"]


def test_with_room_for_the_first_exactly_nobody_has_to_go() -> None:
    staging = PagedStaging(SIZE, PAGE_TOKENS, PAGES, evicts=True)
    staging.enqueue("held", 9)
    assert staging.admit_next() is not None
    staging.enqueue("fits", 20)
    assert staging.victims() == []
    assert staging.admit_next() is not None


def test_a_layer_in_a_ring_of_blocks_holds_all_of_its_last_block() -> None:
    ring = RingStaging.of_bytes(SIZE, 8192, step_bytes=64, block_size=PAGE_TOKENS)
    assert [ring.layer_bytes(tokens) for tokens in (4, 5, 8)] == [448, 832, 832], "400 and 800 bytes, in steps of 64"


def test_a_rings_offset_fits_its_field_after_any_number_of_wraps() -> None:
    """Frames have 32 bits for it. Positions went beyond them after 4 GiB, and D's process ended; so would bytes of a
    ring that is larger."""
    for staging, tokens in (
        (RingStaging.of_bytes(SIZE, 4096, step_bytes=64), 12),
        (RingStaging.of_bytes(KvSize(2, 1 << 20), 8_000_000_000), 3000),
    ):
        steps = staging.ring.capacity_bytes // staging.ring.step_bytes
        for number in range(20):
            staging.enqueue(f"x{number}", tokens)
            admission = staging.admit_next()
            assert admission is not None
            _, allocation = admission
            assert all(0 <= extent < steps < 1 << 32 for extent in allocation.blocks)
            staging.release(allocation)
