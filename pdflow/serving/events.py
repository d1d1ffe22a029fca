"""What happens to the requests of an engine: what it is asked, and what whoever computes for it answers.

Past tense, frozen. `handle` names a request at its engine: at D the id of its attempt, at P the xid of its prompt. The
engine that computes is spoken to in effects (`effects.py`) and answers in these, at once or at any later time.
"""

from __future__ import annotations

from typing import TypeAlias

from pdflow.methods.shipment import Piece
from pdflow.protocol.ids import KvParams
from pdflow.protocol.values import Address, Allocation, Value

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
    """P's token is the answer's first, and is told later, by FirstTokenKnown."""


class AloneRequested(Value, frozen=True, gc=False):
    """A request that this engine serves alone: it computes the prompt, and no KV is transferred."""

    handle: Handle


class RequestAborted(Value, frozen=True, gc=False):
    """Whoever asked for it has gone."""

    handle: Handle


class FirstTokenKnown(Value, frozen=True, gc=False):
    """D: the answer's first token has arrived from P."""

    handle: Handle


class PrefillReported(Value, frozen=True, gc=False):
    """D: the router says how the prefill leg of this request ended."""

    handle: Handle
    ok: bool


class RoomDue(Value, frozen=True, gc=False):
    """Everything that had happened when AskForRoom was executed has been handled."""


# Of the engine that computes.


class EngineRejected(Value, frozen=True, gc=False):
    """What was to be enqueued can never be computed here: its whole pool is too small."""

    handle: Handle
    reason: str = ""


class EngineAdmitted(Value, frozen=True, gc=False):
    """It has a seat and blocks, and its KV may be put into them."""

    handle: Handle
    allocation: Allocation
    hit_tokens: int = 0
    """Of the prompt, from its start: their KV is here already, in blocks that it shares."""


class EngineDropped(Value, frozen=True, gc=False):
    """Answer to Drop: nothing more is reported of this request."""

    handle: Handle
    left: Allocation | None = None
    """Blocks that the engine has given up without freeing them, since a writer may still reach them."""
    too_late: bool = False
    """The engine was done with it: its outcome has been reported, or is about to be."""


class EngineFinished(Value, frozen=True, gc=False):
    """Its last token is generated, and the engine has freed its blocks."""

    handle: Handle


class CopiedIn(Value, frozen=True, gc=False):
    """Answer to CopyIn: its KV is in its blocks."""

    handle: Handle


class PieceArrived(Value, frozen=True, gc=False):
    """As published: a piece of a prompt has come to this rank, and waits for room."""

    rank: Address
    generation: int
    """Of the prompt's place."""
    piece: Piece
