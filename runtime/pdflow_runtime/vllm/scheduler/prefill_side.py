"""The half of a prefill instance's connector in EngineCore."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from pdflow.methods.params.errors import ParamsError
from pdflow.protocol.effects import AnswerPrefill, Enqueue
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation, BlockTables, Instant, Xid
from pdflow.serving.core import Port
from pdflow.serving.effects import (
    Computed,
    Drop,
    EndPrefill,
    Forget,
    FreePrompt,
    OfferPiece,
    Released,
    WithdrawPieces,
)
from pdflow.serving.events import (
    ChunkStarted,
    EngineDropped,
    LayerReady,
    PrefillFailed,
    PrefillRequested,
    PromptComputed,
    RequestAborted,
)
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.sending import ProgressiveSending
from pdflow.wiring.endpoints import producer_scheduler
from pdflow_runtime.vllm.instance import Instance
from pdflow_runtime.vllm.scheduler.content import UnnamedContentError, content_digest
from pdflow_runtime.vllm.scheduler.params import answer_of, is_prefill_leg, xid_of
from pdflow_runtime.vllm.scheduler.requests import ended_well, was_aborted
from pdflow_runtime.vllm.scheduler.scheduler_side import SchedulerSide
from pdflow_runtime.vllm.step_metadata import Offer

log = logging.getLogger(__name__)


class PrefillSide(SchedulerSide[PrefillCore]):
    """P's half in EngineCore. Args: `ranks`: where each rank listens, which the answers say."""

    def __init__(
        self,
        instance: Instance,
        incarnation: int,
        weights: int,
        ranks: tuple[tuple[str, int], ...],
        clock: Callable[[], Instant],
    ) -> None:
        endpoint = producer_scheduler(instance.protocol, instance.info, incarnation)
        # P announces a prompt when the step is scheduled that computes the last of it. Push: registrations match by
        # then, and its bytes leave as soon as they are there, whenever vLLM reports the end of the step. Pull: lease
        # words are exposed before any D can know of them.
        core = PrefillCore(weights, ProgressiveSending(instance.offered_layers))
        super().__init__(instance, core, endpoint, incarnation, weights, clock)
        self.ranks: Final = ranks
        self._xids: Final[dict[str, Xid]] = {}
        """By vLLM's request, the name of its prompt's KV."""
        self._uncomputed: Final[dict[str, Any]] = {}
        """Requests of which no step has been scheduled that computes the last of their prompts."""
        self._announced: Final[dict[str, tuple[Any, int]]] = {}
        """Announced requests that have not finished, with how often each had been preempted before."""
        self._step = 0
        self._sources: Final[dict[Xid, Allocation]] = {}
        """Blocks of announced and computed prompts, on which a reference is held until the protocol has released
        them."""
        self._answers: Final[dict[Xid, KvParams]] = {}
        """Of prompts that are computed, until their requests finish."""
        core.perform.update(dict.fromkeys((Enqueue, Computed, EndPrefill, Forget), self.ignore))
        core.perform.update({AnswerPrefill: self._answered, FreePrompt: self._free, Drop: self._drop})
        core.perform.update({OfferPiece: self._offer, WithdrawPieces: self._withdraw})
        core.perform[Released] = self._released
        core.begin(self.port)

    # Effects.

    def _drop(self, _: Port, effect: Drop) -> None:
        """vLLM has dropped the prompt when the connector learns of the abort."""
        self.feed(EngineDropped(effect.handle))

    def _released(self, _: Port, effect: Released) -> None:
        if effect.code is Code.EXPIRED:
            self.samples.expired()

    def _answered(self, _: Port, effect: AnswerPrefill) -> None:
        self._answers[effect.params.xid] = effect.params

    def _free(self, _: Port, effect: FreePrompt) -> None:
        """Give up the reference on a prompt's blocks. vLLM's own reference ends with `request_finished`."""
        allocation = self._sources.pop(effect.handle, None)
        if allocation is not None:
            self.references.release(self.pool, allocation)

    def _offer(self, _: Port, effect: OfferPiece) -> None:
        """Have the ranks offer a piece, once the step that is being scheduled has computed it. A prompt that is read is
        offered to nobody."""
        piece = effect.piece
        if not self.instance.protocol.pulls:
            self.offers.append(Offer(effect.handle, piece.layer, piece.start, piece.stop))

    def _withdraw(self, _: Port, effect: WithdrawPieces) -> None:
        self.withdrawn.append(effect.handle)

    # Hooks.

    def on_new_request(self, request: Any) -> None:
        """Begin a prefill leg. One whose parameters are wrong is computed without a D that could come for it."""
        params, request_id = request.kv_transfer_params, request.request_id
        if not is_prefill_leg(params):
            return
        try:
            xid = xid_of(params, self.instance.options.method)
            digest = content_digest(request, self.weights)
        except (ParamsError, UnnamedContentError) as error:
            log.warning("request %s: prefilled without KV transfer: %s", request_id, error)
            return
        if self.core.knows(xid) or xid in self._answers or request_id in self._xids:
            log.warning("request %s: prefilled without KV transfer: a prompt named %s is already open", request_id, xid)
            return
        self._xids[request_id] = xid
        self._uncomputed[request_id] = request
        self.feed(PrefillRequested(xid, request_id, self._exchanged(request), digest))

    def step_scheduled(self, scheduled: Mapping[str, int]) -> None:
        for request_id, (request, preemptions) in tuple(self._announced.items()):
            if request.num_preemptions > preemptions:
                del self._announced[request_id]
                self._preempted(self._xids[request_id])
        for request_id, request in tuple(self._uncomputed.items()):
            new = scheduled.get(request_id, 0)
            if new and request.num_computed_tokens + new >= request.num_prompt_tokens:
                del self._uncomputed[request_id]
                self._announced[request_id] = request, request.num_preemptions
                self._announce(self._xids[request_id], request)

    def _preempted(self, xid: Xid) -> None:
        """Report that an announced prompt is computed: the step that does it is under way. vLLM drops that step's
        output and computes the prompt once more, which needs as many blocks again; so D or the lease must be able to
        end what is held here before the request finishes."""
        prompt = self.core.request_of(xid)
        if prompt is not None and not prompt.computed:
            self.feed(PromptComputed(xid, self._sources[xid]))

    def _announce(self, xid: Xid, request: Any) -> None:
        """Report that this step computes the last of a prompt. The core answers by the pieces that may be sent when
        layers are computed, which the ranks keep until then."""
        source = self._hold(xid, self.block_tables(request.request_id), request)
        self._step += 1
        self.feed(ChunkStarted(xid, source, self._exchanged(request), self._step))
        for layer in range(self.instance.offered_layers):
            self.feed(LayerReady(self._step, layer))

    def _exchanged(self, request: Any) -> int:
        return self.instance.exchanged(request.num_prompt_tokens)

    def _hold(self, xid: Xid, tables: BlockTables, request: Any) -> Allocation:
        end = self.blocks_of(self._exchanged(request))
        source = self._sources[xid] = self.allocation([table[:end] for table in tables])
        self.references.hold(self.pool, source)
        return source

    def request_finished(self, request: Any, tables: BlockTables) -> dict[str, Any] | None:
        """Return the answer of the prefill leg, if the prompt has been computed."""
        xid = self._xids.pop(request.request_id, None)
        self._uncomputed.pop(request.request_id, None)
        self._announced.pop(request.request_id, None)
        if xid is None:
            return None
        prompt = self.core.request_of(xid)
        if prompt is not None and not prompt.computed:
            self._ended(xid, request, tables)
        answer = self._answers.pop(xid, None)
        return None if answer is None else answer_of(answer, self.ranks, self.instance.options.method)

    def _ended(self, xid: Xid, request: Any, tables: BlockTables) -> None:
        if ended_well(request):
            self.feed(PromptComputed(xid, self._sources.get(xid) or self._hold(xid, tables, request)))
            return
        if was_aborted(request):
            self.feed(RequestAborted(xid))
        self.feed(PrefillFailed(xid))

    def assert_empty(self) -> None:
        super().assert_empty()
        kept = (self._xids, self._uncomputed, self._announced, self._sources, self._answers)
        assert not any(kept), f"{self.port.address} still holds {kept}"
