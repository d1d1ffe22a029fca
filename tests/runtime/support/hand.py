"""An engine that does what a test says, in the place of one that computes: whom it admits, what it has finished. It
keeps account of blocks as a real one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdflow.engine.sequence import Admitted, Dropped, Finished, Prefilled, Sequence
from pdflow.protocol.values import Allocation
from pdflow_runtime.engines.job import Job
from pdflow_runtime.nodes.engine_node import LiveEngineNode


class HandPool:
    """Blocks as a test names them."""

    def __init__(self) -> None:
        self.held: dict[int, Allocation] = {}
        """By generation."""
        self.in_quarantine: set[int] = set()
        self.newest_generation = 0

    @property
    def quarantined(self) -> int:
        return sum(len(self.held[generation].blocks) for generation in self.in_quarantine)

    def holds(self, allocation: Allocation) -> bool:
        return self.held.get(allocation.generation) == allocation

    def is_quarantined(self, allocation: Allocation) -> bool:
        return allocation.generation in self.in_quarantine

    def take(self, allocation: Allocation) -> Allocation:
        assert allocation.generation not in self.held
        self.held[allocation.generation] = allocation
        self.newest_generation = max(self.newest_generation, allocation.generation)
        return allocation

    def quarantine(self, allocation: Allocation) -> None:
        assert self.held[allocation.generation] == allocation
        self.in_quarantine.add(allocation.generation)

    def release(self, allocation: Allocation) -> None:
        assert self.held.pop(allocation.generation) == allocation
        self.in_quarantine.discard(allocation.generation)


class Hand:
    """As much of a LiveEngine as nodes call."""

    def __init__(self, node: LiveEngineNode, loads: Callable[[Sequence], None]) -> None:
        self.node = node
        self.loads = loads
        """Told of whose KV is here."""
        self.pool = HandPool()
        self.stands_still = False
        self.waiting: list[Sequence] = []
        self.computing: list[Sequence] = []
        self.computed: list[Sequence] = []
        """Of which the node has not been told."""
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
        self.loads(seq)

    def drop(self, seq: Sequence) -> Dropped:
        if _take(self.waiting, seq):
            return Dropped.AT_ONCE
        if _take(self.computing, seq) or _take(self.decoding, seq):
            self._free(seq)
            return Dropped.AT_ONCE
        return Dropped.BLOCKS_ARE_YOURS if _take(self.loading, seq) else Dropped.NOT_HERE

    def release(self, allocation: Allocation) -> None:
        self.pool.release(allocation)

    def hold(self) -> None:
        self.stands_still = True

    def resume(self) -> None:
        self.stands_still = False

    # What a test says.

    def compute(self, seq: Sequence, allocation: Allocation) -> None:
        """A prompt is computed from now on, in these blocks."""
        assert _take(self.waiting, seq)
        seq.allocation = self.pool.take(allocation)
        self.computing.append(seq)

    def finish_prompt(self, seq: Sequence) -> None:
        """All of it is computed."""
        assert _take(self.computing, seq)
        self.computed.append(seq)

    def report_prompt(self, seq: Sequence) -> None:
        assert _take(self.computed, seq)
        self.node.on_engine_output(Prefilled(seq, 0))

    def give(self, seq: Sequence, allocation: Allocation, cached_tokens: int) -> None:
        """It has blocks from now on."""
        assert _take(self.waiting, seq), "the protocol has not let it in"
        seq.allocation, seq.cached_tokens = self.pool.take(allocation), cached_tokens
        self.loading.append(seq)

    def report_admitted(self, seq: Sequence) -> None:
        self.node.on_engine_output(Admitted(seq, 0))

    def preempt(self, seq: Sequence) -> None:
        """Its blocks are others' for a while."""
        self._free(seq)
        seq.allocation = None

    def decode(self, seq: Sequence) -> None:
        """To its end."""
        assert _take(self.decoding, seq)
        self._free(seq)
        self.node.on_engine_output(Finished(seq, 0))

    def decode_all(self) -> None:
        """What is loaded is decoded to its end, which takes no time."""
        for seq in tuple(self.decoding):
            self.decode(seq)

    def _free(self, seq: Sequence) -> None:
        if seq.allocation is not None:
            self.pool.release(seq.allocation)


def _take(sequences: list[Sequence], seq: Sequence) -> bool:
    """Whether it was there; it is no more."""
    for at, one in enumerate(sequences):
        if one is seq:
            del sequences[at]
            return True
    return False
