"""P's scheduler alone: who holds a prompt, from its first piece to the last rank's release."""

from __future__ import annotations

from pdflow.protocol.dialect import STRICT
from pdflow.protocol.effects import AnswerPrefill, Note, ReleaseBlocks, SendLocal
from pdflow.protocol.events import (
    PrefillAborted,
    PrefillBegun,
    PrefillEnded,
    PrefillFinished,
    PrefillMissing,
    PrefillQueued,
    ShardReleased,
    SourceCompleted,
    SourceReady,
)
from pdflow.protocol.ids import EngineInfo, LeaseWord, Shards
from pdflow.protocol.messages import Code
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.values import Allocation

BLOCKS = Allocation(10, (100, 101))
BEGUN = PrefillBegun("x", BLOCKS, 32, 70, 1)
FINISHED = PrefillFinished("x", BLOCKS, 32, 70, 1)


def scheduler(pulls: bool = False) -> ProducerScheduler:
    """Of two ranks, with a prompt in its queue."""
    p = ProducerScheduler(EngineInfo("P", Shards(2, 1, 16)), 101, STRICT, pulls)
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


def words_of(effects: tuple[object, ...]) -> tuple[LeaseWord | None, ...]:
    """The lease words that ranks are sent with a prompt."""
    events = [effect.event for effect in effects if type(effect) is SendLocal]
    return tuple(event.source.lease_word for event in events if type(event) is SourceReady)


def test_a_prompt_that_has_begun_has_its_lease_words_before_it_is_answered() -> None:
    """Ranks expose them then, so no D finds none where P's answer has named one."""
    p = scheduler(pulls=True)
    words = words_of(p.handle(BEGUN, 0))
    assert None not in words
    assert len(set(words)) == 2
    effects = p.handle(FINISHED, 0)
    assert [type(effect.event) for effect in effects if type(effect) is SendLocal] == [SourceCompleted] * 2
    (answer,) = [effect for effect in effects if type(effect) is AnswerPrefill]
    assert answer.params.rank_words == words


def test_lease_words_of_a_prompt_that_is_given_up_are_forgotten() -> None:
    p = scheduler(pulls=True)
    p.handle(BEGUN, 0)
    begun = p.fingerprint()
    assert p.fork().fingerprint() == begun
    p.handle(PrefillAborted("x", Code.PREFILL_ABORTED), 0)
    assert p.fingerprint() != begun
    assert not p.begun_words


def test_a_prompt_that_is_pushed_has_no_lease_words() -> None:
    p = scheduler()
    assert words_of(p.handle(BEGUN, 0)) == (None, None)
    assert not p.begun_words


def test_an_abort_of_a_finished_prefill_leaves_the_prompt_to_its_lease() -> None:
    p = scheduler()
    p.handle(FINISHED, 0)
    before = p.fingerprint()
    [note] = p.handle(PrefillAborted("x", Code.CANCELLED), 0)
    assert isinstance(note, Note)
    assert p.fingerprint() == before


def test_a_shard_that_is_released_twice_counts_once() -> None:
    p = scheduler()
    p.handle(FINISHED, 0)
    p.handle(ShardReleased("x", 0, Code.NONE), 0)
    before = p.fingerprint()
    [note] = p.handle(ShardReleased("x", 0, Code.EXPIRED), 0)
    assert isinstance(note, Note)
    assert p.fingerprint() == before
    assert p.handle(ShardReleased("x", 1, Code.NONE), 0) == (ReleaseBlocks("x", BLOCKS, Code.NONE),)
    [note] = p.handle(ShardReleased("x", 1, Code.NONE), 0)
    assert isinstance(note, Note)
