"""The requests of a decode engine, and the few things that are done to one: it decodes, is dropped, ends.

When each happens is decided in `decode.py` and, where it depends on where KV lands, in `landing.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from pdflow.protocol.effects import Commit
from pdflow.protocol.messages import Code
from pdflow.serving.core import Core, Port
from pdflow.serving.decode_request import DecodeRequest, DecodeStage
from pdflow.serving.effects import Drop, EndDecode, HoldEngine, ResumeEngine
from pdflow.serving.events import Handle


class DecodeRequests:
    """The requests of one decode engine. Args: `core` delivers their events and effects."""

    __slots__ = ("awaited", "by_handle", "core", "dropping", "scheduler", "weights")

    def __init__(self, core: Core, weights: int) -> None:
        self.core = core
        self.weights = weights
        self.scheduler: Port
        self.by_handle: dict[Handle, DecodeRequest] = {}
        self.awaited: dict[Handle, None] = {}
        """Requests whose KV the engine waits for before it begins another step."""
        self.dropping: dict[Handle, bool] = {}
        """Requests that the engine has been told to drop and has not answered for: whether the protocol frees their
        blocks."""

    def send_local(self, event: Any) -> None:
        """Send an event to the scheduler's endpoint, behind those that are queued."""
        self.core.send_local(self.scheduler, event)

    def emit(self, effect: Any) -> None:
        """Have the driver execute an effect."""
        self.core.pending_effects.append(effect)

    def report_admission(self, event: Any) -> None:
        """Send an event to the scheduler's endpoint before anything else happens: what ends the request must find its
        blocks known."""
        self.core.send_local_first(self.scheduler, event)

    def loaded(self, request: DecodeRequest) -> None:
        """Record that a request's KV is in its blocks. The engine decodes it as soon as the first token is known
        here."""
        request.stage = DecodeStage.LOADED
        if not request.first_follows:
            request.stage = DecodeStage.DECODING
            self.emit(Commit(request.handle))

    def drop(self, request: DecodeRequest, protocol_frees: bool) -> None:
        """Have the engine drop a request. `protocol_frees`: the protocol knows its blocks, and gives them back
        itself."""
        self.dropping[request.handle] = protocol_frees
        self.emit(Drop(request.handle))

    def end(self, request: DecodeRequest, code: Code) -> None:
        del self.by_handle[request.handle]
        self.emit(EndDecode(request.handle, code))

    def wait_for(self, handle: Handle) -> None:
        """Hold the engine: it begins no step before this request's KV is here."""
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
        return requests, tuple(self.awaited), tuple(self.dropping.items())

    def assert_empty(self, whose: str) -> None:
        kept = (self.by_handle, self.awaited, self.dropping)
        assert not any(kept), f"{whose} still holds {kept}"
