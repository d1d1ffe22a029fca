"""Mutants of engines that send prompts while they are computed, or through staging memory."""

from __future__ import annotations

from pdflow.methods.shipment import Piece, whole
from pdflow.protocol.effects import FreeBlocks
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation
from pdflow.serving.decode_request import DecodeRequest
from pdflow.serving.effects import CopyOut, GiveBackRoom, LeaveRoom, OfferPiece, WithdrawPieces
from pdflow.serving.events import CopiedIn, CopiedOut, Handle
from pdflow.serving.landing import Landing, StagedLanding
from pdflow.serving.prefill_request import PrefillRequest
from pdflow.serving.prefill_requests import PrefillRequests
from pdflow.serving.sending import ProgressiveSending, Sending
from pdflow.serving.staged_sending import StagedSend, StagedSending
from pdflow_sim.check.mutants.mutant import Mutant, Swap
from pdflow_sim.check.scopes.scope import Scope

# At P.


def _copies_after_abort(self: StagedSending, going: StagedSend, piece: Piece) -> None:
    if going.staged is not None:
        self.requests.emit(CopyOut(going.request.handle, going.staged, piece))
    else:
        going.copying -= self.ranks_per_layer
        self._settle(going)


def _offers_after_abort(self: StagedSending, event: CopiedOut) -> None:
    going = self.outgoing.get(event.handle)
    if going is None:
        return
    if going.staged is not None and not self.method.pulls:
        pieces = whole(self.layers, going.request.prompt_tokens) if event.piece is None else [event.piece]
        for piece in pieces:
            self.requests.emit(OfferPiece(event.handle, piece, event.rank))
    going.copying -= 1
    self._settle(going)


def _freed_before_it_is_copied(self: StagedSending, going: StagedSend) -> None:
    copying, going.copying = going.copying, 0
    _settled(self, going)
    going.copying = copying


_settled = StagedSending._settle


def _keeps_its_staging(self: StagedSending, going: StagedSend) -> None:
    going.staged = None


def _staging_freed_first(self: StagedSending, going: StagedSend) -> None:
    """Give the staging memory back though something may still be sent from it."""
    _finished(self, going)
    if going.staged is not None:
        self.requests.emit(LeaveRoom(going.request.handle))
        self.staging.release(going.staged)
        going.staged = None


_finished = StagedSending._finish


def _no_next_prompt(self: StagedSending, request: PrefillRequest) -> None:
    going = self.outgoing[request.handle]
    going.over = True
    self._release(going)
    self.requests.emit(WithdrawPieces(request.handle))
    self._settle(going)
    self._forget(going)
    self.requests.wait_no_more(request.handle)


def _waits_forever(self: PrefillRequests, handle: Handle) -> None: ...


def _source_in_blocks(self: StagedSending, going: StagedSend) -> Allocation:
    return going.source


def _dropped_in_the_middle(self: ProgressiveSending, request: PrefillRequest) -> None:
    Sending.drop(self, request)


def _freed_though_it_is_sent(self: ProgressiveSending, request: PrefillRequest) -> None:
    if not request.known:
        Sending.failed(self, request)
        return
    self.requests.end(request, Code.PREFILL_ABORTED)
    request.computed = True
    self.requests.free(request)


# At D.


def _loaded_and_kept(self: StagedLanding, event: CopiedIn) -> None:
    requests, handle = self.requests, event.handle
    self.copying.pop(handle)
    left = self.abandoned.pop(handle, None)
    request = requests.by_handle.get(handle)
    if left is not None:
        requests.emit(FreeBlocks(left))
    elif request is not None:
        requests.loaded(request)
    requests.wait_no_more(handle)


def _left_under_a_copy(self: StagedLanding, handle: Handle, allocation: Allocation) -> None:
    Landing.left(self, handle, allocation)


def _leaves_nothing(self: StagedLanding, request: DecodeRequest) -> None:
    request.staged = None


def _no_next_request(self: StagedLanding, staged: Allocation) -> None:
    self.requests.emit(GiveBackRoom(staged))
    self.staging.release(staged)


def _staging_freed_at_once(self: StagedLanding, request: DecodeRequest) -> None:
    """Give the staging memory back as soon as the client gives up, though something may still land there."""
    staged = request.staged
    _resolved(self, request)
    if staged is not None:
        self.release(staged)


_resolved = StagedLanding.resolved

LAYERS = Scope(method="p2p-nccl-put-async", prefill_abort=1, stall=0, deadline=0)
PROGRESSIVE = Scope(method="nixl-push", progressive=True, late=True, stall=0, deadline=0)
BOTH = Scope(method="cpu-staged", requests=2, pool=1, p_pool=1, abort=0, stall=0, deadline=0)
COPIED = Scope(method="cpu-staged", late=True, decodes=True, stall=0, deadline=0)

