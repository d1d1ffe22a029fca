"""The handling of requests at a decode engine, from their acceptance to the release of their last blocks.

A request goes to the protocol first, which registers it with its prefill engine, then to the engine that computes.
Until all of its KV has landed (Commit) the request is the protocol's: to abort it is to report that to the protocol,
whose Resolve ends it. From then on it is the engine's: to abort it is to drop it there, whatever the engine did with it
meanwhile (a preempted sequence waits again, and has been loaded all the same). Its blocks may outlast it: the protocol
frees those that a writer may still reach, by FreeBlocks.

`landing.py` decides where KV lands, in the engine's blocks or in staging memory.
"""

from __future__ import annotations

from collections.abc import Hashable

from pdflow.protocol.effects import Commit, Enqueue, Outcome, Resolve
from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.events import DecodeAborted, DecodeQueued, PrefillLegEnded
from pdflow.protocol.messages import Code
from pdflow.serving.core import Core, Port
from pdflow.serving.decode_request import DecodeRequest, DecodeStage
from pdflow.serving.decode_requests import DecodeRequests
from pdflow.serving.events import (
    AloneRequested,
    DecodeRequested,
    EngineAdmitted,
    EngineDropped,
    EngineFinished,
    EngineRejected,
    FirstTokenKnown,
    Handle,
    PrefillReported,
    RequestAborted,
)
from pdflow.serving.landing import Landing


class DecodeCore(Core):
    """The core of a decode engine.

    Args:
        weights: names what the model computes with.
        waits: the engine stands still while the KV of requests that it has admitted is on its way (#12957).
        fails_whole_batches: if one of these requests fails, so do the others.
    """

    def __init__(self, weights: int, landing: Landing, waits: bool = False, fails_whole_batches: bool = False) -> None:
        super().__init__()
        self.landing = landing
        self.waits = waits
        self.fails_whole_batches = fails_whole_batches
        self.requests = DecodeRequests(self, weights)
        self.rules.update(
            {
                DecodeRequested: self._requested,
                AloneRequested: self._alone,
                RequestAborted: self._aborted,
                FirstTokenKnown: self._first_known,
                PrefillReported: self._prefill_reported,
                EngineRejected: self._rejected,
                EngineAdmitted: self._admitted,
                EngineDropped: self._dropped,
                EngineFinished: self._finished,
            }
        )
        landing.begin(self.requests)

    def begin(self, scheduler: Port) -> None:
        """Attach the endpoint of the engine's scheduler, which is needed unless every request is served alone. To be
        called when the driver has registered its handlers of effects."""
        self.requests.scheduler = scheduler
        self.do[Commit] = self._commit
        self.do[Resolve] = self._resolve
        self.landing.take_effects(self.do)

    def set_weights(self, weights: int) -> None:
        """Name the weights that the model computes with from now on."""
        self.requests.weights = weights

    def knows(self, handle: Handle) -> bool:
        """Whether this name is taken: another request could not have it too."""
        requests = self.requests
        return handle in requests.by_handle or handle in requests.dropping or self.landing.knows(handle)

    def stage_of(self, handle: Handle) -> DecodeStage | None:
        """Return the stage of a request; None if it is not here."""
        request = self.requests.by_handle.get(handle)
        return None if request is None else request.stage

    # What is asked of this engine.

    def _requested(self, event: DecodeRequested) -> None:
        handle = event.handle
        self._refuse_twice(handle)
        request = DecodeRequest(handle, event.prompt_tokens, event.digest, False, event.first_follows)
        self.requests.by_handle[handle] = request
        self.requests.send_local(DecodeQueued(handle, event.params, event.num_blocks, 0))

    def _alone(self, event: AloneRequested) -> None:
        handle = event.handle
        self._refuse_twice(handle)
        self.requests.by_handle[handle] = DecodeRequest(handle, 0, 0, True, False)
        self.requests.emit(Enqueue(handle))

    def _refuse_twice(self, handle: Handle) -> None:
        if self.knows(handle):
            raise LocalProtocolError(f"request {handle} is already open; every attempt needs a new id")

    def _aborted(self, event: RequestAborted) -> None:
        """Abort a request: by the protocol before its KV has landed, by the engine after it."""
        requests = self.requests
        request = requests.by_handle.get(event.handle)
        if request is None:
            return
        if not request.alone and request.stage < DecodeStage.LANDED:
            requests.send_local(DecodeAborted(request.handle, Code.CANCELLED))
            return
        requests.drop(request, False)
        requests.end(request, Code.CANCELLED)
        self.landing.aborted(request)

    def _first_known(self, event: FirstTokenKnown) -> None:
        request = self.requests.by_handle.get(event.handle)
        if request is not None and request.first_follows:
            request.first_follows = False
            if request.stage is DecodeStage.LOADED:
                self.requests.loaded(request)

    def _prefill_reported(self, event: PrefillReported) -> None:
        self.requests.send_local(PrefillLegEnded(event.handle, event.ok))

    # The engine.

    def _rejected(self, event: EngineRejected) -> None:
        request = self.requests.by_handle.get(event.handle)
        if request is None:
            return
        if request.alone:
            self.requests.end(request, Code.REJECTED)
        else:
            self.landing.rejected(request)

    def _admitted(self, event: EngineAdmitted) -> None:
        request = self.requests.by_handle.get(event.handle)
        if request is None:
            return  # It has ended meanwhile, and the answer to its Drop has given these blocks back.
        if self.waits and not request.in_step:
            self.requests.wait_for(request.handle)
        self.landing.admitted(request, event)

    def _dropped(self, event: EngineDropped) -> None:
        protocol_frees = self.requests.dropping.pop(event.handle)
        if event.left is not None and not protocol_frees:
            self.landing.left(event.handle, event.left)

    def _finished(self, event: EngineFinished) -> None:
        self.requests.end(self.requests.by_handle[event.handle], Code.NONE)

    # The protocol.

    def _commit(self, _: Port, effect: Commit) -> None:
        self.landing.committed(self.requests.by_handle[effect.request_id])

    def _resolve(self, _: Port, effect: Resolve) -> None:
        """End a request. The protocol gives back what remains of its blocks."""
        handle, requests = effect.request_id, self.requests
        request = requests.by_handle[handle]
        self.landing.resolved(request)
        requests.end(request, effect.code)
        together = self.fails_whole_batches and effect.outcome is Outcome.FAILED and handle in requests.awaited
        others = [other for other in requests.awaited if other != handle] if together else []
        requests.wait_no_more(handle)
        for other in others:
            requests.send_local(DecodeAborted(other, effect.code))

    # As one value, for whoever explores.

    def fingerprint(self) -> Hashable:
        return super().fingerprint(), self.requests.fingerprint(), self.landing.fingerprint()

    def assert_empty(self, whose: str) -> None:
        super().assert_empty(whose)
        self.requests.assert_empty(whose)
        self.landing.assert_empty(whose)
