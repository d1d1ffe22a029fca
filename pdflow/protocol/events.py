"""Events: the inputs of an endpoint.

They are frozen values, named in the past tense. Each comes from one of four sources: the engine, the other endpoints of
the same engine, the transport, time. A peer's frame arrives as `Received` and is data: it never raises.
"""

from __future__ import annotations

from typing import TypeAlias, final

from pdflow.protocol.ids import KvParams, LeaseWord, Op
from pdflow.protocol.messages import Code, Done, Message, Progress, Register
from pdflow.protocol.timers import Timer
from pdflow.protocol.values import Address, Allocation, EngineId, RequestId, Value, Xid

# From the engine, to its P scheduler. It asks for `type(event)`, which mypy sees to be exhaustive if they are final.


@final
class PrefillQueued(Value, frozen=True, gc=False):
    """A prefill leg has reached the engine."""

    xid: Xid
    request_id: RequestId


@final
class PrefillBegun(Value, frozen=True, gc=False):
    """The first part of the prompt's KV is where it is sent from, with room for all of it: pieces may be sent."""

    xid: Xid
    allocation: Allocation
    num_tokens: int
    digest: int
    weights: int


@final
class PrefillFinished(Value, frozen=True, gc=False):
    """The prompt's KV is computed and its blocks are still held. What was begun has the same allocation as then."""

    xid: Xid
    allocation: Allocation
    num_tokens: int
    digest: int
    weights: int


@final
class PrefillAborted(Value, frozen=True, gc=False):
    """The prefill ended without KV, or its client went away; its blocks are already free."""

    xid: Xid
    code: Code


# From the engine, to its D scheduler.


class DecodeQueued(Value, frozen=True, gc=False):
    """A decode leg has reached the engine. `num_blocks` is what its prompt will take."""

    request_id: RequestId
    params: KvParams
    num_blocks: int
    deadline_ns: int
    """Duration from now, 0 for the default."""


class DecodeAdmitted(Value, frozen=True, gc=False):
    """Blocks are allocated for tokens token_start .. token_start + num_tokens; before them is a prefix hit."""

    request_id: RequestId
    allocation: Allocation
    token_start: int
    num_tokens: int
    digest: int
    weights: int


class DecodeHit(Value, frozen=True, gc=False):
    """Every block of the prompt is here already and referenced: no transfer is wanted."""

    request_id: RequestId


class DecodeAborted(Value, frozen=True, gc=False):
    """The client went away, or the engine refused the request: at any moment before it is loaded."""

    request_id: RequestId
    code: Code


class PrefillLegEnded(Value, frozen=True, gc=False):
    """The router reports the end of the prefill leg (vllm-compat quarantine rests on it)."""

    request_id: RequestId
    ok: bool


# Between the endpoints of one engine: scheduler to rank.


class Source(Value, frozen=True, gc=False):
    """The prompt's KV at P: blocks, how many tokens from position 0, and what it was computed from."""

    allocation: Allocation
    num_tokens: int
    digest: int
    weights: int
    lease_word: LeaseWord | None
    complete: bool = True
    """False while the prompt is still being computed; no lease runs then."""


class SourceReady(Value, frozen=True, gc=False):
    """This rank's shard of a finished prompt may be written or read."""

    xid: Xid
    request_id: RequestId
    source: Source


class SourceCompleted(Value, frozen=True, gc=False):
    """A prompt that `SourceReady` announced as incomplete is wholly computed: its lease runs from now on."""

    xid: Xid


class PrefillEnded(Value, frozen=True, gc=False):
    """No KV will come for this xid, or no more of it."""

    xid: Xid
    code: Code


class FrameOrdered(Value, frozen=True, gc=False):
    """The scheduler wants this frame sent to these peers, connecting first where needed."""

    to: tuple[Address, ...]
    message: Message


class ReadOrdered(Value, frozen=True, gc=False):
    """The scheduler wants this rank's shards read from these P ranks (pull)."""

    sources: tuple[Address, ...]
    readers: tuple[int, ...]
    """How many D ranks read each source, in the order of the sources."""
    params: KvParams
    registration: Register
    """This rank's blocks and token range, as a registration would name them."""


class FenceOrdered(Value, frozen=True, gc=False):
    peer: Address


# Rank to scheduler.


@final
class SourceWithdrawn(Value, frozen=True, gc=False):
    """The memory of this prompt's KV is needed: its lease ends now for every transfer that has not begun. Goes from the
    engine to its P scheduler, and from there to the ranks."""

    xid: Xid


@final
class ShardReleased(Value, frozen=True, gc=False):
    """Rank `rank` of P no longer holds the prompt: nothing that it started can still read the blocks."""

    xid: Xid
    rank: int
    code: Code


@final
class PrefillMissing(Value, frozen=True, gc=False):
    """A registration waits for this xid, and the rank has no prompt of it."""

    xid: Xid
    rank: int


class PairReported(Value, frozen=True, gc=False):
    """P rank's progress with one of our registrations, as seen by one D rank."""

    op: Op
    sender: Address
    progress: Progress
    synced: bool = False
    """In answer to a SYNC."""


class PairLanded(Value, frozen=True, gc=False):
    """A shard has arrived, complete and visible; its writer has ended. `done`: the content of its notification."""

    op: Op
    sender: Address
    done: Done | None = None


