"""Effects: the actions that an endpoint asks its driver to execute.

They are frozen values, named in the imperative. Their order is part of the contract; executing one never waits.

Drivers look a method up by type. Effects are data, not calls: so an illegal event changes nothing, and no effect can
call back into the endpoint halfway through a transition.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

from msgspec import UNSET, UnsetType

from pdflow.protocol.events import LocalEvent
from pdflow.protocol.ids import KvParams, LeaseWord, Op
from pdflow.protocol.messages import Code, Completion, Done, Message, Register
from pdflow.protocol.values import Address, Allocation, RequestId, Value, Xid


class SendLocal(Value, frozen=True, gc=False):
    """Hand an event to another endpoint of the same engine."""

    to: Address
    event: LocalEvent


class Send(Value, frozen=True, gc=False):
    """Send a frame on the control stream, or as a notification where the dialect has no stream."""

    to: Address
    message: Message


class Handshake(Value, frozen=True, gc=False):
    """Connect to a peer and learn its incarnation by a fresh nonce; answer with HandshakeEnded."""

    peer: Address


class PostWrite(Value, frozen=True, gc=False):
    """WRITE this rank's shard of the source's tokens into the registered blocks; `notification` follows the data."""

    op: Op
    to: Address
    source: Allocation
    registration: Register
    nbytes: int
    notification: Done | Completion


class StopWrite(Value, frozen=True, gc=False):
    """Post no further piece of this WRITE. Answer with WriteStopped, or with WriteEnded if a piece has failed."""

    op: Op


class PostRead(Value, frozen=True, gc=False):
    """READ one P rank's shard into the granted blocks. `notification` (vllm-compat) reaches P behind the data."""

    op: Op
    source: Address
    blocks: tuple[int, ...]
    registration: Register
    nbytes: int
    notification: Completion | None
    groups: tuple[tuple[int, ...], ...] | UnsetType = UNSET
    """As of KvParams."""


class ReadWord(Value, frozen=True, gc=False):
    """READ 8 bytes: the lease word of the P rank that `op` has read."""

    op: Op
    source: Address
    index: int


class BumpWord(Value, frozen=True, gc=False):
    """Change this rank's lease word, before the scheduler may free what it guards."""

    lease_word: LeaseWord


class Flush(Value, frozen=True, gc=False):
    """Make sure that everything posted to this peer has landed; answer with FlushEnded."""

    peer: Address


class Fence(Value, frozen=True, gc=False):
    """Close our endpoint, so that nothing of ours (P) or from that peer (D) can land. Answer with FenceEnded."""

    peer: Address


class AnswerPrefill(Value, frozen=True, gc=False):
    """Answer the prefill leg: these are the coordinates that the decode leg needs."""

    request_id: RequestId
    params: KvParams


class ReleaseBlocks(Value, frozen=True, gc=False):
    """P: give these blocks back to the pool: nothing reads them any more."""

    xid: Xid
    allocation: Allocation
    code: Code


class Enqueue(Value, frozen=True, gc=False):
    """D: let this request into the engine's own queue, which allocates its blocks."""

    request_id: RequestId


class Commit(Value, frozen=True, gc=False):
    """D: make the KV visible, hash it into the prefix cache and decode: every shard has arrived."""

    request_id: RequestId


class Outcome(IntEnum):
    FAILED = 1
    CANCELLED = 2


class Resolve(Value, frozen=True, gc=False):
    """D: report the request's one outcome, unless it was Commit. Its blocks are freed separately (`FreeBlocks`)."""

    request_id: RequestId
    outcome: Outcome
    code: Code


class Quarantine(Value, frozen=True, gc=False):
    """D: keep the blocks out of use: the request is over, but a writer may still be running."""

    allocation: Allocation


class FreeBlocks(Value, frozen=True, gc=False):
    """D: give the blocks back to the pool: every possible writer of them is known to have ended."""

    allocation: Allocation


class Note(Value, frozen=True, gc=False):
    """Record that something was ignored or is odd; a driver counts and logs it. Never a cause for action."""

    name: str


Effect: TypeAlias = (
    SendLocal
    | Send
    | Handshake
    | PostWrite
    | StopWrite
    | PostRead
    | ReadWord
    | BumpWord
    | Flush
    | Fence
    | AnswerPrefill
    | ReleaseBlocks
    | Enqueue
    | Commit
    | Resolve
    | Quarantine
    | FreeBlocks
    | Note
)
Effects: TypeAlias = tuple[Effect, ...]
NOTHING: Effects = ()
