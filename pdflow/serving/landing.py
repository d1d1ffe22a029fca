"""The landing of KV at a decode engine, in the blocks of the engine or in staging memory beside them.

In blocks: the engine admits a request first, and the request registers its blocks. In staging memory: the request gets
room there first and registers that, and asks the engine for blocks when all has landed; its KV is copied, and the room
is free again. A transfer then needs no free blocks, and blocks are never reached from outside: what is in quarantine
after a failure is a part of the staging memory.

With `by_layer`, a request decodes in the step that admits it, and its copies are a part of that step, which waits for
each layer before it computes it (`engine/layered.py`), as in vLLM #18332.
"""

from __future__ import annotations

from collections.abc import Container, Hashable

from pdflow.methods.staging import Staging, TooLargeError
from pdflow.protocol.effects import Enqueue, FreeBlocks, Quarantine
from pdflow.protocol.events import DecodeAborted, DecodeAdmitted, DecodeHit
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation
from pdflow.serving.core import Execute, Port
from pdflow.serving.decode_request import DecodeRequest, DecodeStage
from pdflow.serving.decode_requests import DecodeRequests
from pdflow.serving.effects import Admit, AskForRoom, CopyIn, GiveBackRoom, Landed, LoadInStep, TakeRoom
from pdflow.serving.events import CopiedIn, EngineAdmitted, Handle, RoomDue


class Landing:
    """Landing in the engine's blocks."""

    def __init__(self) -> None:
        self.requests: DecodeRequests

    def begin(self, requests: DecodeRequests) -> None:
        """Attach the landing to the requests of an engine."""
        self.requests = requests

    def take_effects(self, do: dict[type, Execute]) -> None:
        """Take over the effects of endpoints that the landing handles in place of the driver."""

    def rejected(self, request: DecodeRequest) -> None:
        """End a request that the engine can never admit."""
        requests = self.requests
        requests.send_local(DecodeAborted(request.handle, Code.REJECTED))

    def admitted(self, request: DecodeRequest, event: EngineAdmitted) -> None:
        """Accept the blocks that the engine has given a request."""
        self.admit(request, event.allocation, event.hit_tokens)

    def admit(self, request: DecodeRequest, staged: Allocation, hit_tokens: int) -> None:
        """Report to the protocol that a request's KV may land at `staged`, but for the first `hit_tokens` of the
        prompt, which are here already."""
        requests, handle = self.requests, request.handle
        request.stage = DecodeStage.ADMITTED
        missing = request.prompt_tokens - hit_tokens
        requests.emit(Admit(handle))
        if missing:
            requests.report_admission(
                DecodeAdmitted(handle, staged, hit_tokens, missing, request.digest, requests.weights)
            )
        else:
            requests.report_admission(DecodeHit(handle))

    def committed(self, request: DecodeRequest) -> None:
        """Pass a request on to the engine: all of its KV has landed."""
        requests = self.requests
        requests.emit(Landed(request.handle))
        requests.loaded(request)
        if requests.awaited:
            requests.wait_no_more(request.handle)

    def resolved(self, request: DecodeRequest) -> None:
        """Drop a request that the protocol has ended before its KV was here. Blocks of which the protocol knows nothing
        yet, since the engine has given them in this very turn, are given back as the engine names them."""
        self.requests.drop(request, request.stage is DecodeStage.ADMITTED)

    def aborted(self, request: DecodeRequest) -> None:
        """Clean up after a request whose client has gone after its KV was here."""

    def left(self, handle: Handle, allocation: Allocation) -> None:  # noqa: ARG002
        """Free the blocks that the engine left when it dropped a request, which nobody writes to."""
        self.requests.emit(FreeBlocks(allocation))

    def knows(self, handle: Handle) -> bool:  # noqa: ARG002
        """Whether anything of a request that has ended is still under way."""
        return False

    def staged(self) -> Container[int] | None:
        """Return the generations that are held of the staging memory in which KV lands; None if it lands in blocks."""
        return None

    def fingerprint(self) -> Hashable:
        return ()

    def assert_empty(self, whose: str) -> None:
        """Assert, at rest, that no state of any request is kept."""