class PairFailed(Value, frozen=True, gc=False, omit_defaults=True):
    """A shard will not arrive. `settled`: its writer has ended, so nothing can land any more."""

    # Defaults are left out where it is encoded: digests of recorded counterexamples are older than the last field.

    op: Op
    sender: Address
    code: Code
    settled: bool
    unsent: bool = False
    """Nothing of it has left D, for want of a connection: that is no sign of P."""


class PairMissing(Value, frozen=True, gc=False):
    """P answered a SYNC sent after our REG and does not know it."""

    op: Op


class PeerResponded(Value, frozen=True, gc=False):
    """One P rank has sent something: it is alive."""

    peer: Address


class ConnectionLost(Value, frozen=True, gc=False):
    """The connection of a D rank to the peer is lost: what the peer has answered since does not arrive."""

    peer: Address


class PeerFenced(Value, frozen=True, gc=False):
    """Nothing from this peer can land at this D rank any more: fenced, or dead by proof."""

    peer: Address
    d_rank: int
    newest: int
    """The `seq` of the newest registration that the rank had received by then: what the scheduler has ordered since may
    have been done after the fence. 0 in vllm-compat, where registrations have no numbers."""


class ReconnectRefused(Value, frozen=True, gc=False):
    """The connection of this D rank to the peer is lost, and the peer's address has refused another: no process listens
    there. That proves nothing of WRITEs that are under way."""

    peer: Address
    d_rank: int
    newest: int
    """The `seq` of the newest registration that the rank had received by then, as in PeerFenced."""


class PeerRestarted(Value, frozen=True, gc=False):
    """Another incarnation of this engine has answered with our nonce: the one that we registered with is retired."""

    engine: EngineId
    retired: int


# From the transport.


class Received(Value, frozen=True, gc=False):
    sender: Address
    incarnation: int
    message: Message


class HandshakeEnded(Value, frozen=True, gc=False):
    """A handshake has ended. `incarnation` is the one in the reply that echoed our fresh nonce."""

    peer: Address
    ok: bool
    incarnation: int
    refused: bool = False
    """The peer's address refused the connection: no process listens there. A timeout is no refusal, nor is a connection
    that breaks, nor an answer of somebody else."""


class PeerLost(Value, frozen=True, gc=False):
    """The connection broke; what was sent may or may not have arrived."""

    peer: Address


class PeerExited(Value, frozen=True, gc=False):
    """Proof of death of that rank's process, and its endpoint reported closed after the proof (F9)."""

    peer: Address


class WriteEnded(Value, frozen=True, gc=False):
    """A WRITE's handle is final and released. `ok` False is no proof that its bytes have stopped."""

    op: Op
    ok: bool


class WriteStopped(Value, frozen=True, gc=False):
    """A WRITE has stopped as ordered: no piece of it follows, and all that were posted have ended well."""

    op: Op


class ReadEnded(Value, frozen=True, gc=False):
    op: Op
    ok: bool


class WordRead(Value, frozen=True, gc=False):
    """The lease word of the P rank that `op` read; None if the read failed."""

    op: Op
    value: int | None


class FlushEnded(Value, frozen=True, gc=False):
    """Everything posted to this peer before the flush has landed (done_means = local)."""

    peer: Address
    ok: bool


class FenceEnded(Value, frozen=True, gc=False):
    """Our own endpoint to this peer is closed: nothing of ours can land there any more."""

    peer: Address


# Time.


class TimerFired(Value, frozen=True, gc=False):
    """An armed timer has fired. The checker delivers it for any armed timer; drivers use `TimeReached` instead."""

    timer: Timer


class TimeReached(Value, frozen=True, gc=False):
    pass


ProducerSchedulerEvent: TypeAlias = (
    PrefillQueued | PrefillBegun | PrefillFinished | PrefillAborted | SourceWithdrawn | ShardReleased | PrefillMissing
)
ConsumerSchedulerEvent: TypeAlias = (
    DecodeQueued
    | DecodeAdmitted
    | DecodeHit
    | DecodeAborted
    | PrefillLegEnded
    | PairReported
    | PairLanded
    | PairFailed
    | PairMissing
    | PeerResponded
    | ConnectionLost
    | PeerFenced
    | ReconnectRefused
    | PeerRestarted
    | TimerFired
    | TimeReached
)
ProducerRankEvent: TypeAlias = (
    SourceReady
    | SourceCompleted
    | SourceWithdrawn
    | PrefillEnded
    | Received
    | HandshakeEnded
    | PeerLost
    | PeerExited
    | WriteEnded
    | WriteStopped
    | FlushEnded
    | FenceEnded
    | TimerFired
    | TimeReached
)
ConsumerRankEvent: TypeAlias = (
    FrameOrdered
    | ReadOrdered
    | FenceOrdered
    | Received
    | HandshakeEnded
    | PeerLost
    | PeerExited
    | ReadEnded
    | WordRead
    | FenceEnded
    | TimerFired
    | TimeReached
)
Event: TypeAlias = ProducerSchedulerEvent | ConsumerSchedulerEvent | ProducerRankEvent | ConsumerRankEvent
LocalEvent: TypeAlias = (
    SourceReady
    | SourceCompleted
    | SourceWithdrawn
    | PrefillEnded
    | FrameOrdered
    | ReadOrdered
    | FenceOrdered
    | ShardReleased
    | PrefillMissing
    | PairReported
    | PairLanded
    | PairFailed
    | PairMissing
    | PeerResponded
    | ConnectionLost
    | PeerFenced
    | ReconnectRefused
    | PeerRestarted
)
"""Events between the endpoints of one engine; every other event comes from outside."""
