"""A prefill engine that puts what it computes into a store, and loads from there what others have put.

The store is to it what a decode engine is to others: the protocol releases a prompt when the store has it, and the
prefill leg is answered in the store's words. Where blocks have keys, the store is asked before a prompt is computed. P
loads the beginning that is there as a decode engine would, by a second scheduler. What cannot be loaded is computed.
"""

from __future__ import annotations

from collections.abc import Hashable

from pdflow.protocol.effects import AnswerPrefill, Commit, Enqueue, FreeBlocks, Resolve
from pdflow.protocol.events import DecodeAborted, DecodeAdmitted, DecodeHit, DecodeQueued, SourceWithdrawn
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId
from pdflow.serving.core import Execute, Port
from pdflow.serving.effects import (
    AnswerStored,
    AskStore,
    ComputeAgain,
    EndPrefill,
    EnqueueLoading,
    StartPut,
    WithdrawFound,
    WithdrawPut,
)
from pdflow.serving.events import EngineAdmitted, EngineDropped, Handle, PutEnded, StoreAnswered
from pdflow.serving.prefill_request import PrefillRequest
from pdflow.serving.prefill_requests import PrefillRequests
from pdflow.serving.sending import Sending


class PromptLoad:
    """The beginning of a prompt on its way from the store."""

    __slots__ = ("code", "num_tokens", "protocol_frees", "request")

    def __init__(self, request: PrefillRequest, num_tokens: int) -> None:
        self.request = request
        self.num_tokens = num_tokens
        self.protocol_frees = False
        """The protocol knows of its blocks, and gives them back itself."""
        self.code = Code.NONE
        """Why it is dropped, once it is."""


