"""Sending from the staging memory of a prefill engine: when a prompt asks for room, when it is copied, from when on it
is the protocol's, and when its blocks are free.

Where the method sends early, each layer of a chunk is copied and offered as it is computed; otherwise the whole prompt
is, when all of it is computed. A prompt without room stays in blocks, and the engine goes on: were it to wait, so would
those prompts that hold the room. The blocks come back as soon as they are copied; the lease is the prompt's, wherever
it lies.

`staging.py` decides when a prompt asks for room. Where that is with the WRITE, the prompt is announced without room;
where D reads, it is announced when it can be read, with its place in the staging memory.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from pdflow.methods.method import Grain, MemoryKind, Method, PipelinePolicy
from pdflow.methods.shipment import Piece, whole
from pdflow.methods.staging import Staging, comes_with_the_write
from pdflow.protocol.effects import PostWrite
from pdflow.protocol.events import SourceWithdrawn
from pdflow.protocol.values import Allocation
from pdflow.serving.core import Execute, Port
from pdflow.serving.effects import CopyOut, LeaveRoom, OfferPiece, TakeRoom, WithdrawPieces
from pdflow.serving.events import ChunkStarted, CopiedOut, Handle, LayerReady
from pdflow.serving.prefill_request import PrefillRequest
from pdflow.serving.prefill_requests import PrefillRequests
from pdflow.serving.sending import RunningSteps, Sending


class StagedSend:
    """The state of one prompt that is sent from staging memory. `source`: its blocks."""

    __slots__ = (
        "chunks",
        "copied",
        "copying",
        "finished",
        "in_blocks",
        "over",
        "request",
        "room_requested",
        "source",
        "staged",
    )

    def __init__(self, request: PrefillRequest, source: Allocation) -> None:
        self.request = request
        self.source = source
        self.room_requested = False
        """Room was asked for."""
        self.staged: Allocation | None = None
        """Where it has room."""
        self.chunks: list[tuple[int, int]] = []
        """Computed, or being computed, while it has none: in which step, up to which token."""
        self.copied = 0
        """Tokens whose copies have been ordered."""
        self.copying = 0
        """Ranks' shares of copies under way, or to come of a step that has begun."""
        self.in_blocks = True
        """The prompt's blocks are still needed."""
        self.finished = False
        """The protocol has been told that all of it can be sent."""
        self.over = False
        """Nothing of it is sent any more."""

    def fork(self, request: PrefillRequest) -> StagedSend:
        """Return a copy that belongs to a fork of its request."""
        other = StagedSend(request, self.source)
        other.room_requested, other.staged, other.chunks = self.room_requested, self.staged, self.chunks.copy()
        other.copied, other.copying, other.in_blocks = self.copied, self.copying, self.in_blocks
        other.finished, other.over = self.finished, self.over
        return other

    def state(self) -> tuple[Hashable, ...]:
        """Return all but the request, for a fingerprint."""
        room = (self.source, self.room_requested, self.staged, tuple(self.chunks))
        return (*room, self.copied, self.copying, self.in_blocks, self.finished, self.over)

    @property
    def stays(self) -> bool:
        """Whether the prompt waits for room."""
        return self.staged is None and not self.over


