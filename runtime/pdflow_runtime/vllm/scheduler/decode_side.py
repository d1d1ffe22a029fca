"""The half of a decode instance's connector in EngineCore."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from pdflow.methods.params.errors import ParamsError
from pdflow.protocol.effects import Commit, Enqueue, FreeBlocks, Quarantine
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation, BlockTables, Instant, Xid
from pdflow.serving.core import Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.decode_request import DecodeStage
from pdflow.serving.effects import Admit, Drop, EndDecode, Landed
from pdflow.serving.events import DecodeRequested, EngineAdmitted, EngineDropped, EngineFinished, RequestAborted
from pdflow.serving.landing import Landing
from pdflow.wiring.endpoints import consumer_scheduler
from pdflow_runtime.vllm.instance import Instance
from pdflow_runtime.vllm.scheduler.content import UnnamedContentError, content_digest
from pdflow_runtime.vllm.scheduler.params import is_decode_leg, read_answer
from pdflow_runtime.vllm.scheduler.requests import ended_well, waits_for_load
from pdflow_runtime.vllm.scheduler.scheduler_side import SchedulerSide

log = logging.getLogger(__name__)

MOST_LOADED: Final = 4096
"""The most names of loaded prompts that are kept."""


class DecodeSide(SchedulerSide[DecodeCore]):
    """D's half in EngineCore."""

    def __init__(self, instance: Instance, incarnation: int, weights: int, clock: Callable[[], Instant]) -> None:
        protocol = instance.protocol
        endpoint = consumer_scheduler(protocol, protocol.geometry(), instance.info, incarnation, instance.num_blocks)
        super().__init__(instance, DecodeCore(weights, Landing()), endpoint, incarnation, weights, clock)
        self._requests: Final[dict[str, Any]] = {}
        """vLLM's requests whose core's have not been dropped."""
        self._queued: Final[set[str]] = set()
        """Requests that may be given blocks."""
        self._granted: Final[dict[str, Allocation]] = {}
        self._failed: Final[list[str]] = []
        """Loads that workers report as failed in the next step."""
        self._loading: Final[dict[str, Xid]] = {}
        """By request that has not ended, the name of the prompt whose KV it was to get."""
        self._loaded: Final[dict[Xid, None]] = {}
        """The latest prompts whose KV has come, the oldest one first: P has it no more."""
        self._recomputed: Final[set[str]] = set()
        """Requests whose loads have failed, of which vLLM has not asked since."""
        core = self.core
        core.do.update({Enqueue: self._enqueue, FreeBlocks: self._free, Quarantine: self._quarantine})
        core.perform.update({Admit: self.ignore, Landed: self.ignore, EndDecode: self._ended})
        core.perform.update({Commit: self._commit, Drop: self._drop, FreeBlocks: self._free})
        core.begin(self.port)

    # Effects.

    def _enqueue(self, _: Port, effect: Enqueue) -> None:
        self._queued.add(effect.request_id)

    def _commit(self, _: Port, effect: Commit) -> None:
        request_id = effect.request_id
        self._note_loaded(self._loading[request_id])
        self.references.release(self.pool, self._granted.pop(request_id))
        self.ledger.end(request_id)

    def _note_loaded(self, xid: Xid) -> None:
        self._loaded[xid] = None
        if len(self._loaded) > MOST_LOADED:
            del self._loaded[next(iter(self._loaded))]

    def _ended(self, _: Port, effect: EndDecode) -> None:
        """Log why a request gets no KV: vLLM's own error of it does not say."""
        if effect.code not in (Code.NONE, Code.CANCELLED):
            log.warning("request %s: no KV from its prefill instance: %s", effect.handle, effect.code.name.lower())

    def _drop(self, _: Port, effect: Drop) -> None:
        """Report a load as failed, if vLLM waits for one or is about to; otherwise nothing has to be given up."""
        request_id = effect.handle
        begun = request_id in self.ledger
        # 0.33 reports blocks a step later than it has given them (`update_state_after_alloc`).
        about_to = request_id in self._queued and waits_for_load(self._requests[request_id])
        if begun or about_to:
            self._failed.append(request_id)
        else:
            self._dropped(request_id)

    def _dropped(self, request_id: str) -> None:
        self._queued.discard(request_id)
        self.feed(EngineDropped(request_id, self._granted.pop(request_id, None)))

    def _quarantine(self, _: Port, effect: Quarantine) -> None:
        self.references.quarantine(effect.allocation)

    def _free(self, _: Port, effect: FreeBlocks) -> None:
        self.references.release(self.pool, effect.allocation)

    # Hooks.

    def on_new_request(self, request: Any) -> None:
        """Begin a decode leg. One whose parameters are wrong is computed here, as if it had none."""
        params, request_id = request.kv_transfer_params, request.request_id
        if not is_decode_leg(params):
            return
        try:
            parsed, at = read_answer(params, self.instance.options.method)
            digest = content_digest(request, self.weights)
        except (ParamsError, UnnamedContentError) as error:
            log.warning("request %s: computing the prompt on this instance: %s", request_id, error)
            return
        if self.core.knows(request_id):
            log.warning(
                "request %s: computing the prompt on this instance: a request with this id is still open", request_id
            )
            return
        if parsed.xid in self._loaded or parsed.xid in self._loading.values():
            # As of all but one of the requests that vLLM makes of one with n > 1.
            log.warning(
                "request %s: computing the prompt on this instance: another request has the KV of prompt %s",
                request_id,
                parsed.xid,
            )
            return
        self.note_addresses(at.by_name(parsed.prefill).items())
        self._requests[request_id] = request
        self._loading[request_id] = parsed.xid
        tokens = self.instance.exchanged(request.num_prompt_tokens)
        most_blocks = self.blocks_of(tokens) * len(self.instance.groups)
        self.feed(DecodeRequested(request_id, parsed, most_blocks, tokens, digest))

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens of the prompt are to be loaded: None while the protocol holds the request back, 0 once
        its load is over."""
        request_id = request.request_id
        if request_id in self._recomputed:
            # vLLM keeps it before all loads, where it would hold them up until it has blocks again. With this answer it
            # queues with those that are computed here.
            self._recomputed.discard(request_id)
            return None, False
        if self.core.stage_of(request_id) is not DecodeStage.PENDING:
            return 0, False
        if request_id not in self._queued:
            return None, False
        external = self.instance.exchanged(request.num_prompt_tokens) - computed
        return external, external > 0

    def update_state_after_alloc(self, request: Any, tables: BlockTables, external: int) -> None:
        """Report to the core that a request has blocks, and that all but the first tokens of its prompt may be put
        there. vLLM may load nothing though it was offered KV: then the request is given up as a load."""
        request_id = request.request_id
        if self.core.stage_of(request_id) is not DecodeStage.PENDING:
            if external and request_id in self._requests:
                self._begin_load(request, tables, external)
            return
        if not external:
            self.feed(RequestAborted(request_id))
            return
        self._begin_load(request, tables, external)

    def _begin_load(self, request: Any, tables: BlockTables, external: int) -> None:
        request_id, tokens = request.request_id, self.instance.exchanged(request.num_prompt_tokens)
        here = tokens - external
        first = here // self.instance.info.shards.block_size
        allocation = self.allocation([table[first : self.blocks_of(tokens)] for table in tables])
        self.references.hold(self.pool, allocation)
        self._granted[request_id] = allocation
        self._queued.discard(request_id)
        self.ledger.begin(request_id)
        self.feed(EngineAdmitted(request_id, allocation, here))

    def take_failed(self) -> tuple[str, ...]:
        """Return the loads that the workers are to report as failed with this step."""
        failed = tuple(self._failed)
        self._failed.clear()
        return failed

    def update_failed(self, failed: set[str]) -> set[str]:
        """Handle the workers' reports of failed loads. Return those of which vLLM waits for none: requests that were
        aborted before the connector knew of their blocks."""
        unexpected = set()
        for request_id in sorted(failed):
            if request_id in self.ledger:
                self.ledger.fail(request_id)
                if request_id in self._requests:
                    self._recomputed.add(request_id)
            else:
                unexpected.add(request_id)
            self._dropped(request_id)
        return unexpected

    def request_finished(self, request: Any, tables: BlockTables) -> dict[str, Any] | None:
        request_id = request.request_id
        if self.core.stage_of(request_id) is not None:
            self.feed(EngineFinished(request_id) if ended_well(request) else RequestAborted(request_id))
        self._requests.pop(request_id, None)
        self._loading.pop(request_id, None)
        self._recomputed.discard(request_id)
        return None

    def has_pending_work(self) -> bool:
        return bool(self._failed) or super().has_pending_work()

    def assert_empty(self) -> None:
        super().assert_empty()
        kept = (self._requests, self._queued, self._granted, self._failed, self._recomputed, self._loading)
        assert not any(kept), f"{self.port.address} still holds {kept}"
