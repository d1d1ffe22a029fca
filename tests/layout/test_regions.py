"""A prompt in memory beside the blocks: every cell has a place of its own, within what the prompt was given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.layout.descriptors import descriptors, rank_memory
from pdflow.layout.pairing import runs_within
from pdflow.layout.ranks import writers
from pdflow.layout.regions import KvRegion, lying
from pdflow.layout.shapes import KvShape, LayoutError
from pdflow.methods.staging import KvSize, RingStaging

SHAPE = KvShape(3, 2, 4, 2, 4)


def ring(length: int) -> tuple[KvRegion, RingStaging]:
    memory = rank_memory(SHAPE, 1, 1, base_address=1 << 20)
    size = KvSize(3, SHAPE.rank_bytes_per_token(1) // 3)
    staging = RingStaging.of_bytes(size, length, step_bytes=32, block_size=SHAPE.block_size)
    return KvRegion("ring", memory, staging.ring.capacity_bytes, staging.ring.step_bytes), staging


@given(tokens=st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_prompts_in_a_ring_share_no_byte_and_leave_none_out(tokens: list[int]) -> None:
    region, staging = ring(6000)
    pair = writers(SHAPE, 1, 1, 1)[0]
    blocks = rank_memory(SHAPE, 8, 1)
    taken: set[int] = set()
    for number, count in enumerate(tokens):
        staging.enqueue(str(number), count)
        admission = staging.admit_next()
        if admission is None:
            break
        memory, there = lying(region, admission[1].blocks, count)
        pieces = descriptors(pair, blocks, memory, runs_within(range(8), 4, there, 4, 0, 0, count), coalesce=True)
        bytes_ = [at for piece in pieces for at in range(piece.target_address, piece.target_address + piece.length)]
        assert len(bytes_) == count * SHAPE.bytes_per_token
        assert len({*bytes_}) == len(bytes_)
        assert not taken & {*bytes_}
        assert min(bytes_) >= 1 << 20
        assert max(bytes_) < (1 << 20) + region.ring_bytes
        taken |= {*bytes_}


def test_pages_are_blocks() -> None:
    memory = rank_memory(SHAPE, 5, 1, base_address=64)
    assert lying(KvRegion("pages", memory), (3, 1), 7) == (memory, (3, 1))


def test_a_ring_that_a_peer_made_up_is_refused() -> None:
    region, _ = ring(6000)
    with pytest.raises(LayoutError, match="2 parts in a ring of 5984 bytes, for 3 layers"):
        lying(region, (0, 64), 4)
    with pytest.raises(LayoutError, match="a ring of 0 bytes"):
        lying(KvRegion("ring", region.memory, 0), (0, 64, 128), 4)