class StagedSending(Sending):
    """Sending from staging memory. Args: `staging` is that of one rank. A layer is copied by `ranks_per_layer` of the
    `ranks`."""

    def __init__(
        self,
        method: Method,
        pipeline_policy: PipelinePolicy,
        staging: Staging,
        layers: int,
        ranks_per_layer: int,
        ranks: int,
    ) -> None:
        super().__init__()
        self.method = method
        self.staging = staging
        self.layers = layers
        self.ranks_per_layer = ranks_per_layer
        self.ranks = ranks
        self.early = pipeline_policy.early
        self.pulls = method.pulls
        self.waits = pipeline_policy.prefill_waits
        """The engine stands still while a prompt is on its way."""
        self.room_with_write = comes_with_the_write(method, pipeline_policy)
        self.steps = RunningSteps(layers)
        self.outgoing: dict[Handle, StagedSend] = {}

    def begin(self, requests: PrefillRequests) -> None:
        super().begin(requests)
        rules: dict[type, Any] = {
            ChunkStarted: self.chunk_started,
            LayerReady: self.layer_ready,
            CopiedOut: self.copied_out,
        }
        requests.core.rules.update(rules)

    def take_effects(self, do: dict[type, Execute]) -> None:
        post = do[PostWrite]

        def post_write(port: Port, effect: PostWrite) -> None:
            """Post a WRITE, after room is asked for: what is computed is copied and offered before."""
            self.written(effect.registration.xid)
            self.requests.core.execute()
            post(port, effect)

        do[PostWrite] = post_write

    def refusal(self, num_tokens: int) -> str:
        if self.staging.fits_ever(num_tokens):
            return ""
        return f"a prompt of {num_tokens} tokens is too long for {self.method.p_memory.value}"

    # What the engine does.

    def chunk_started(self, event: ChunkStarted) -> None:
        self.steps.begin(event.step)
        request = self.requests.by_handle.get(event.handle)
        if request is None or not request.keeps:
            return
        if self.method.grain is Grain.LAYER and event.known < request.prompt_tokens:
            return  # All of a layer goes at once, with the step that computes the last of it.
        going = self.outgoing.get(event.handle) or self._start_send(request, event.source)
        if going.over:
            return
        if going.staged is None:
            going.chunks.append((event.step, event.known))
        else:
            self._plan(going, event.step, event.known)

    def layer_ready(self, event: LayerReady) -> None:
        for handle, piece in self.steps.advance(event):
            going = self.outgoing.get(handle)
            if going is not None:
                self._copy(going, piece)

    def computed(self, request: PrefillRequest, source: Allocation) -> None:
        going = self.outgoing.get(request.handle)
        if going is None:
            going = self._start_send(request, source)
        if self.room_with_write:
            self._finish(going)
        else:
            if self.waits and not going.over and not (self.early and going.stays):
                self.requests.wait_for(request.handle)
            if self.early and not going.stays:
                self._finish(going)
        self._settle(going)

    def copied_out(self, event: CopiedOut) -> None:
        handle, copied, rank = event.handle, event.piece, event.rank
        going = self.outgoing.get(handle)
        if going is None:
            return
        if going.staged is not None and not going.over and not self.pulls:
            pieces = whole(self.layers, going.request.prompt_tokens) if copied is None else [copied]
            for piece in pieces:
                self.requests.emit(OfferPiece(handle, piece, rank))
        going.copying -= 1
        self._settle(going)

    def ended(self, request: PrefillRequest) -> None:
        handle = request.handle
        self.staging.forget(handle)
        going = self.outgoing.get(handle)
        if going is None:
            self.requests.forget(request)
        else:
            going.over, going.in_blocks = True, False
            self._forget(going)
        self.requests.wait_no_more(handle)
        self._admit_waiting()

    # What the protocol does.

    def written(self, handle: Handle) -> None:
        """Ask for room for a prompt, unless it has done so: a WRITE of it is posted."""
        going = self.outgoing[handle]
        if not going.room_requested and not going.over:
            if self.waits:
                self.requests.wait_for(handle)
            self._request_room(going)

    def released(self, request: PrefillRequest) -> None:
        going = self.outgoing[request.handle]
        going.over = True
        self._release(going)
        self.requests.emit(WithdrawPieces(request.handle))
        self._settle(going)
        self._forget(going)
        self.requests.wait_no_more(request.handle)
        self._admit_waiting()

    def settle(self, request: PrefillRequest) -> None:
        going = self.outgoing.get(request.handle)
        if going is not None:
            self._settle(going)

    # Room.

    def _admit_waiting(self) -> None:
        """Give room to prompts that wait for it, and go on with them: announce them, copy what is computed."""
        requests = self.requests
        for handle in self.staging.victims():
            requests.send_local(SourceWithdrawn(handle))
        while (admission := self.staging.admit_next()) is not None:
            handle, staged = admission
            going = self.outgoing[handle]
            going.staged = staged
            requests.emit(TakeRoom(handle, staged))
            if not self.early:
                going.copying = self.ranks
                requests.emit(CopyOut(handle, staged, None))
                continue
            if not going.request.held:
                self._announce(going)
            for step, known in going.chunks:
                self._plan(going, step, known)
            going.chunks.clear()
            if going.request.computed and not self.room_with_write:
                self._finish(going)

    def _start_send(self, request: PrefillRequest, source: Allocation) -> StagedSend:
        """Begin to send a prompt: ask for room, or announce it where room comes with the WRITE."""
        going = self.outgoing[request.handle] = StagedSend(request, source)
        if not self.room_with_write:
            self._request_room(going)
        elif self.early:
            self._announce(going)
        return going

    def _request_room(self, going: StagedSend) -> None:
        going.room_requested = True
        self.staging.enqueue(going.request.handle, going.request.prompt_tokens)
        self._admit_waiting()

    def _release(self, going: StagedSend) -> None:
        """Give back a prompt's room, or stop waiting for it."""
        staged, going.staged = going.staged, None
        if staged is None:
            self.staging.forget(going.request.handle)
            return
        self.requests.emit(LeaveRoom(going.request.handle))
        self.staging.release(staged)

    # Copies.

    def _plan(self, going: StagedSend, step: int, known: int) -> None:
        """Copy a chunk layer by layer, as far as its step has come, and with the step from there on."""
        start, going.copied = going.copied, known
        going.copying += self.layers * self.ranks_per_layer
        ready = self.steps.ready.get(step, self.layers)
        if ready < self.layers:
            self.steps.chunks[step].append((going.request.handle, start, known))
        for layer in range(ready):
            self._copy(going, Piece(layer, start, known))

    def _copy(self, going: StagedSend, piece: Piece) -> None:
        """Copy a piece that is computed. A prompt that has lost its room meanwhile needs no copy, and one that the
        engine has dropped has no blocks to copy from."""
        if going.staged is not None and not going.over:
            self.requests.emit(CopyOut(going.request.handle, going.staged, piece))
        else:
            going.copying -= self.ranks_per_layer
            self._settle(going)

    def _settle(self, going: StagedSend) -> None:
        """After the last copy of a prompt, report it to the protocol, and then free its blocks."""
        request = going.request
        if going.copying or not request.computed or not going.in_blocks or going.stays or request.answering:
            return
        if not going.finished:
            self._finish(going)
            return
        going.in_blocks = False
        if self.method.p_memory is not MemoryKind.TENSORS:
            self.requests.wait_no_more(request.handle)
        self.requests.free(request)
        self._forget(going)

    # What the protocol is told.

    def _announce(self, going: StagedSend) -> None:
        self.requests.announce(going.request, self._lies(going))

    def _finish(self, going: StagedSend) -> None:
        going.finished = True
        going.request.held = going.request.held or not going.over
        self.requests.finish(going.request, self._lies(going))

    def _lies(self, going: StagedSend) -> Allocation:
        """Return where a prompt lies for the protocol: in its room where D reads and it has some, else in its
        blocks."""
        return going.staged if self.pulls and going.staged is not None else going.source

    def _forget(self, going: StagedSend) -> None:
        request = going.request
        done = going.over and not going.in_blocks and not request.held and not request.answering
        if done and self.outgoing.pop(request.handle, None) is not None:
            self.requests.forget(request)

    def fingerprint(self) -> Hashable:
        outgoing = tuple([(handle, *going.state()) for handle, going in self.outgoing.items()])
        return self.staging.fingerprint(), self.steps.fingerprint(), outgoing

    def assert_empty(self, whose: str) -> None:
        kept = (self.staging.held, self.staging.waiting, self.outgoing, self.steps.chunks, self.steps.ready)
        assert not any(kept), f"{whose} still holds {kept}"