STAGING: tuple[Mutant, ...] = (
    Mutant(
        name="copied-after-abort",
        drops="P copies no layer of an aborted prompt, because its blocks belong to another prompt. Without it, "
        "P copies another prompt's KV.",
        source="issue 16: staged P's copies",
        patches=(Swap(StagedSending._copy, _copies_after_abort),),
        scope=LAYERS,
        breaks="S6",
    ),
    Mutant(
        name="sent-after-abort",
        drops="P sends no copy that ends after its prompt was aborted, because its blocks belonged to another "
        "prompt meanwhile. Without it, P sends another prompt's KV.",
        source="issue 16: staged P's copies",
        patches=(Swap(StagedSending.copied_out, _offers_after_abort),),
        scope=Scope(method="cpu-staged", late=True, prefill_abort=1, stall=0, deadline=0),
        breaks="S6",
    ),
    Mutant(
        name="freed-before-it-is-copied",
        drops="P frees blocks when the whole prompt has been copied from them. Without it, P copies another "
        "prompt's KV.",
        source="issue 16: staged P's copies",
        patches=(Swap(StagedSending._settle, _freed_before_it_is_copied),),
        scope=Scope(method="cpu-staged", late=True, abort=0, stall=0, deadline=0),
        breaks="S6",
    ),
    Mutant(
        name="staging-kept-at-p",
        drops="P frees the staging memory of a released prompt for the next one. Without it, the next prompt "
        "waits forever.",
        source="issue 16: P's staging memory",
        patches=(Swap(StagedSending._release, _keeps_its_staging),),
        scope=BOTH,
        breaks="L",
    ),
    Mutant(
        name="staging-freed-too-early-at-p",
        drops="A prompt keeps its staging memory at P until the protocol has released it. Without it, a READ "
        "finds another prompt's KV there.",
        source="issue 16: P's staging memory; S2",
        patches=(Swap(StagedSending._finish, _staging_freed_first),),
        scope=Scope(method="mooncake-v0", pulls=True),
        breaks="S6",
    ),
    Mutant(
        name="no-next-prompt-at-p",
        drops="When staging memory is freed at P, the next waiting prompt gets it. Without it, that prompt waits "
        "forever.",
        source="issue 16: P's staging memory",
        patches=(Swap(StagedSending.released, _no_next_prompt),),
        scope=Scope(method="mooncake-v0", pulls=True, requests=2, p_pool=1, abort=0, stall=0, deadline=0),
        breaks="L",
    ),
    Mutant(
        name="p-waits-forever",
        drops="An engine that waits until a prompt has been sent resumes when it has been sent or aborted. "
        "Without it, the engine waits forever.",
        source="issue 16: P waits",
        patches=(Swap(PrefillRequests.wait_no_more, _waits_forever),),
        scope=Scope(method="p2p-nccl-put", abort=0, stall=0, deadline=0),
        breaks="L",
    ),
    Mutant(
        name="d-reads-from-blocks",
        drops="D reads a prompt from P's staging memory. Without it, D reads P's blocks, which belong to another "
        "prompt by then.",
        source="issue 16: where pulled KV lies",
        patches=(Swap(StagedSending._lies, _source_in_blocks),),
        scope=Scope(method="mooncake-v0", pulls=True),
        breaks="S6",
    ),
    Mutant(
        name="dropped-while-it-is-sent",
        drops="P computes a prompt that it has begun to send to its end. Without it, a WRITE reads another "
        "prompt's KV.",
        source="issue 16: progressive P's abort",
        patches=(Swap(ProgressiveSending.drop, _dropped_in_the_middle),),
        scope=PROGRESSIVE,
        breaks="S6",
    ),
    Mutant(
        name="failed-prefill-frees-under-a-write",
        drops="When an engine stops computing a prompt, the prompt stays in its blocks until P's ranks have "
        "released it. Without it, a WRITE reads freed blocks.",
        source="issue 16: progressive P's abort; S2",
        patches=(Swap(ProgressiveSending.failed, _freed_though_it_is_sent),),
        scope=Scope(method="nixl-push", progressive=True, prefill_abort=1, stall=0, deadline=0),
        breaks="S2",
    ),
    Mutant(
        name="staging-kept-when-loaded",
        drops="D frees staging memory as soon as its KV has been copied to blocks. Without it, the memory stays "
        "allocated forever.",
        source="issue 16: staged D's copies",
        patches=(Swap(StagedLanding.copied, _loaded_and_kept),),
        scope=COPIED,
        breaks="L",
    ),
    Mutant(
        name="freed-under-a-copy",
        drops="D frees the blocks of an aborted request when the copy into them has ended. Without it, the copy "
        "overwrites another request's blocks.",
        source="issue 16: staged D's abort",
        patches=(Swap(StagedLanding.left, _left_under_a_copy),),
        scope=COPIED,
        breaks="S6",
    ),
    Mutant(
        name="staging-kept-when-aborted",
        drops="D frees the staging memory of a request that is aborted after its KV has landed and before it is "
        "loaded. Without it, the memory stays allocated forever.",
        source="issue 16: staged D's abort",
        patches=(Swap(StagedLanding._leave, _leaves_nothing),),
        scope=COPIED,
        breaks="L",
    ),
    Mutant(
        name="no-next-request-at-d",
        drops="When staging memory is freed at D, the next waiting request gets it. Without it, that request "
        "waits forever.",
        source="issue 16: D's staging memory",
        patches=(Swap(StagedLanding.release, _no_next_request),),
        scope=BOTH,
        breaks="L",
    ),
    Mutant(
        name="staging-freed-under-a-write",
        drops="Only the protocol frees staging memory that a WRITE may still reach. Without it, a WRITE lands in "
        "another request's memory.",
        source="issue 16: staged D's abort; S1",
        patches=(Swap(StagedLanding.resolved, _staging_freed_at_once),),
        scope=Scope(method="cpu-staged", stall=0, deadline=0),
        breaks="S6",
    ),
)