class StagedLanding(Landing):
    """Landing in staging memory. Args: `staging` is the memory of one rank; those of all ranks are filled alike.
    `by_layer`: copies into blocks are made layer by layer, in a request's first step."""

    def __init__(self, staging: Staging, by_layer: bool = False) -> None:
        super().__init__()
        self.staging = staging
        self.by_layer = by_layer
        self.copying: dict[Handle, Allocation] = {}
        """Room whose KV is being copied into blocks, by request."""
        self.abandoned: dict[Handle, Allocation] = {}
        """Blocks of dropped requests that are still being copied into."""
        self.asked = False

    def begin(self, requests: DecodeRequests) -> None:
        super().begin(requests)
        requests.core.rules.update(
            {
                RoomDue: self.admit_next,
                CopiedIn: self.copied,
            }
        )

    def take_effects(self, do: dict[type, Execute]) -> None:
        do[Enqueue] = self.enqueue
        do[Quarantine] = self.quarantine
        do[FreeBlocks] = self.free

    # Room to land in.

    def enqueue(self, _: Port, effect: Enqueue) -> None:
        requests = self.requests
        request = requests.by_handle[effect.request_id]
        try:
            self.staging.enqueue(request.handle, request.prompt_tokens)
        except TooLargeError:
            super().rejected(request)
            return
        self.ask()

    def ask(self) -> None:
        """Ask for RoomDue once all that happens now is handled: it may end the request that would be next."""
        if not self.asked:
            self.asked = True
            self.requests.emit(AskForRoom())

    def admit_next(self, event: RoomDue) -> None:
        """Give room to the next request in the queue, and go on with another one after all that follows from it."""
        requests = self.requests
        self.asked = False
        admission = self.staging.admit_next()
        if admission is None:
            return
        handle, staged = admission
        request = requests.by_handle[handle]
        request.staged = staged
        requests.emit(TakeRoom(handle, staged))
        self.admit(request, staged, 0)
        requests.core.send_local(requests.core.role, event)

    def release(self, staged: Allocation) -> None:
        """Give back room that nothing uses any more."""
        self.requests.emit(GiveBackRoom(staged))
        self.staging.release(staged)
        self.ask()

    def quarantine(self, _: Port, effect: Quarantine) -> None:
        """Keep room taken that a writer may still reach."""

    def free(self, _: Port, effect: FreeBlocks) -> None:
        self.release(effect.allocation)

    def resolved(self, request: DecodeRequest) -> None:
        """Forget a request that is not in the engine's queue yet. The protocol gives back the room that it has."""
        self.staging.forget(request.handle)
        request.staged = None
        self.ask()

    # Everything has landed: now the engine.

    def committed(self, request: DecodeRequest) -> None:
        requests = self.requests
        request.stage = DecodeStage.LANDED
        requests.emit(Landed(request.handle))
        if self.by_layer and not request.first_follows:
            request.in_step = True
            requests.emit(LoadInStep(request.handle))
        requests.emit(Enqueue(request.handle))

    def rejected(self, request: DecodeRequest) -> None:
        self.requests.end(request, Code.REJECTED)
        self._leave(request)

    def admitted(self, request: DecodeRequest, event: EngineAdmitted) -> None:
        staged = request.staged
        assert staged is not None
        request.staged = None
        self.copying[request.handle] = staged
        if request.in_step:
            request.stage = DecodeStage.DECODING
        self.requests.emit(CopyIn(request.handle, staged, event.allocation, event.hit_tokens))

    def copied(self, event: CopiedIn) -> None:
        requests, handle = self.requests, event.handle
        self.release(self.copying.pop(handle))
        left = self.abandoned.pop(handle, None)
        request = requests.by_handle.get(handle)
        if left is not None:
            requests.emit(FreeBlocks(left))
        elif request is not None and not request.in_step:
            requests.loaded(request)
        requests.wait_no_more(handle)

    def left(self, handle: Handle, allocation: Allocation) -> None:
        """Free the blocks of a dropped request, once a copy into them has ended."""
        if handle in self.copying:
            self.abandoned[handle] = allocation
        else:
            super().left(handle, allocation)

    def knows(self, handle: Handle) -> bool:
        return handle in self.copying

    def staged(self) -> Container[int] | None:
        return self.staging.held

    def aborted(self, request: DecodeRequest) -> None:
        self._leave(request)

    def _leave(self, request: DecodeRequest) -> None:
        staged, request.staged = request.staged, None
        if staged is not None:
            self.release(staged)

    def fingerprint(self) -> Hashable:
        copying, abandoned = tuple(self.copying.items()), tuple(self.abandoned.items())
        return self.staging.fingerprint(), copying, abandoned, self.asked

    def assert_empty(self, whose: str) -> None:
        kept = (self.staging.held, self.staging.waiting, self.copying, self.abandoned)
        assert not any(kept), f"{whose} still holds {kept}"
