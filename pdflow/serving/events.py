"""The events of an engine's requests: what is asked of it, and the answers of the engine that computes.

Past tense, frozen. `handle` names a request at its engine: at D the id of its attempt, at P the xid of its prompt. The
engine that computes is given effects (`effects.py`) and answers with these events, at once or at any later time.
"""

from __future__ import annotations

from typing import TypeAlias

from pdflow.methods.shipment import Piece
from pdflow.methods.store.memory import Item
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Address, Allocation, RequestId, Value, Xid

Handle: TypeAlias = str


class DecodeRequested(Value, frozen=True, gc=False):
    """D: a decode leg has arrived, whose KV a prefill engine has or will have."""

    handle: Handle
    params: KvParams
    num_blocks: int
    """That its prompt takes at D."""
    prompt_tokens: int
    digest: int
    """Names the content of the prompt."""
    first_follows: bool = False
    """P's token is the answer's first, and comes later, with FirstTokenKnown."""


class AloneRequested(Value, frozen=True, gc=False):
    """A request that this engine serves alone: it computes the prompt, and no KV is transferred."""

    handle: Handle


class PrefillRequested(Value, frozen=True, gc=False):
    """P: a prefill leg has arrived."""

    handle: Handle
    request_id: RequestId
    prompt_tokens: int
    digest: int
    """Names the content of the prompt."""
    keeps: bool = True
    """A decode leg comes for the KV. Otherwise P's token is all that is asked for."""
    lookup: bool = False
    """The prompt's beginning may be in the store, which is to be asked first."""


class PromptWithdrawn(Value, frozen=True, gc=False):
    """P: nobody is to come for the KV of this prompt."""

    handle: Handle


class RequestAborted(Value, frozen=True, gc=False):
    """The client or router that asked for this request has gone."""

    handle: Handle


class FirstTokenKnown(Value, frozen=True, gc=False):
    """D: the answer's first token has arrived from P."""

    handle: Handle


class PrefillReported(Value, frozen=True, gc=False):
    """D: the router has reported how the prefill leg of this request ended."""

    handle: Handle
    ok: bool


class RoomDue(Value, frozen=True, gc=False):
    """Everything that had happened when AskForRoom was executed has been handled."""


# Of the engine that computes.


class EngineRejected(Value, frozen=True, gc=False):
    """The engine can never compute what it was to enqueue: its whole pool is too small."""

    handle: Handle
    reason: str = ""


class EngineAdmitted(Value, frozen=True, gc=False):
    """The engine has given a request a place in its batch and blocks, and its KV may be put into them."""

    handle: Handle
    allocation: Allocation
    hit_tokens: int = 0
    """Tokens at the prompt's start whose KV is here already, in blocks that it shares."""


class EngineDropped(Value, frozen=True, gc=False):
    """Answer to Drop: nothing more is reported of this request."""

    handle: Handle
    left: Allocation | None = None
    """Blocks that the engine has given up without freeing them, since a writer may still reach them."""
    too_late: bool = False
    """The engine was done with it: its outcome has been reported, or is about to be."""


class EngineFinished(Value, frozen=True, gc=False):
    """The last token of a request is generated, and the engine has freed its blocks."""

    handle: Handle


class ChunkStarted(Value, frozen=True, gc=False):
    """P: a step has begun that computes this prompt up to `known` tokens. Only where KV is sent while a prompt is
    computed."""

    handle: Handle
    source: Allocation
    """The prompt's blocks, shared ones included."""
    known: int
    step: int
    """Names the step. `LayerReady` follows for each layer."""


class LayerReady(Value, frozen=True, gc=False):
    """P: this step has computed this layer of every chunk in it."""

    step: int
    layer: int


class PromptComputed(Value, frozen=True, gc=False):
    """P: all of a prompt's KV is in its blocks."""

    handle: Handle
    source: Allocation
    """The prompt's blocks, shared ones included."""


class PrefillFailed(Value, frozen=True, gc=False):
    """P: the engine has ended this prompt of its own accord, and computes no more of it."""

    handle: Handle


class CopiedOut(Value, frozen=True, gc=False):
    """P: one rank's share of a CopyOut is in the staging memory."""

    handle: Handle
    piece: Piece | None
    rank: int


class CopiedIn(Value, frozen=True, gc=False):
    """Answer to CopyIn: the request's KV is in its blocks."""

    handle: Handle


class StoreAnswered(Value, frozen=True, gc=False):
    """P: answer to AskStore. `params`: by which the beginning that the store has can be loaded; None if it has none."""

    handle: Handle
    params: KvParams | None


class PutEnded(Value, frozen=True, gc=False):
    """P: answer to StartPut. `params`: by which D gets the prompt from the store; None if it is not there."""

    handle: Handle
    params: KvParams | None
    code: Code = Code.NONE


# Of engines, at a store's node.


class PutRequested(Value, frozen=True, gc=False):
    """An engine asks to put this prompt: PutStart."""

    params: KvParams
    """Names the engine that has it."""
    items: tuple[Item, ...]
    """The prompt's objects, from its start on."""


class LookupRequested(Value, frozen=True, gc=False):
    """An engine asks how much of a prompt the store has: GetReplicaList."""

    request_id: RequestId
    xid: Xid
    """The name by which the engine would load what is found."""
    items: tuple[Item, ...]
    digest: int
    weights: int


class CallWithdrawn(Value, frozen=True, gc=False):
    """An engine has withdrawn its call: nobody will come for what was to be put, or was found."""

    request_id: RequestId
    xid: Xid


class EntryDue(Value, frozen=True, gc=False):
    """D, as published: the protocol has enqueued this request, and its other effects of that event are executed."""

    handle: Handle


class PieceArrived(Value, frozen=True, gc=False):
    """As published: a piece of a prompt has arrived at this rank, and waits for room."""

    rank: Address
    generation: int
    """The generation of the prompt's place."""
    piece: Piece
