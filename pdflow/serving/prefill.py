"""The handling of requests at a prefill engine, from their acceptance to the release of their last blocks.

The protocol is told of a prompt before anything else happens to it, and of its end whatever that is, so that a
registration finds an answer. Until all of a prompt is computed it is the engine's: to abort it is to drop it there.
From then on it is the protocol's: a computed prompt stays when its client goes, since its lease decides.

`sending.py` decides what P sends from, and when a prompt's blocks are free.
"""

from __future__ import annotations

from collections.abc import Hashable

from pdflow.protocol.effects import AnswerPrefill, Enqueue, ReleaseBlocks
from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.events import PrefillQueued, SourceWithdrawn
from pdflow.protocol.messages import Code
from pdflow.serving.core import Core, Port
from pdflow.serving.effects import Computed, EndPrefill, Released
from pdflow.serving.events import (
    EngineDropped,
    EngineRejected,
    Handle,
    PrefillFailed,
    PrefillRequested,
    PromptComputed,
    PromptWithdrawn,
    RequestAborted,
)
from pdflow.serving.prefill_request import PrefillRequest
from pdflow.serving.prefill_requests import PrefillRequests
from pdflow.serving.sending import Sending


class PrefillCore(Core):
    """The core of a prefill engine. Args: `weights` names what the model computes with."""

    def __init__(self, weights: int, sending: Sending) -> None:
        super().__init__()
        self.sending = sending
        self.requests = PrefillRequests(self, weights)
        self.rules.update(
            {
                PrefillRequested: self._requested,
                RequestAborted: self._aborted,
                PromptWithdrawn: self._withdrawn,
                EngineRejected: self._rejected,
                EngineDropped: self._dropped,
                PromptComputed: self._computed,
                PrefillFailed: self._failed,
            }
        )
        sending.begin(self.requests)

    def begin(self, scheduler: Port) -> None:
        """Attach the endpoint of the engine's scheduler. To be called when the driver has registered its handlers of
        effects."""
        self.requests.scheduler = scheduler
        self.do[AnswerPrefill] = self._answer
        self.do[ReleaseBlocks] = self._release
        self.sending.take_effects(self.do)

    def set_weights(self, weights: int) -> None:
        """Name the weights that the model computes with from now on."""
        self.requests.weights = weights

    def knows(self, handle: Handle) -> bool:
        """Whether this name is taken: another prompt could not have it too."""
        return handle in self.requests.by_handle

    def request_of(self, handle: Handle) -> PrefillRequest | None:
        return self.requests.by_handle.get(handle)

    # What is asked of this engine.

    def _requested(self, event: PrefillRequested) -> None:
        handle, requests = event.handle, self.requests
        if handle in requests.by_handle:
            raise LocalProtocolError(f"prompt {handle} is already open; every attempt needs a new id")
        request = PrefillRequest(
            handle, event.request_id, event.prompt_tokens, event.digest, event.keeps, requests.weights
        )
        requests.by_handle[handle] = request
        if request.keeps:
            requests.send_local(PrefillQueued(handle, request.request_id))
            refusal = self.sending.refusal(request.prompt_tokens)
            if refusal:
                self.sending.end(request, Code.REJECTED, refusal)
                return
        if event.lookup:
            self.sending.look_up(request)
        else:
            requests.emit(Enqueue(handle))

    def _aborted(self, event: RequestAborted) -> None:
        request = self.requests.by_handle.get(event.handle)
        if request is not None and not request.ended:
            self.sending.aborted(request)

    def _withdrawn(self, event: PromptWithdrawn) -> None:
        self.requests.send_local(SourceWithdrawn(event.handle))

    # The engine.

    def _rejected(self, event: EngineRejected) -> None:
        request = self.requests.by_handle.get(event.handle)
        if request is not None:
            self.sending.rejected(request, event.reason)

    def _dropped(self, event: EngineDropped) -> None:
        request = self.requests.by_handle.get(event.handle)
        if request is not None:
            request.dropping = False
            self.sending.dropped(request, event)

    def _computed(self, event: PromptComputed) -> None:
        requests = self.requests
        request = requests.by_handle[event.handle]
        request.computed = True
        if not request.ended:
            requests.emit(Computed(request.handle))
        if request.keeps:
            self.sending.computed(request, event.source)
            return
        requests.emit(EndPrefill(request.handle, Code.NONE))
        requests.free(request)
        requests.forget(request)

    def _failed(self, event: PrefillFailed) -> None:
        request = self.requests.by_handle.get(event.handle)
        if request is not None:
            self.sending.failed(request)

    # The protocol.

    def _answer(self, _: Port, effect: AnswerPrefill) -> None:
        self.sending.answer(self.requests.by_handle[effect.params.xid], effect)

    def _release(self, _: Port, effect: ReleaseBlocks) -> None:
        request = self.requests.by_handle[effect.xid]
        request.held = False
        self.requests.emit(Released(request.handle, effect.code))
        self.sending.released(request)

    # As one value, for whoever explores.

    def fingerprint(self) -> Hashable:
        return super().fingerprint(), self.requests.fingerprint(), self.sending.fingerprint()

    def assert_empty(self, whose: str) -> None:
        super().assert_empty(whose)
        self.requests.assert_empty(whose)
        self.sending.assert_empty(whose)
