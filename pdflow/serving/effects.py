"""The effects of an engine's core, beside those of its endpoints. Imperative, frozen; executing one never waits.

Of the protocol's own effects some come through as they are, and mean to the engine that computes: Enqueue, queue this
request, or answer EngineRejected; Commit, its KV is in its blocks, decode from the next step on; FreeBlocks, back to
the pool; Quarantine, keep these out of use.
"""

from __future__ import annotations

from pdflow.methods.shipment import Piece
from pdflow.methods.store.memory import Item
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Address, Allocation, Value, Xid
from pdflow.serving.events import Handle


class Drop(Value, frozen=True, gc=False):
    """Have the engine drop this request; answer with EngineDropped."""

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


class Computed(Value, frozen=True, gc=False):
    """All of this prompt is computed, and is still wanted. For the record."""

    handle: Handle


class Released(Value, frozen=True, gc=False):
    """The protocol has released this prompt. For the record."""

    handle: Handle
    code: Code


class EndPrefill(Value, frozen=True, gc=False):
    """Answer the client or router that asked for this prompt: no KV comes of it. NONE: its token is all that was asked
    for."""

    handle: Handle
    code: Code
    reason: str = ""
    """For people, where it was rejected."""


class FreePrompt(Value, frozen=True, gc=False):
    """The blocks of this prompt go back to the engine's pool."""

    handle: Handle


class Forget(Value, frozen=True, gc=False):
    """Nothing is left of this prompt at P."""

    handle: Handle


class OfferPiece(Value, frozen=True, gc=False):
    """WRITEs of this prompt may send this piece from now on. `rank` None: every rank that has the layer."""

    handle: Handle
    piece: Piece
    rank: int | None = None


class WithdrawPieces(Value, frozen=True, gc=False):
    """Nothing of this prompt may be sent any more."""

    handle: Handle


class CopyOut(Value, frozen=True, gc=False):
    """Copy this piece, or the whole prompt, to its place in the staging memory; each rank answers with CopiedOut."""

    handle: Handle
    staged: Allocation
    piece: Piece | None


class AskStore(Value, frozen=True, gc=False):
    """Ask the store for the beginning of this prompt; answer with StoreAnswered."""

    handle: Handle


class WithdrawFound(Value, frozen=True, gc=False):
    """Tell the store that nobody will load what it has found."""

    params: KvParams


class EnqueueLoading(Value, frozen=True, gc=False):
    """Queue this prompt, of which the first tokens are loaded into the blocks that it gets; or answer
    EngineRejected."""

    handle: Handle
    loaded_tokens: int


class ComputeAgain(Value, frozen=True, gc=False):
    """Queue this prompt as one of which nothing is loaded; or answer EngineRejected."""

    handle: Handle


class StartPut(Value, frozen=True, gc=False):
    """Tell the store that this prompt can be put; answer with PutEnded."""

    handle: Handle
    params: KvParams


class WithdrawPut(Value, frozen=True, gc=False):
    """Tell the store that this prompt is not to be put after all. No answer is needed."""

    handle: Handle


class AnswerStored(Value, frozen=True, gc=False):
    """Answer the client or router that asked for this prompt: the store has it."""

    handle: Handle
    params: KvParams


class AnswerCall(Value, frozen=True, gc=False):
    """At a store: answer the engine that has put this or asked for it. Without params there is nothing to get: `code`
    says why, or NONE, if nothing was found."""

    xid: Xid
    params: KvParams | None
    code: Code = Code.NONE


class EndCall(Value, frozen=True, gc=False):
    """At a store: nothing can be got by this name any more."""

    xid: Xid


class Stored(Value, frozen=True, gc=False):
    """At a store: these objects are here, for others to find. For the record."""

    items: tuple[Item, ...]
    num_tokens: int


class LeaveRoom(Value, frozen=True, gc=False):
    """This prompt has no room in the staging memory any more."""

    handle: Handle


class AskForRoom(Value, frozen=True, gc=False):
    """Answer with RoomDue when all that has happened by now is handled: it may end the request that would be next."""


class TakeRoom(Value, frozen=True, gc=False):
    """This request has room in the staging memory, at `staged`."""

    handle: Handle
    staged: Allocation


class GiveBackRoom(Value, frozen=True, gc=False):
    """The room at `staged` is free again."""

    staged: Allocation


class LoadInStep(Value, frozen=True, gc=False):
    """This request decodes in the very step that admits it: its CopyIn is to be made layer by layer, and the step
    computes a layer when its KV is in blocks."""

    handle: Handle


class CopyIn(Value, frozen=True, gc=False):
    """Copy the KV at `staged` into the request's blocks, from token `start` of the prompt on; answer with CopiedIn."""

    handle: Handle
    staged: Allocation
    allocation: Allocation
    start: int


class TakePiece(Value, frozen=True, gc=False):
    """As published: this piece has room at this rank from now on."""

    rank: Address
    piece: Piece


class AcceptPiece(Value, frozen=True, gc=False):
    """As published: the piece of this name no longer waits for room. It has some, or needs none any more."""

    name: str
