"""One prompt at a prefill engine."""

from __future__ import annotations

from collections.abc import Hashable

from pdflow.protocol.values import RequestId
from pdflow.serving.events import Handle


class PrefillRequest:
    """One prompt at P."""

    __slots__ = (
        "answering",
        "computed",
        "digest",
        "dropping",
        "ended",
        "freed",
        "handle",
        "held",
        "keeps",
        "known",
        "prompt_tokens",
        "request_id",
        "weights",
    )

    def __init__(
        self, handle: Handle, request_id: RequestId, prompt_tokens: int, digest: int, keeps: bool, weights: int
    ) -> None:
        self.handle = handle
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.digest = digest
        self.weights = weights
        """The weights that were loaded when the prompt was requested. If others are loaded while it is computed, its KV
        is of both, and no engine may use it under the name of the new ones."""
        self.keeps = keeps
        """A decode leg comes for the KV, so the protocol knows of it."""
        self.computed = False
        """All of its KV is in blocks."""
        self.dropping = False
        """The engine has been told to drop it and has not answered."""
        self.ended = False
        """The prompt is no longer wanted, and the protocol knows."""
        self.answering = False
        """The protocol has been told that it is finished, and has not answered its request."""
        self.held = False
        """The protocol may send from it, until it releases it."""
        self.freed = False
        """The prompt's blocks are the engine's again."""
        self.known = 0
        """Sent while it is computed: up to which token it is computed, or will be with the running step."""

    def fork(self) -> PrefillRequest:
        other = PrefillRequest(self.handle, self.request_id, self.prompt_tokens, self.digest, self.keeps, self.weights)
        other.computed, other.dropping, other.ended = self.computed, self.dropping, self.ended
        other.answering, other.held, other.freed = self.answering, self.held, self.freed
        other.known = self.known
        return other

    def fingerprint(self) -> Hashable:
        asked = self.handle, self.request_id, self.prompt_tokens, self.digest, self.keeps
        engine = self.computed, self.dropping, self.ended
        return *asked, *engine, self.answering, self.held, self.freed, self.known
