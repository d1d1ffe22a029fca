"""P's scheduler alone: who holds a prompt, from its first piece to the last rank's release."""

from __future__ import annotations

from pdflow.protocol.dialect import STRICT
from pdflow.protocol.effects import ReleaseBlocks, SendLocal
from pdflow.protocol.events import (
    PrefillAborted,
    PrefillBegun,
    PrefillEnded,
    PrefillFinished,
    PrefillMissing,
    PrefillQueued,
    ShardReleased,
)
from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.protocol.messages import Code
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.values import Allocation

BLOCKS = Allocation(10, (100, 101))
BEGUN = PrefillBegun("x", BLOCKS, 32, 70, 1)
FINISHED = PrefillFinished("x", BLOCKS, 32, 70, 1)


def scheduler() -> ProducerScheduler:
    """Of two ranks, with a prompt in its queue."""
    p = ProducerScheduler(EngineInfo("P", Shards(2, 1, 16)), 101, STRICT, False)
    p.handle(PrefillQueued("x", "u"), 0)
    return p


def test_a_rank_that_has_released_is_notified_that_no_kv_will_come() -> None:
    """Its sibling may hold its shard for as long as it likes."""
    p = scheduler()
    assert p.handle(PrefillMissing("x", 0), 0) == ()
    p.handle(FINISHED, 0)
    assert p.handle(PrefillMissing("x", 0), 0) == ()
    assert p.handle(ShardReleased("x", 0, Code.NONE), 0) == ()
    assert p.handle(PrefillMissing("x", 0), 0) == (SendLocal("P.r0", PrefillEnded("x", Code.NO_REQUEST)),)
    assert p.handle(PrefillMissing("x", 1), 0) == ()


def test_a_prompt_begun_and_given_up_is_freed_when_every_rank_has_released_it() -> None:
    p = scheduler()
    p.handle(BEGUN, 0)
    effects = p.handle(PrefillAborted("x", Code.PREFILL_ABORTED), 0)
    assert effects == tuple(SendLocal(rank, PrefillEnded("x", Code.PREFILL_ABORTED)) for rank in ("P.r0", "P.r1"))
    assert p.handle(ShardReleased("x", 0, Code.PREFILL_ABORTED), 0) == ()
    assert p.handle(ShardReleased("x", 1, Code.PREFILL_ABORTED), 0) == (
        ReleaseBlocks("x", BLOCKS, Code.PREFILL_ABORTED),
    )
    assert not p.products


def test_a_prompt_released_before_it_was_computed_is_remembered_until_it_is() -> None:
    p = scheduler()
    p.handle(BEGUN, 0)
    p.handle(ShardReleased("x", 0, Code.EXPIRED), 0)
    assert p.handle(ShardReleased("x", 1, Code.EXPIRED), 0) == (ReleaseBlocks("x", BLOCKS, Code.EXPIRED),)
    assert not any(type(effect) is SendLocal for effect in p.handle(FINISHED, 0))
    assert not p.products
