"""One request at a decode engine."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from pdflow.protocol.values import Allocation
from pdflow.serving.events import Handle


class DecodeStage(IntEnum):
    """How far a request has come at its decode engine."""

    PENDING = 0
    """The protocol has it, and it has no blocks and no room yet."""
    ADMITTED = 1
    """It has blocks, or room beside them, and its KV may come."""
    LANDED = 2
    """All KV is at this engine, and the protocol is done with the request."""
    LOADED = 3
    """Its KV is in its blocks, and P's token is not known here yet."""
    DECODING = 4


class DecodeRequest(msgspec.Struct, eq=False):
    """One request at D."""

    handle: Handle
    prompt_tokens: int
    digest: int
    alone: bool
    """Its prompt is computed here; the protocol knows nothing of it."""
    first_follows: bool
    """P's token is the answer's first, and is not known here yet."""
    stage: DecodeStage = DecodeStage.PENDING
    place: Allocation | None = None
    """Where it has room beside the blocks."""
