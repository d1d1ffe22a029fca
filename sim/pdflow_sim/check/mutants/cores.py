"""Mutants of engines' cores: which side ends a request, which frees its blocks, and when the protocol is notified."""

from __future__ import annotations

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.protocol.effects import Commit, FreeBlocks, Resolve
from pdflow.protocol.events import DecodeAborted
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation
from pdflow.serving.core import Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.decode_request import DecodeRequest
from pdflow.serving.decode_requests import DecodeRequests
from pdflow.serving.events import EngineDropped, PrefillReported, RequestAborted
from pdflow.serving.landing import Landing
from pdflow.serving.prefill_request import PrefillRequest
from pdflow.serving.prefill_requests import PrefillRequests
from pdflow.serving.sending import Sending
from pdflow_sim.check.mutants.mutant import Mutant, Swap
from pdflow_sim.check.scopes.scope import Scope

# At D.


def _always_the_protocols(self: DecodeCore, event: RequestAborted) -> None:
    if event.handle in self.requests.by_handle:
        self.requests.send_local(DecodeAborted(event.handle, Code.CANCELLED))


def _always_the_engines(self: DecodeCore, event: RequestAborted) -> None:
    request = self.requests.by_handle.get(event.handle)
    if request is not None:
        self.requests.drop(request, False)
        self.requests.end(request, Code.CANCELLED)


def _aborted_without_a_drop(self: DecodeRequests, request: DecodeRequest, protocol_frees: bool) -> None:
    del request, protocol_frees


def _unreported_not_freed(self: DecodeCore, event: EngineDropped) -> None:
    self.requests.dropping.pop(event.handle)


def _always_given_back(self: DecodeCore, event: EngineDropped) -> None:
    self.requests.dropping.pop(event.handle)
    if event.left is not None:
        self.requests.emit(FreeBlocks(event.left))


def _forgets_to_end(self: DecodeCore, _: Port, effect: Resolve) -> None:
    self.landing.resolved(self.requests.by_handle[effect.request_id])


def _decodes_at_once(self: Landing, request: DecodeRequest, staged: Allocation, hit_tokens: int) -> None:
    _admit(self, request, staged, hit_tokens)
    self.requests.emit(Commit(request.handle))


_admit = Landing.admit


def _ignores_prefill_report(self: DecodeCore, event: PrefillReported) -> None:
    del event


# At P.


def _freed_when_computed(self: Sending, request: PrefillRequest, source: Allocation) -> None:
    request.held = True
    self.requests.finish(request, source)
    self.requests.free(request)


def _never_freed(self: PrefillRequests, request: PrefillRequest) -> None:
    request.freed = True


def _dropped_all_the_same(self: Sending, request: PrefillRequest, event: EngineDropped) -> None:
    self.end(request, Code.CANCELLED)


def _dropped_when_computed(self: Sending, request: PrefillRequest) -> None:
    self.end(request, Code.CANCELLED)


def _forgotten_when_released(self: Sending, request: PrefillRequest) -> None:
    self.requests.forget(request)


CORES = (
    Mutant(
        name="abort-is-always-the-protocols",
        drops="The engine aborts a request whose KV has landed. Without it, the abort goes to the protocol, "
        "which has forgotten the request, and D decodes on.",
        source="issue 16: D's abort",
        patches=(Swap(DecodeCore._aborted, _always_the_protocols),),
        scope=Scope(decodes=True, preempt=1),
        breaks="S6",
    ),
    Mutant(
        name="abort-is-always-the-engines",
        drops="The protocol aborts a request whose KV has not landed. Without it, the core frees blocks that are "
        "registered with P.",
        source="issue 16: D's abort",
        patches=(Swap(DecodeCore._aborted, _always_the_engines),),
        breaks="S6",
    ),
    Mutant(
        name="aborted-request-stays-in-engine",
        drops="The engine drops a request that is aborted or resolved. Without it, the engine keeps blocks that "
        "have been freed.",
        source="issue 16: D's abort",
        patches=(Swap(DecodeRequests.drop, _aborted_without_a_drop),),
        breaks="S6",
    ),
    Mutant(
        name="unreported-blocks-not-freed",
        drops="The core frees blocks that the engine has allocated and the core has not reported to the "
        "protocol. Without it, they are never freed.",
        source="issue 16: RESOLVE before the allocation",
        patches=(Swap(DecodeCore._dropped, _unreported_not_freed),),
        scope=Scope(late=True, deadline=1, stall=0),
        breaks="L",
    ),
    Mutant(
        name="given-back-twice",
        drops="Only the protocol frees blocks that it knows of, because a WRITE may still land in them. Without "
        "it, the core frees them too.",
        source="issue 16: RESOLVE before the allocation; H6",
        patches=(Swap(DecodeCore._dropped, _always_given_back),),
        breaks="S1",
    ),
    Mutant(
        name="resolved-and-not-ended",
        drops="A request ends when the protocol has resolved it. Without it, the client waits forever.",
        source="issue 16: the reported answer",
        patches=(Swap(DecodeCore._resolve, _forgets_to_end),),
        breaks="L",
    ),
    Mutant(
        name="decoded-when-admitted",
        drops="D decodes a request when its KV has landed. Without it, D decodes whatever was in the blocks before.",
        source="issue 16: staged D; S3",
        patches=(Swap(Landing.admit, _decodes_at_once),),
        breaks="S3",
    ),
    Mutant(
        name="prefill-report-is-lost",
        drops="In vllm-compat, D is notified how the prefill leg ended. Without it, D waits for a prompt that failed.",
        source="issue 16: the reported answer",
        patches=(Swap(DecodeCore._prefill_reported, _ignores_prefill_report),),
        scope=Scope(dialect=VLLM_COMPAT, prefill_abort=1),
        breaks="L",
    ),
    Mutant(
        name="freed-when-computed",
        drops="P's blocks belong to the protocol until it has released them. Without it, a WRITE reads another "
        "prompt's KV.",
        source="issue 16: P's abort and its lease; S2",
        patches=(Swap(Sending.computed, _freed_when_computed),),
        breaks="S2",
    ),
    Mutant(
        name="never-freed-at-p",
        drops="P's blocks return to its pool when the protocol has released them. Without it, they stay "
        "allocated forever.",
        source="issue 16: P's abort and its lease",
        patches=(Swap(PrefillRequests.free, _never_freed),),
        breaks="L",
    ),
    Mutant(
        name="dropped-though-too-late",
        drops="A prompt that is already computed when the engine drops it stays. Without it, P forgets a prompt "
        "that the protocol still reports.",
        source="issue 16: P's abort",
        patches=(Swap(Sending.dropped, _dropped_all_the_same),),
        scope=Scope(late=True, abort=1, stall=0),
        breaks="S6",
    ),
    Mutant(
        name="abort-ends-a-computed-prompt",
        drops="A computed prompt stays when its leg is aborted: its lease decides, because D may already have "
        "it. Without it, P forgets a prompt that the protocol still reports.",
        source="issue 16: P's abort and its lease",
        patches=(Swap(Sending.aborted, _dropped_when_computed),),
        scope=Scope(late=True, abort=1, stall=0),
        breaks="S6",
    ),
    Mutant(
        name="forgotten-with-its-blocks",
        drops="P frees the blocks of a released prompt before it forgets the prompt. Without it, the blocks are "
        "never freed.",
        source="issue 16: P's abort and its lease",
        patches=(Swap(Sending.settle, _forgotten_when_released),),
        breaks="S6",
    ),
)
