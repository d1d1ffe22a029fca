"""The messages between engines. The same structs travel through the simulator and, encoded by `wire`, over sockets.

Strict frames (spec 3.1): REG, REG_ACK, DONE, FAIL, CANCEL, CANCEL_ACK, RELEASE, TAKEN, SYNC and its reply.
vLLM notifications (spec 3.2): PUSH_REG (the same `Register`), "id:n" (`Completion`), "HB:..." (`Heartbeat`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.values import Allocation, RequestId, Value, Xid


class Progress(IntEnum):
    """How far P is with a registration. Messages do not show P's phases: finer values split states in the checker."""

    UNKNOWN = 0
    """P has no such registration, or it has ended without its data."""
    QUEUED = 1
    """The prompt is not computed yet, or not completely."""
    READY = 2
    """The prompt is computed; the registrations of other D ranks or the connection to D are missing."""
    IN_FLIGHT = 3
    """WRITEs are posted."""
    SENT = 4
    """All bytes have landed, and every notification is behind its bytes."""


class Code(IntEnum):
    """Why a registration or a request ended without its KV."""

    NONE = 0
    """No error."""
    CANCELLED = 1
    """D cancelled the registration, or the client cancelled the request."""
    EXPIRED = 2
    """P's lease or the registration's TTL has ended."""
    NO_REQUEST = 3
    """P's scheduler does not know the prompt, or its rank has released it."""
    PREFILL_ABORTED = 4
    """The prefill ended without KV."""
    CONTENT = 5
    """Token range, digest, generation or number of bytes differ between P and D."""
    WEIGHTS = 6
    """P and D use different weight versions."""
    LAYOUT = 7
    """Ranks, block sizes or KV cache groups of P and D do not fit together."""
    UNREACHABLE = 8
    """The peer could not be reached; nothing was sent."""
    IO = 9
    """A WRITE or a READ failed."""
    STALLED = 10
    """P was READY or IN_FLIGHT for too long without progress."""
    PEER_DEAD = 11
    """P was silent for too long, is fenced, has exited, or refused D's reconnect."""
    DEADLINE = 12
    """The request's deadline has passed."""
    STALE = 13
    """Pull: P may have released the prompt before the READ ended."""
    BELOW_FLOOR = 14
    """The registration is below D's floor."""
    PEER_RESTARTED = 15
    """The peer has started again."""
    REJECTED = 16
    """The request does not fit the engine's KV cache, or it was not admitted."""


class Disposition(IntEnum):
    """P's answer to a CANCEL: whether bytes may have landed."""

    NOT_STARTED = 0
    """No WRITE was posted, and none will be."""
    DRAINED = 1
    """WRITEs were posted and have ended, not all of them well; part of the bytes may have landed."""
    SENT = 2
    """Everything has landed."""


class Register(Value, frozen=True, gc=False, tag="REG"):
    """A registration (REG, or PUSH_REG with `pdf`): D's permission to write. P pairs blocks by token position, never by
    trimming a list."""

    reg: Reg
    xid: Xid
    d_rank: int
    shards: Shards
    target: Allocation
    token_start: int
    num_tokens: int
    digest: int
    weights: int
    floor: int
    prefill_request_id: RequestId = ""


class RegisterAck(Value, frozen=True, gc=False, tag="REG_ACK"):
    reg: Reg
    p_rank: int
    progress: Progress
    targets: tuple[int, ...]
    """The D ranks that this P rank will write. D compares them with its own list at once."""


class Done(Value, frozen=True, gc=False, tag="DONE"):
    """The end of a WRITE, sent as its notification, behind the data."""

    reg: Reg
    p_rank: int
    generation: int
    nbytes: int
    weights: int


class Fail(Value, frozen=True, gc=False, tag="FAIL"):
    reg: Reg
    p_rank: int
    code: Code
    flushed: bool
    """No byte of this registration can land any more from this rank."""


class Cancel(Value, frozen=True, gc=False, tag="CANCEL"):
    reg: Reg
    floor: int


class CancelAck(Value, frozen=True, gc=False, tag="CANCEL_ACK"):
    reg: Reg
    p_rank: int
    disposition: Disposition
    flushed: bool


class Release(Value, frozen=True, gc=False, tag="RELEASE"):
    """D will not register for this prompt. P makes no tombstone of it: it shortens the lease, and a REG that arrives in
    that time is served."""

    xid: Xid


class Taken(Value, frozen=True, gc=False, tag="TAKEN"):
    """Strict pull: one D rank has read this P rank's shard, and the lease word proved it."""

    xid: Xid
    d_rank: int
    readers: int
    """How many D ranks read this P rank: P frees the prompt when all of them have sent TAKEN."""


class Sync(Value, frozen=True, gc=False, tag="SYNC"):
    """The prompts and registrations of one P rank that D still wants. `seq` counts SYNCs of the pair; only items sent
    before an acknowledged SYNC can be missing from its answer."""

    seq: int
    floor: int
    interest: tuple[Xid, ...]
    open: tuple[Reg, ...]


class SyncItem(Value, frozen=True, gc=False):
    reg: Reg
    progress: Progress
    code: Code
    flushed: bool


class SyncReply(Value, frozen=True, gc=False, tag="SYNC_REPLY"):
    seq: int
    items: tuple[SyncItem, ...]


class Completion(Value, frozen=True, gc=False, tag="COMPLETION"):
    """vLLM's "{request id}:{n}". Push: D's id and P's TP size. Pull: P's id and how many D ranks read this P rank."""

    request_id: RequestId
    count: int


class Heartbeat(Value, frozen=True, gc=False, tag="HB"):
    """vLLM's "HB:id,id,...": P's internal ids whose leases D asks to extend."""

    request_ids: tuple[RequestId, ...]


StrictFrame: TypeAlias = Register | RegisterAck | Done | Fail | Cancel | CancelAck | Release | Taken | Sync | SyncReply
Notification: TypeAlias = Register | Completion | Heartbeat
Message: TypeAlias = StrictFrame | Completion | Heartbeat
