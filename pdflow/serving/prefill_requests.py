"""The requests of a prefill engine, and the few things that are done to one: its blocks are freed, it ends.

When each happens is decided in `prefill.py` and, where it depends on what P sends from, in `sending.py` and
`staged_sending.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from pdflow.protocol.events import PrefillAborted, PrefillBegun, PrefillFinished
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation
from pdflow.serving.core import Core, Port
from pdflow.serving.effects import EndPrefill, Forget, FreePrompt, HoldEngine, ResumeEngine
from pdflow.serving.events import Handle
from pdflow.serving.prefill_request import PrefillRequest


class PrefillRequests:
    """The requests of one prefill engine. Args: `core` delivers their events and effects; `weights` names what the
    model computes with."""

    __slots__ = ("awaited", "by_handle", "core", "scheduler", "weights")

    def __init__(self, core: Core, weights: int) -> None:
        self.core = core
        self.weights = weights
        self.scheduler: Port
        self.by_handle: dict[Handle, PrefillRequest] = {}
        self.awaited: dict[Handle, None] = {}
        """Prompts that the engine waits for before it begins another step."""

    def send_local(self, event: Any) -> None:
        """Send an event to the scheduler's endpoint, behind those that are queued."""
        self.core.send_local(self.scheduler, event)

    def emit(self, effect: Any) -> None:
        """Have the driver execute an effect."""
        self.core.pending_effects.append(effect)

    def announce(self, request: PrefillRequest, source: Allocation) -> None:
        """Report to the protocol that it may send from a prompt, though the prompt is still being computed."""
        request.held = True
        tokens, digest = request.prompt_tokens, request.digest
        self.send_local(PrefillBegun(request.handle, source, tokens, digest, request.weights))

    def finish(self, request: PrefillRequest, source: Allocation) -> None:
        """Report to the protocol that all of a prompt may be sent from `source`."""
        request.answering = True
        tokens, digest = request.prompt_tokens, request.digest
        self.send_local(PrefillFinished(request.handle, source, tokens, digest, request.weights))

    def end(self, request: PrefillRequest, code: Code, reason: str = "") -> None:
        """End a prompt of which no KV comes. If its client has aborted it, no answer is needed."""
        request.ended = True
        if request.keeps:
            self.send_local(PrefillAborted(request.handle, code))
        if code is not Code.CANCELLED:
            self.emit(EndPrefill(request.handle, code, reason))

    def free(self, request: PrefillRequest) -> None:
        """Give the blocks of a prompt back to the engine's pool."""
        request.freed = True
        self.emit(FreePrompt(request.handle))

    def forget(self, request: PrefillRequest) -> None:
        """Forget a prompt of which nothing is left."""
        del self.by_handle[request.handle]
        self.emit(Forget(request.handle))

    def wait_for(self, handle: Handle) -> None:
        """Hold the engine: it begins no step before this prompt has been sent."""
        if not self.awaited:
            self.emit(HoldEngine())
        self.awaited[handle] = None

    def wait_no_more(self, handle: Handle) -> None:
        if handle in self.awaited:
            del self.awaited[handle]
            if not self.awaited:
                self.emit(ResumeEngine())

    def fingerprint(self) -> Hashable:
        requests = tuple([request.fingerprint() for request in self.by_handle.values()])
        return requests, tuple(self.awaited)

    def assert_empty(self, whose: str) -> None:
        kept = (self.by_handle, self.awaited)
        assert not any(kept), f"{whose} still holds {kept}"
