"""Sending of a prefill engine into a store, and loading from there of what other engines have put.

The store is to P what a decode engine is to others: the protocol releases a prompt when the store has it, and the
prefill leg is answered with the store's parameters. Where blocks have keys, the store is asked before a prompt is
computed. P loads the beginning that is there as a decode engine would, by a second scheduler. What cannot be loaded is
computed.
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
    """Sending into a store, and loading from it.

    Args:
        most_tokens: the most tokens of one prompt that a node of the store holds.
        waits: the engine stands still until what it has computed is put.
    """

    def __init__(self, most_tokens: int, block_size: int, waits: bool = False) -> None:
        super().__init__()
        self.most_tokens = most_tokens
        self.block_size = block_size
        self.waits = waits
        self.scheduler: Port
        """The endpoint with which it loads."""
        self.asking: dict[Handle, None] = {}
        """Prompts whose lookup the store has not answered."""
        self.loading: dict[RequestId, PromptLoad] = {}
        self.putting: dict[Handle, None] = {}
        """Prompts that are computed, and whose put the store has not answered."""

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
        return f"a prompt of {num_tokens} tokens is too long for a store node"

    def send_load_event(self, event: object) -> None:
        self.requests.core.send_local(self.scheduler, event)

    def report_admission(self, event: object) -> None:
        """Send an event to the loading endpoint before anything else happens: what ends the load must find its blocks
        known."""
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
        """End a prompt that the engine can never compute, loaded in part or not: it takes the same blocks."""
        if request.request_id in self.loading:
            self.send_load_event(DecodeAborted(request.request_id, Code.REJECTED))
        else:
            super().rejected(request, reason)

    def admitted(self, event: EngineAdmitted) -> None:
        """Report to the protocol the blocks into which a prompt's beginning is to be loaded."""
        request = self.requests.by_handle.get(event.handle)
        load = None if request is None else self.loading.get(request.request_id)
        if request is None or load is None or request.dropping:
            return  # It has ended meanwhile, or its load has: the answer to its Drop gives these blocks back.
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
        """Give up a load that has failed. The engine drops the prompt first."""
        load = self.loading[effect.request_id]
        load.code = effect.code
        self.drop(load.request)

    def dropped(self, request: PrefillRequest, event: EngineDropped) -> None:
        """Have a prompt computed that cannot be loaded, unless nobody wants it any more."""
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
        """Put a prompt into the store, from which its answer then comes."""
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
        """Withdraw a prompt for which nobody comes: otherwise its blocks would wait for its lease."""
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
        """Abort a prompt wherever it is: before the engine has it, while it is loaded or computed, or on its way to the
        store."""
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
        assert not any(kept), f"{whose} still holds {kept}"
