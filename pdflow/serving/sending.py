"""Sending from a prefill engine's own blocks, and the rules by which a prompt's blocks become free.

`Sending`: a prompt is sent when all of it is computed. Its blocks are the protocol's until it releases them.

`ProgressiveSending` (vLLM #55589): a prompt is sent while it is computed, layer by layer. What has begun is computed to
its end, even if nobody wants it any more, since a WRITE may read its blocks until then: they are free when all of the
prompt is computed and the protocol has released it.
"""

from __future__ import annotations

from collections.abc import Hashable

from pdflow.methods.shipment import Piece
from pdflow.protocol.effects import AnswerPrefill
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation
from pdflow.serving.core import Execute
from pdflow.serving.effects import Drop, OfferPiece, WithdrawPieces
from pdflow.serving.events import ChunkStarted, EngineDropped, Handle, LayerReady
from pdflow.serving.prefill_request import PrefillRequest
from pdflow.serving.prefill_requests import PrefillRequests


class Sending:
    """Sending from the engine's blocks, when a prompt is computed."""

    def __init__(self) -> None:
        self.requests: PrefillRequests

    def begin(self, requests: PrefillRequests) -> None:
        """Attach the sending to the requests of an engine."""
        self.requests = requests

    def take_effects(self, do: dict[type, Execute]) -> None:
        """Take over the effects of endpoints that are not handled by the driver alone."""

    def refusal(self, num_tokens: int) -> str:  # noqa: ARG002
        """Return why a prompt of so many tokens can never be sent; empty if it can."""
        return ""

    def look_up(self, request: PrefillRequest) -> None:
        """Ask the store for the beginning of a prompt."""
        raise NotImplementedError

    def aborted(self, request: PrefillRequest) -> None:
        """Drop a prompt that nobody wants any more. A computed prompt stays: its lease decides."""
        if not request.computed and not request.dropping:
            self.drop(request)

    def drop(self, request: PrefillRequest) -> None:
        request.dropping = True
        self.requests.emit(Drop(request.handle))

    def dropped(self, request: PrefillRequest, event: EngineDropped) -> None:
        """End a prompt that the engine has dropped, unless it was too late."""
        if not event.too_late:
            self.end(request, Code.CANCELLED)

    def rejected(self, request: PrefillRequest, reason: str) -> None:
        """End a prompt that the engine can never compute."""
        self.end(request, Code.REJECTED, reason)

    def failed(self, request: PrefillRequest) -> None:
        """End a prompt that the engine has stopped computing."""
        self.end(request, Code.PREFILL_ABORTED)

    def end(self, request: PrefillRequest, code: Code, reason: str = "") -> None:
        """End a prompt of which the engine has nothing and no KV comes."""
        self.requests.end(request, code, reason)
        self.ended(request)

    def ended(self, request: PrefillRequest) -> None:
        """Forget a prompt whose end has been reported to the protocol."""
        self.requests.forget(request)

    def computed(self, request: PrefillRequest, source: Allocation) -> None:
        """Report to the protocol that all of a prompt's KV is in these blocks."""
        request.held = True
        self.requests.finish(request, source)

    def answer(self, request: PrefillRequest, effect: AnswerPrefill) -> None:
        """Pass on the protocol's answer to the client or router that asked for the prompt."""
        request.answering = False
        self.requests.emit(effect)
        self.settle(request)

    def released(self, request: PrefillRequest) -> None:
        """Free what the protocol's release of a prompt makes free."""
        self.settle(request)

    def settle(self, request: PrefillRequest) -> None:
        """Free the blocks of a prompt and forget it, as soon as the protocol has answered it and released it."""
        if request.answering or request.held or not request.computed:
            return
        if not request.freed:
            self.requests.free(request)
        if self.is_over(request):
            self.requests.forget(request)

    def is_over(self, request: PrefillRequest) -> bool:  # noqa: ARG002
        """Whether nothing is to come of a prompt that the protocol has released."""
        return True

    def fingerprint(self) -> Hashable:
        return ()

    def assert_empty(self, whose: str) -> None:
        """Assert, at rest, that no state of any prompt is kept."""


class RunningSteps:
    """The steps that run, and which chunks of prompts are in each.

    A step is known from its first chunk until its last layer. Args: `layers` of the model, as the driver counts them.
    """

    __slots__ = ("chunks", "layers", "ready")

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.chunks: dict[int, list[tuple[Handle, int, int]]] = {}
        """Chunks by step: (the prompt, from which token, to which)."""
        self.ready: dict[int, int] = {}
        """How many layers are computed, by step."""

    def begin(self, step: int) -> None:
        if step not in self.chunks:
            self.chunks[step] = []
            self.ready[step] = 0

    def advance(self, event: LayerReady) -> list[tuple[Handle, Piece]]:
        """Record that a step has computed a layer, and return the pieces that are computed now."""
        step, layer = event.step, event.layer
        pieces = [(handle, Piece(layer, start, stop)) for handle, start, stop in self.chunks[step]]
        self.ready[step] = layer + 1
        if layer + 1 == self.layers:
            del self.chunks[step], self.ready[step]
        return pieces

    def fingerprint(self) -> Hashable:
        return tuple([(step, tuple(chunks), self.ready[step]) for step, chunks in self.chunks.items()])


class ProgressiveSending(Sending):
    """Sending from the engine's blocks, while a prompt is computed."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.steps = RunningSteps(layers)

    def begin(self, requests: PrefillRequests) -> None:
        super().begin(requests)
        requests.core.rules.update({ChunkStarted: self.chunk_started, LayerReady: self.layer_ready})

    def chunk_started(self, event: ChunkStarted) -> None:
        requests = self.requests
        self.steps.begin(event.step)
        request = requests.by_handle.get(event.handle)
        if request is None or request.ended or not request.keeps:
            return
        if not request.known:
            requests.announce(request, event.source)
        self.steps.chunks[event.step].append((event.handle, request.known, event.known))
        request.known = event.known

    def layer_ready(self, event: LayerReady) -> None:
        requests = self.requests
        for handle, piece in self.steps.advance(event):
            request = requests.by_handle.get(handle)
            if request is not None and request.held:
                requests.emit(OfferPiece(handle, piece))

    def drop(self, request: PrefillRequest) -> None:
        """Drop a prompt, or only end it if its computation has begun: then it is computed to its end."""
        if not request.known:
            super().drop(request)
        else:
            self.requests.end(request, Code.CANCELLED)

    def failed(self, request: PrefillRequest) -> None:
        """End a prompt that the engine has stopped computing, but keep its blocks: a WRITE may read what is
        computed."""
        if not request.known:
            super().failed(request)
            return
        if not request.ended:
            self.requests.end(request, Code.PREFILL_ABORTED)
        request.computed = True
        self.settle(request)

    def computed(self, request: PrefillRequest, source: Allocation) -> None:
        if not request.ended:
            self.requests.finish(request, source)
        self.settle(request)

    def released(self, request: PrefillRequest) -> None:
        self.requests.emit(WithdrawPieces(request.handle))
        self.settle(request)

    def fingerprint(self) -> Hashable:
        return self.steps.fingerprint()

    def assert_empty(self, whose: str) -> None:
        kept = (self.steps.chunks, self.steps.ready)
        assert not any(kept), f"{whose} still computes {kept}"
