"""One request at a decode engine."""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum

from pdflow.protocol.values import Allocation
from pdflow.serving.events import Handle


class DecodeStage(IntEnum):
    """The stage of a request at its decode engine."""

    PENDING = 0
    """The protocol has it, and it has no blocks and no room yet."""
    ADMITTED = 1
    """The request has blocks, or room beside them, and its KV may come."""
    LANDED = 2
    """All KV is at this engine, and the protocol is done with the request."""
    LOADED = 3
    """The request's KV is in its blocks, and P's token is not known here yet."""
    DECODING = 4


class DecodeRequest:
    """One request at D."""

    __slots__ = ("alone", "digest", "first_follows", "handle", "in_step", "prompt_tokens", "stage", "staged")

    def __init__(self, handle: Handle, prompt_tokens: int, digest: int, alone: bool, first_follows: bool) -> None:
        self.handle = handle
        self.prompt_tokens = prompt_tokens
        self.digest = digest
        self.alone = alone
        """The prompt is computed here; the protocol knows nothing of it."""
        self.first_follows = first_follows
        """P's token is the answer's first, and is not known here yet."""
        self.in_step = False
        """Its KV is copied into blocks layer by layer, while its first step computes."""
        self.stage = DecodeStage.PENDING
        self.staged: Allocation | None = None
        """Where it has room beside the blocks."""

    def fork(self) -> DecodeRequest:
        other = DecodeRequest(self.handle, self.prompt_tokens, self.digest, self.alone, self.first_follows)
        other.in_step, other.stage, other.staged = self.in_step, self.stage, self.staged
        return other

    def fingerprint(self) -> Hashable:
        leg = self.handle, self.prompt_tokens, self.digest, self.alone, self.first_follows
        return *leg, self.in_step, self.stage, self.staged
