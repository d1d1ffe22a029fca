"""An engine that does what a test says, in the place of one that computes: whom it admits, what it has finished. It
keeps account of blocks as a real one does."""

from __future__ import annotations

from typing import Any

from pdflow.engine.sequence import Admitted, Dropped, Finished, Prefilled, Sequence
from pdflow.protocol.values import Allocation
from runtime.engine_node import EngineNode
from runtime.engines.job import Job


class HandPool:
    """Blocks as a test names them."""

    def __init__(self) -> None:
        self.held: dict[int, Allocation] = {}
        """By generation."""
        self.newest_generation = 0

    def take(self, allocation: Allocation) -> Allocation:
        assert allocation.generation not in self.held
        self.held[allocation.generation] = allocation
        self.newest_generation = max(self.newest_generation, allocation.generation)
        return allocation

    def quarantine(self, allocation: Allocation) -> None:
        assert self.held[allocation.generation] == allocation

    def release(self, allocation: Allocation) -> None:
        assert self.held.pop(allocation.generation) == allocation


class Hand:
    """As much of a LiveEngine as nodes call."""

    def __init__(self, node: EngineNode) -> None:
        self.node = node
        self.pool = HandPool()
        self.waiting: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.decoding: list[Sequence] = []

    def names(self, tokens: Any) -> tuple[int, ...]:
        return ()

    def submit(self, job: Job) -> None:
        self.waiting.append(job.seq)

    def enqueue(self, job: Job) -> None:
        self.submit(job)

    def loaded(self, seq: Sequence) -> None:
        _take(self.loading, seq)
        self.decoding.append(seq)

    def drop(self, seq: Sequence) -> Dropped:
        if _take(self.waiting, seq):
            return Dropped.AT_ONCE
        return Dropped.BLOCKS_ARE_YOURS if _take(self.loading, seq) else Dropped.NOT_HERE

    def release(self, allocation: Allocation) -> None:
        self.pool.release(allocation)

    # What a test says.

    def finish_prompt(self, seq: Sequence, allocation: Allocation) -> None:
        assert _take(self.waiting, seq)
        seq.allocation = self.pool.take(allocation)
        self.node.came(Prefilled(seq, 0))

    def admit(self, seq: Sequence, allocation: Allocation, cached_tokens: int) -> None:
        assert _take(self.waiting, seq), "the protocol has not let it in"
        seq.allocation, seq.cached_tokens = self.pool.take(allocation), cached_tokens
        self.loading.append(seq)
        self.node.came(Admitted(seq, 0))

    def decode_all(self) -> None:
        """What is loaded is decoded to its end, which takes no time."""
        for seq in self.decoding:
            assert seq.allocation is not None
            self.pool.release(seq.allocation)
            self.node.came(Finished(seq, 0))
        self.decoding.clear()


def _take(sequences: list[Sequence], seq: Sequence) -> bool:
    """Whether it was there; it is no more."""
    for at, one in enumerate(sequences):
        if one is seq:
            del sequences[at]
            return True
    return False
