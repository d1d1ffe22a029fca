"""What an engine's core wants done beside what its endpoints want. Imperative, frozen; executing one never waits.

Of the protocol's own effects some come through as they are, and mean to the engine that computes: Enqueue, queue this
request, or answer EngineRejected; Commit, its KV is in its blocks, decode from the next step on; FreeBlocks, back to
the pool; Quarantine, keep these out of use.
"""

from __future__ import annotations

from pdflow.methods.shipment import Piece
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Address, Allocation, Value
from pdflow.serving.events import Handle


class Drop(Value, frozen=True, gc=False):
    """The engine is to give up this request; answer with EngineDropped."""

    handle: Handle


class HoldEngine(Value, frozen=True, gc=False):
    """Begin no step, until ResumeEngine."""


class ResumeEngine(Value, frozen=True, gc=False):
    pass


class Landed(Value, frozen=True, gc=False):
    """All KV of this request is at this engine. For the record."""

    handle: Handle


class Admit(Value, frozen=True, gc=False):
    """This request has blocks, or room beside them, to which its KV may come. For the record."""

    handle: Handle


class EndDecode(Value, frozen=True, gc=False):
    """The request is over. NONE: all of its tokens are generated."""

    handle: Handle
    code: Code


class AskForRoom(Value, frozen=True, gc=False):
    """Answer with RoomDue when all that has happened by now is handled: it may be the end of who would be next."""


class TakeRoom(Value, frozen=True, gc=False):
    """This request has room beside the blocks, there."""

    handle: Handle
    place: Allocation


class GiveBackRoom(Value, frozen=True, gc=False):
    """Nothing lies there any more."""

    place: Allocation


class CopyIn(Value, frozen=True, gc=False):
    """Copy what lies there into the request's blocks, from this token of the prompt on; answer with CopiedIn."""

    handle: Handle
    place: Allocation
    allocation: Allocation
    start: int


class TakePiece(Value, frozen=True, gc=False):
    """As published: this piece has room at this rank from now on."""

    rank: Address
    piece: Piece


class AcceptPiece(Value, frozen=True, gc=False):
    """As published: who waited for room for this piece goes on. It has some, or needs none any more."""

    name: str
