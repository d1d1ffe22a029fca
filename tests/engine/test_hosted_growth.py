"""A host that ends a run of decode steps early leaves no block behind."""

from __future__ import annotations

from pdflow.cost import StepCost
from pdflow.engine import Limits, Sequence
from pdflow.engine.hosted import HostedEngine
from pdflow.memory.caching import CachingPool


def test_blocks_that_were_counted_for_a_step_are_not_counted_again() -> None:
    """What decoding takes is counted when blocks come back to a pool that remembers prefixes: here in the second step,
    which the host then delays, so that the run ends before it."""
    pool = CachingPool(100, 1)
    engine = HostedEngine(Limits(block_size=4), StepCost(c0=10_000_000), pool)
    decoding, dropped = (Sequence(index, 8, 40, remote_kv=True) for index in range(2))
    for seq in (decoding, dropped):
        engine.submit(seq, 0)
    engine.advance(0)
    engine.loaded(decoding, 0)
    engine.advance(0)
    engine.drop(dropped, 15_000)
    assert dropped.allocation is not None
    pool.release(dropped.allocation)
    engine.stretch(15_001, 15_002)
    while (wake := engine.wake_at()) is not None:
        engine.advance(wake)
    assert decoding.generated == 40
    assert pool.free == pool.num_blocks
