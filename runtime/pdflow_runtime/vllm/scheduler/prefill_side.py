"""The half of a prefill instance's connector in EngineCore."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from pdflow.methods.params.errors import ParamsError
from pdflow.protocol.effects import AnswerPrefill, Enqueue
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation, Instant, Xid
from pdflow.serving.core import Port
from pdflow.serving.effects import Computed, Drop, EndPrefill, Forget, FreePrompt, Released
from pdflow.serving.events import EngineDropped, PrefillFailed, PrefillRequested, PromptComputed, RequestAborted
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.sending import Sending
from pdflow.wiring.endpoints import producer_scheduler
from pdflow_runtime.vllm.instance import Instance
from pdflow_runtime.vllm.scheduler.content import content_digest
from pdflow_runtime.vllm.scheduler.params import answer_of, is_prefill_leg, xid_of
from pdflow_runtime.vllm.scheduler.requests import ended_well, was_aborted
from pdflow_runtime.vllm.scheduler.scheduler_side import SchedulerSide

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
        super().__init__(instance, PrefillCore(weights, Sending()), endpoint, incarnation, weights, clock)
        self.ranks: Final = ranks
        self._xids: Final[dict[str, Xid]] = {}
        """By vLLM's request, the name of its prompt's KV."""
        self._sources: Final[dict[Xid, Allocation]] = {}
        """Blocks of computed prompts, on which a reference is held until the protocol has released them."""
        self._answer: KvParams | None = None
        core = self.core
        core.perform.update(dict.fromkeys((Enqueue, Computed, EndPrefill, Forget), self.ignore))
        core.perform.update({AnswerPrefill: self._answered, FreePrompt: self._free, Drop: self._drop})
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
        self._answer = effect.params

    def _free(self, _: Port, effect: FreePrompt) -> None:
        """Give up the reference on a prompt's blocks. vLLM's own reference ends with `request_finished`."""
        allocation = self._sources.pop(effect.handle, None)
        if allocation is not None:
            self.references.release(self.pool, allocation)

    # Hooks.

    def on_new_request(self, request: Any) -> None:
        """Begin a prefill leg. One whose parameters are wrong is computed without a D that could come for it."""
        params, request_id = request.kv_transfer_params, request.request_id
        if not is_prefill_leg(params):
            return
        try:
            xid = xid_of(params, self.instance.options.method)
        except ParamsError as error:
            log.warning("request %s is prefilled for itself alone: %s", request_id, error)
            return
        digest = content_digest(request, self.weights)
        if digest is None or self.core.knows(xid) or request_id in self._xids:
            why = "its prompt is given as embeddings" if digest is None else f"a prompt named {xid} is here already"
            log.warning("request %s is prefilled for itself alone: %s", request_id, why)
            return
        self._xids[request_id] = xid
        self.feed(PrefillRequested(xid, request_id, request.num_prompt_tokens, digest))

    def request_finished(self, request: Any, blocks: list[int]) -> dict[str, Any] | None:
        """Return the answer of the prefill leg, if the prompt has been computed."""
        xid = self._xids.pop(request.request_id, None)
        if xid is None or not self.core.knows(xid):
            return None
        if ended_well(request):
            source = self.allocation(blocks[: self.blocks_of(request.num_prompt_tokens)])
            self.references.hold(self.pool, source)
            self._sources[xid] = source
            self.feed(PromptComputed(xid, source))
        else:
            if was_aborted(request):
                self.feed(RequestAborted(xid))
            self.feed(PrefillFailed(xid))
        answer, self._answer = self._answer, None
        return None if answer is None else answer_of(answer, self.ranks, self.instance.options.method)

    def assert_empty(self) -> None:
        super().assert_empty()
        kept = (self._xids, self._sources, self._answer)
        assert not any(kept), f"{self.port.address} still keeps {kept}"
