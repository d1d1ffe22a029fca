"""One prompt at a prefill engine."""

from __future__ import annotations

import msgspec

from pdflow.protocol.values import RequestId
from pdflow.serving.events import Handle


class PrefillRequest(msgspec.Struct, eq=False):
    """One prompt at P."""

    handle: Handle
    request_id: RequestId
    prompt_tokens: int
    digest: int
    keeps: bool
    """A decode leg comes for the KV, so the protocol knows of it."""
    computed: bool = False
    """All of its KV is in blocks."""
    dropping: bool = False
    """The engine has been told to drop it and has not answered."""
    ended: bool = False
    """Nobody wants it any more, and the protocol has been told so."""
    answering: bool = False
    """The protocol has been told that it is finished, and has not answered its request."""
    held: bool = False
    """The protocol may send from it, until it releases it."""
    freed: bool = False
    """Its blocks are the engine's again."""
    known: int = 0
    """Sent while it is computed: up to which token it is computed, or will be with the running step."""
