"""The oracle speaks when something is wrong, names it rightly, tells the story, and is silent otherwise."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdflow.protocol.consumer.cell import WAITING
from pdflow.protocol.consumer.rules import RULES as CONSUMER_RULES
from pdflow.protocol.consumer.rules import freed
from pdflow.protocol.effects import (
    Commit,
    Enqueue,
    FreeBlocks,
    Outcome,
    PostWrite,
    Quarantine,
    ReleaseBlocks,
    Resolve,
    Send,
    SendLocal,
)
from pdflow.protocol.errors import InvariantViolated
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    FenceEnded,
    PairLanded,
    PrefillBegun,
    PrefillFinished,
    Received,
    ShardReleased,
    Source,
    SourceReady,
    TimeReached,
    WriteEnded,
    WriteStopped,
)
from pdflow.protocol.messages import CancelAck, Code, Disposition, Progress, Register, RegisterAck
from pdflow.protocol.producer import rules as producer_rules
from pdflow.protocol.producer.cell import IN_FLIGHT, LeaseEnded
from pdflow.protocol.producer.lease import expired_unclaimed
from pdflow.protocol.values import Allocation, S
from tests.support.cluster import Cluster


def in_flight() -> tuple[Cluster, PostWrite]:
    c = Cluster()
    c.holding = {"WRITE"}
    c.prefill_and_admit("r", "x")
    c.run()
    return c, c.wrote()[0]


def breaks(c: Cluster, name: str, node: str, event: Any, *effects: Any) -> InvariantViolated:
    assert c.oracle is not None
    with pytest.raises(InvariantViolated) as found:
        c.oracle.observe(node, event, effects, c.now)
    assert found.value.name == name
    return found.value


def announced(event: PrefillBegun | PrefillFinished) -> SendLocal:
    """What a P scheduler makes of it, if it has not said so before."""
    source = Source(event.allocation, event.num_tokens, event.digest, event.weights, None)
    return SendLocal("P.r0", SourceReady(event.xid, "r", source))


TICK = TimeReached()


def test_s1_free_under_a_write() -> None:
    c, write = in_flight()
    assert c.oracle is not None
    c.oracle.observe("D", TICK, (Resolve("r", Outcome.FAILED, Code.STALLED),), 0)
    error = breaks(c, "S1", "D", TICK, FreeBlocks(write.registration.target))
    assert "PostWrite" in error.counterexample


def test_s1_write_into_what_was_freed_or_is_anothers() -> None:
    c, write = in_flight()
    stale = msgspec.structs.replace(write.registration, target=Allocation(77, (1, 2)))
    breaks(c, "S1", "P.r0", TICK, msgspec.structs.replace(write, registration=stale))
    c.prefill_and_admit("s", "y")
    c.run()
    other = msgspec.structs.replace(write, op=c.wrote()[1].op)
    breaks(c, "S1", "P.r0", TICK, other)


def test_s1_blocks_allocated_twice() -> None:
    c, write = in_flight()
    c.decode("s", "x")
    again = Allocation(99, (5, write.registration.target.blocks[0]))
    breaks(c, "S1", "D", DecodeAdmitted("s", again, 0, 64, 7, 1))


def test_s1_landing_through_a_fence() -> None:
    c, write = in_flight()
    assert c.oracle is not None
    c.oracle.observe("D.r0", FenceEnded("P.r0"), (), 0)
    c.oracle.observe("P.r0", WriteEnded(write.op, False), (), 0)
    c.oracle.observe("P.r0", FenceEnded("D.r0"), (), 0)
    c.oracle.observe("P.r0", TICK, (write,), 0)
    breaks(c, "S1", "P.r0", WriteEnded(write.op, True))


def test_a_notification_may_be_in_flight_while_p_fences() -> None:
    """Its bytes have landed before it, whatever P's handle and P's fence say of the WRITE."""
    c, write = in_flight()
    assert c.oracle is not None
    c.oracle.observe("P.r0", WriteEnded(write.op, False), (), 0)
    c.oracle.observe("P.r0", FenceEnded("D.r0"), (), 0)
    c.oracle.observe("D.r0", Received("P.r0", c.incarnations["P"], write.notification), (), 0)
    c.oracle.observe("D", TICK, (Commit("r"),), 0)


def test_s2_release_under_a_write() -> None:
    c, write = in_flight()
    breaks(c, "S2", "P", TICK, ReleaseBlocks("x", write.source, Code.EXPIRED))


def test_s2_write_from_what_was_released() -> None:
    c, write = in_flight()
    breaks(c, "S2", "P.r0", TICK, msgspec.structs.replace(write, source=Allocation(55, (1,))))


def test_s2_prefill_into_what_is_held() -> None:
    c, write = in_flight()
    for kind in (PrefillBegun, PrefillFinished):
        event = kind("z", write.source, 64, 7, 1)
        breaks(c, "S2", "P", event, announced(event))


def test_s3_commit_after_a_write_was_stopped() -> None:
    c, write = in_flight()
    assert c.oracle is not None
    c.oracle.observe("P.r0", WriteStopped(write.op), (), 0)
    breaks(c, "S3", "D", TICK, Commit("r"))


def test_s7_a_stopped_write_that_is_reported_as_sent() -> None:
    c, write = in_flight()
    assert c.oracle is not None
    c.oracle.observe("P.r0", WriteStopped(write.op), (), 0)
    breaks(c, "S7", "P.r0", TICK, Send("D.r0", CancelAck(write.op.reg, 0, Disposition.SENT, True)))


def test_s3_commit_before_everything_landed() -> None:
    c, _ = in_flight()
    breaks(c, "S3", "D", TICK, Commit("r"))


def test_s3_same_write_twice() -> None:
    c, write = in_flight()
    breaks(c, "S3", "P.r0", TICK, write)


@pytest.mark.parametrize("field", ["digest", "weights", "num_tokens"])
def test_s4_other_content(field: str) -> None:
    c, write = in_flight()
    c.generation += 1
    event = PrefillFinished("z", Allocation(c.generation, (1, 2, 3, 4)), 64, 7, 1)
    other = msgspec.structs.replace(event, **{field: 48})
    assert c.oracle is not None
    c.oracle.observe("P", other, (announced(other),), 0)
    c.oracle.observe("P.r0", WriteEnded(write.op, False), (), 0)
    c.oracle.observe("P.r0", FenceEnded("D.r0"), (), 0)
    breaks(c, "S4", "P.r0", TICK, msgspec.structs.replace(write, source=event.allocation))


def test_s4_wrong_number_of_bytes() -> None:
    c, write = in_flight()
    assert c.oracle is not None
    c.oracle.observe("P.r0", WriteEnded(write.op, False), (), 0)
    c.oracle.observe("P.r0", FenceEnded("D.r0"), (), 0)
    breaks(c, "S4", "P.r0", TICK, msgspec.structs.replace(write, nbytes=write.nbytes - 1))


@pytest.mark.parametrize(
    "effects",
    [
        (Commit("nobody"),),
        (Resolve("nobody", Outcome.FAILED, Code.IO),),
        (Resolve("r", Outcome.FAILED, Code.IO), Resolve("r", Outcome.FAILED, Code.IO)),
        (Resolve("r", Outcome.FAILED, Code.IO), Commit("r")),
        (Enqueue("r"),),
        (FreeBlocks(Allocation(66, (1,))),),
        (Quarantine(Allocation(66, (1,))),),
        (ReleaseBlocks("nothing", Allocation(66, (1,)), Code.NONE),),
    ],
)
def test_s6_one_outcome_and_one_release(effects: tuple[Any, ...]) -> None:
    c, _ = in_flight()
    breaks(c, "S6", "P" if type(effects[0]) is ReleaseBlocks else "D", TICK, *effects)


def test_s7_only_what_was_sent_is_reported_as_sent() -> None:
    c, write = in_flight()
    reg = write.op.reg
    breaks(c, "S7", "P.r0", TICK, Send("D.r0", CancelAck(reg, 0, Disposition.SENT, True)))
    breaks(c, "S7", "P.r0", TICK, Send("D.r0", RegisterAck(reg, 0, Progress.SENT, (0,))))
    report = SendLocal("P", ShardReleased("x", 0, Code.NONE))
    breaks(c, "S7", "P.r0", WriteEnded(write.op, False), report)


def test_s8_a_frame_of_another_incarnation() -> None:
    c, write = in_flight()
    breaks(c, "S8", "D.r0", Received("P.r0", 9, write.notification), SendLocal("D", PairLanded(write.op, "P.r0")))


def test_s9_a_frame_that_moves_what_is_not_its_senders() -> None:
    c, write = in_flight()
    breaks(c, "S9", "P.r0", Received("E.r0", 5, write.registration), Send("D.r0", RegisterAck(write.op.reg, 0, 1, ())))
    breaks(c, "S9", "D", PairLanded(write.op, "Q.r0"), Commit("r"))


def test_quiescence_names_what_is_left() -> None:
    c, _ = in_flight()
    assert c.oracle is not None
    with pytest.raises(InvariantViolated, match="quiescence: D still holds request 'r'"):
        c.oracle.finish(c.now)


def test_lost_engines_leave_nothing_behind() -> None:
    for engine in ("P", "D"):
        c, _ = in_flight()
        c.crash(engine)
        assert c.oracle is not None
        if engine == "D":
            c.oracle.observe("P.r0", WriteEnded(c.wrote()[0].op, True), (), 0)
            c.oracle.observe("P", TICK, (ReleaseBlocks("x", c.wrote()[0].source, Code.NONE),), 0)
            c.oracle.finish(0)


# Planted in the machine rather than in its effects: the oracle finds them in a run.


def test_a_lease_that_frees_under_a_write_is_caught(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(producer_rules.RULES, (IN_FLIGHT, LeaseEnded), expired_unclaimed)
    c, _ = in_flight()
    with pytest.raises(InvariantViolated, match="S2"):
        c.pass_time(31 * S)


def test_an_abort_that_frees_at_once_is_caught(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def frees(cell, event, now, ctx):  # type: ignore[no-untyped-def]
        after, effects = freed(cell, ctx)
        return after, (Resolve(cell.request_id, Outcome.CANCELLED, event.code), *effects)

    monkeypatch.setitem(CONSUMER_RULES, (WAITING, DecodeAborted), frees)
    c, _ = in_flight()
    with pytest.raises(InvariantViolated, match="S1") as found:
        c.abort("r")
    assert "DecodeAborted" in found.value.counterexample
    assert "Register" in found.value.counterexample
    assert Register.__name__ in str(found.value)