class Storing(Sending):
    """Args: a node of the store holds `most_tokens` of one prompt at most; `waits`: the engine stands still until what
    it has computed is put."""

    def __init__(self, most_tokens: int, block_size: int, waits: bool = False) -> None:
        super().__init__()
        self.most_tokens = most_tokens
        self.block_size = block_size
        self.waits = waits
        self.scheduler: Port
        """The endpoint with which it loads."""
        self.asking: dict[Handle, None] = {}
        """Prompts that wait for the store to say what it has of them."""
        self.loading: dict[RequestId, PromptLoad] = {}
        self.putting: dict[Handle, None] = {}
        """Prompts that are computed, and of which the store has not said that it has them."""

    def begin(self, requests: PrefillRequests) -> None:
        super().begin(requests)
        requests.core.rules.update(
            {
                StoreAnswered: self.store_answered,
                EngineAdmitted: self.admitted,
                PutEnded: self.put_ended,
            }
        )

    def take_effects(self, do: dict[type, Execute]) -> None:
        do[Enqueue] = self.enqueue
        do[Commit] = self.commit
        do[Resolve] = self.resolve

    def refusal(self, num_tokens: int) -> str:
        if num_tokens <= self.most_tokens:
            return ""
        return f"a prompt of {num_tokens} tokens is too long for a node of the store"

    def send_load_event(self, event: object) -> None:
        self.requests.core.send_local(self.scheduler, event)

    def report_admission(self, event: object) -> None:
        """Before anything else happens: what ends the load must find its blocks known."""
        self.requests.core.send_local_first(self.scheduler, event)

    # What the store has of it already.

    def look_up(self, request: PrefillRequest) -> None:
        self.asking[request.handle] = None
        self.requests.emit(AskStore(request.handle))

    def store_answered(self, event: StoreAnswered) -> None:
        handle, params, requests = event.handle, event.params, self.requests
        if handle not in self.asking:
            if params is not None:
                requests.emit(WithdrawFound(params))
            return
        del self.asking[handle]
        request = requests.by_handle[handle]
        if params is None or not 0 < params.num_tokens < request.prompt_tokens:
            requests.emit(Enqueue(handle))
            return
        self.loading[request.request_id] = PromptLoad(request, params.num_tokens)
        blocks = -(-params.num_tokens // self.block_size)
        self.send_load_event(DecodeQueued(request.request_id, params, blocks, 0))

    def enqueue(self, _: Port, effect: Enqueue) -> None:
        load = self.loading[effect.request_id]
        self.requests.emit(EnqueueLoading(load.request.handle, load.num_tokens))

    def rejected(self, request: PrefillRequest, reason: str) -> None:
        """With a part that is loaded or without. It takes the same blocks."""
        if request.request_id in self.loading:
            self.send_load_event(DecodeAborted(request.request_id, Code.REJECTED))
        else:
            super().rejected(request, reason)

    def admitted(self, event: EngineAdmitted) -> None:
        """It has blocks for its beginning."""
        request = self.requests.by_handle.get(event.handle)
        load = None if request is None else self.loading.get(request.request_id)
        if request is None or load is None:
            return  # It has ended meanwhile, and the answer to its Drop has given these blocks back.
        load.protocol_frees = True
        here, there = event.hit_tokens, load.num_tokens
        if here >= there:
            self.report_admission(DecodeHit(request.request_id))
        else:
            missing, weights = there - here, self.requests.weights
            self.report_admission(
                DecodeAdmitted(request.request_id, event.allocation, here, missing, request.digest, weights)
            )

    def commit(self, _: Port, effect: Commit) -> None:
        load = self.loading.pop(effect.request_id)
        self.requests.emit(Commit(load.request.handle))

    def resolve(self, _: Port, effect: Resolve) -> None:
        """It cannot be loaded. What the engine has of it goes first."""
        load = self.loading[effect.request_id]
        load.code = effect.code
        self.drop(load.request)

    def dropped(self, request: PrefillRequest, event: EngineDropped) -> None:
        """What cannot be loaded is computed, unless nobody wants it any more."""
        load = self.loading.pop(request.request_id, None)
        if load is None:
            super().dropped(request, event)
            return
        if event.left is not None and not load.protocol_frees:
            self.requests.emit(FreeBlocks(event.left))
        if load.code is Code.CANCELLED:
            self.end(request, Code.CANCELLED)
        else:
            self.requests.emit(ComputeAgain(request.handle))

    # What is computed.

    def answer(self, request: PrefillRequest, effect: AnswerPrefill) -> None:
        """What is answered comes from the store."""
        handle = request.handle
        request.answering = False
        self.putting[handle] = None
        if self.waits:
            self.requests.wait_for(handle)
        self.requests.emit(StartPut(handle, effect.params))

    def put_ended(self, event: PutEnded) -> None:
        handle, requests = event.handle, self.requests
        if handle not in self.putting:
            return
        del self.putting[handle]
        request = requests.by_handle[handle]
        if event.params is None:
            requests.emit(EndPrefill(handle, event.code))
            self._over(request)
        else:
            requests.emit(AnswerStored(handle, event.params))
            self.settle(request)

    def _over(self, request: PrefillRequest) -> None:
        """Nobody comes for it: were its lease waited for, so would be its blocks."""
        if request.held:
            self.requests.send_local(SourceWithdrawn(request.handle))
        else:
            self.requests.wait_no_more(request.handle)
            self.settle(request)

    def is_over(self, request: PrefillRequest) -> bool:
        return request.handle not in self.putting

    def released(self, request: PrefillRequest) -> None:
        self.requests.wait_no_more(request.handle)
        super().released(request)

    def aborted(self, request: PrefillRequest) -> None:
        """Wherever it is: before the engine has it, on its way here, being computed, or on its way from here."""
        handle = request.handle
        if handle in self.asking:
            del self.asking[handle]
            self.end(request, Code.CANCELLED)
        elif request.request_id in self.loading:
            if request.dropping:
                self.loading[request.request_id].code = Code.CANCELLED
            else:
                self.send_load_event(DecodeAborted(request.request_id, Code.CANCELLED))
        elif handle in self.putting:
            del self.putting[handle]
            self.requests.emit(WithdrawPut(handle))
            self._over(request)
        else:
            super().aborted(request)

    def fingerprint(self) -> Hashable:
        loading = tuple(
            [(name, load.num_tokens, load.protocol_frees, load.code) for name, load in self.loading.items()],
        )
        return tuple(self.asking), loading, tuple(self.putting)

    def assert_empty(self, whose: str) -> None:
        kept = (self.asking, self.loading, self.putting)
        assert not any(kept), f"{whose} still keeps {kept}"
