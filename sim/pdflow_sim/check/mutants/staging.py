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


def _copies_what_is_gone(self: StagedSending, going: StagedSend, piece: Piece) -> None:
    if going.staged is not None:
        self.requests.emit(CopyOut(going.request.handle, going.staged, piece))
    else:
        going.copying -= self.ranks_per_layer
        self._settle(going)


def _offers_what_is_gone(self: StagedSending, event: CopiedOut) -> None:
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


def _keeps_its_room(self: StagedSending, going: StagedSend) -> None:
    going.staged = None


def _room_goes_first(self: StagedSending, going: StagedSend) -> None:
    """Give the staging memory back though something may still be sent from it."""
    _finished(self, going)
    if going.staged is not None:
        self.requests.emit(LeaveRoom(going.request.handle))
        self.staging.release(going.staged)
        going.staged = None


_finished = StagedSending._finish


def _nobody_is_next(self: StagedSending, request: PrefillRequest) -> None:
    going = self.outgoing[request.handle]
    going.over = True
    self._release(going)
    self.requests.emit(WithdrawPieces(request.handle))
    self._settle(going)
    self._forget(going)
    self.requests.wait_no_more(request.handle)


def _waits_for_ever(self: PrefillRequests, handle: Handle) -> None: ...


def _lies_in_blocks(self: StagedSending, going: StagedSend) -> Allocation:
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


def _asks_nobody(self: StagedLanding, staged: Allocation) -> None:
    self.requests.emit(GiveBackRoom(staged))
    self.staging.release(staged)


def _room_is_back_at_once(self: StagedLanding, request: DecodeRequest) -> None:
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
        name="copied-when-given-up",
        drops="What a step still computes of a prompt that was given up is not copied: its blocks are others'.",
        source="issue 16: staged P's copies",
        patches=(Swap(StagedSending._copy, _copies_what_is_gone),),
        scope=LAYERS,
        breaks="S6",
    ),
    Mutant(
        name="offered-when-given-up",
        drops="A copy that ends when its prompt has been given up is not sent: its blocks were others' meanwhile.",
        source="issue 16: staged P's copies",
        patches=(Swap(StagedSending.copied_out, _offers_what_is_gone),),
        scope=Scope(method="cpu-staged", late=True, prefill_abort=1, stall=0, deadline=0),
        breaks="S6",
    ),
    Mutant(
        name="freed-before-it-is-copied",
        drops="Blocks are free when all of a prompt has been copied from them.",
        source="issue 16: staged P's copies",
        patches=(Swap(StagedSending._settle, _freed_before_it_is_copied),),
        scope=Scope(method="cpu-staged", late=True, abort=0, stall=0, deadline=0),
        breaks="S6",
    ),
    Mutant(
        name="room-is-kept-at-p",
        drops="A prompt that P has released gives its room to whoever is next.",
        source="issue 16: staged P's room",
        patches=(Swap(StagedSending._release, _keeps_its_room),),
        scope=BOTH,
        breaks="L",
    ),
    Mutant(
        name="room-is-left-too-early",
        drops="Room at P is its prompt's until the protocol has released it. A READ would find another's KV there.",
        source="issue 16: staged P's room; S2",
        patches=(Swap(StagedSending._finish, _room_goes_first),),
        scope=Scope(method="mooncake-v0", pulls=True),
        breaks="S6",
    ),
    Mutant(
        name="nobody-is-next-at-p",
        drops="When room is given back, whoever waits for it is served.",
        source="issue 16: staged P's room",
        patches=(Swap(StagedSending.released, _nobody_is_next),),
        scope=Scope(method="mooncake-v0", pulls=True, requests=2, p_pool=1, abort=0, stall=0, deadline=0),
        breaks="L",
    ),
    Mutant(
        name="p-waits-for-ever",
        drops="An engine that waits until a prompt has been sent goes on when it has been, or is given up.",
        source="issue 16: P waits",
        patches=(Swap(PrefillRequests.wait_no_more, _waits_for_ever),),
        scope=Scope(method="p2p-nccl-put", abort=0, stall=0, deadline=0),
        breaks="L",
    ),
    Mutant(
        name="d-reads-from-blocks",
        drops="D reads a prompt where it has room beside the blocks, which are others' by then.",
        source="issue 16: where pulled KV lies",
        patches=(Swap(StagedSending._lies, _lies_in_blocks),),
        scope=Scope(method="mooncake-v0", pulls=True),
        breaks="S6",
    ),
    Mutant(
        name="dropped-while-it-is-sent",
        drops="A prompt that has begun to be sent is computed to its end. A WRITE would read others' KV.",
        source="issue 16: progressive P's abort",
        patches=(Swap(ProgressiveSending.drop, _dropped_in_the_middle),),
        scope=PROGRESSIVE,
        breaks="S6",
    ),
    Mutant(
        name="failed-and-freed",
        drops="What was sent of a prompt whose engine gives it up stays in its blocks until P's ranks let go of it.",
        source="issue 16: progressive P's abort; S2",
        patches=(Swap(ProgressiveSending.failed, _freed_though_it_is_sent),),
        scope=Scope(method="nixl-push", progressive=True, prefill_abort=1, stall=0, deadline=0),
        breaks="S2",
    ),
    Mutant(
        name="room-is-kept-when-loaded",
        drops="Room at D is free as soon as what lay there is in blocks.",
        source="issue 16: staged D's copies",
        patches=(Swap(StagedLanding.copied, _loaded_and_kept),),
        scope=COPIED,
        breaks="L",
    ),
    Mutant(
        name="freed-under-a-copy",
        drops="Blocks that are being copied into for nobody are free when they have been.",
        source="issue 16: staged D's abort",
        patches=(Swap(StagedLanding.left, _left_under_a_copy),),
        scope=COPIED,
        breaks="S6",
    ),
    Mutant(
        name="room-is-kept-when-aborted",
        drops="A request that is aborted when it has landed, and is not loaded yet, gives its room back.",
        source="issue 16: staged D's abort",
        patches=(Swap(StagedLanding._leave, _leaves_nothing),),
        scope=COPIED,
        breaks="L",
    ),
    Mutant(
        name="nobody-is-next-at-d",
        drops="When room at D is given back, whoever waits for it is asked.",
        source="issue 16: staged D's room",
        patches=(Swap(StagedLanding.release, _asks_nobody),),
        scope=BOTH,
        breaks="L",
    ),
    Mutant(
        name="room-is-back-at-once",
        drops="Room that a WRITE may still reach is given back by the protocol alone.",
        source="issue 16: staged D's abort; S1",
        patches=(Swap(StagedLanding.resolved, _room_is_back_at_once),),
        scope=Scope(method="cpu-staged", stall=0, deadline=0),
        breaks="S6",
    ),
)
