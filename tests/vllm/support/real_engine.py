"""vLLM's own scheduler and the steps of its EngineCore, without a model, workers or a GPU.

What is vLLM's: Scheduler or AsyncScheduler with KVCacheManager, BlockPool and prefix cache; the connector, made by
KVConnectorFactory; EngineCore's step, step_with_batch_queue, add_request and abort_requests; the order of a worker's
hooks; KVOutputAggregator. What is not: EngineCore's constructor, the executor, and the model, which writes fingerprints
in place of KV and samples a token that depends on the position alone.

What the Scheduler expects of a connector (`vllm/v1/core/sched/scheduler.py`, 0.32.0):

| request, event | vLLM waits for | and |
| --- | --- | --- |
| (None, False) | nothing | looks it up again at each step that reaches it |
| (n, True), no room | nothing | keeps nothing, looks it up again; requests behind it are not considered |
| (n, True), prompt logprobs | nothing | allocates with 0 external tokens: no load |
| loads, loaded | finished_recving, once | caches its blocks; a second report before the next schedule is ignored |
| loads, aborted or failed by policy | finished_recving | `request_finished` is called at once, blocks are freed then |
| loaded, aborted before it is scheduled | nothing | an id too many stops EngineCore |
| load failed, recompute | failed_recving and finished_recving, same step | frees all blocks, looks it up again |
| load failed, aborted before it is scheduled | nothing | the hook gets no blocks: no token counts as computed |
| waits or runs, aborted | nothing, unless the hook returned True | then finished_sending |
| finished, the hook returned True | finished_sending | keeps the blocks, and steps on for it |
| preempted | nothing | loses all blocks, looks it up again |
| reset_prefix_cache(reset_running_requests=True) | nothing | preempts; raises if any block is still referenced |
| PAUSED_NEW | as before | schedules only requests that hold blocks |
| PAUSED_ALL | as before | schedules nothing; steps only for delayed frees, or has_pending_push_work |

`failed_recving` is read before `update_connector_output` is called, `finished_*` after it.
"""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.vllm.support.bed_workers import BedExecutor, BedWorker
from tests.vllm.support.engine_config import EngineSetting, kv_cache_config, structured_output_manager, vllm_config
from tests.vllm.support.kv_memory import Chunk, Fingerprints, KvMemory, sampled_token
from tests.vllm.support.report_ledger import ReportLedger

HOOKED = ("HookedConnector", "tests.vllm.support.hooked_connector")


@cache
def block_hasher(block_size: int) -> Callable[[Request], Any]:
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    return get_request_block_hasher(block_size, function)


class BedCore(EngineCore):
    """EngineCore, whose constructor starts workers: this one sets the same fields, and has its workers already."""

    def __init__(
        self,
        setting: EngineSetting,
        connector_class: tuple[str, str],
        extra_config: dict[str, Any],
        lags: Callable[[], bool],
    ) -> None:
        config = self.vllm_config = vllm_config(setting, *connector_class, extra_config)
        blocks = setting.num_blocks + 1
        caches = kv_cache_config(blocks, setting.block_size, setting.windows)
        self.log_stats = True
        self._weight_version = "default"
        self.structured_output_manager = structured_output_manager()
        block_size, hash_block_size = resolve_kv_cache_block_sizes(caches, config)
        workers = [
            BedWorker(config, rank, caches, KvMemory(setting.windows, blocks, setting.block_size, rank, setting.tp))
            for rank in range(setting.tp)
        ]
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=self.structured_output_manager,
            include_finished_set=False,
            log_stats=self.log_stats,
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        connector = self.scheduler.connector
        handshakes = {(0, rank): worker.connector.get_handshake_metadata() for rank, worker in enumerate(workers)}
        if any(handshakes.values()):
            connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        if setting.uniproc:
            self.model_executor: Any = BedExecutor(workers, None, self.chunks_of, lags=lambda: False)
        else:
            aggregator = KVOutputAggregator.from_connector(connector, setting.tp)
            self.model_executor = BedExecutor(workers, aggregator, self.chunks_of, lags)
        self.use_spec_decode = self.check_for_draft_tokens = False
        self.is_mm_encoder_only = self.is_pooling_model = False
        self.mm_receiver_cache = None
        self.batch_queue_size = config.max_concurrent_batches
        self.batch_queue = deque(maxlen=self.batch_queue_size) if self.batch_queue_size > 1 else None
        self.step_fn = self.step if self.batch_queue is None else self.step_with_batch_queue
        self.async_scheduling = config.scheduler_config.async_scheduling
        self.request_block_hasher = block_hasher(hash_block_size)
        self.aborts_queue = queue.Queue()
        self.fingerprints: dict[str, Fingerprints] = {}
        self.preempted = 0

    def chunks_of(self, output: SchedulerOutput) -> list[Chunk]:
        """What a step that has just been scheduled computes."""
        self.preempted += len(output.preempted_req_ids or ())
        chunks = []
        for request_id, new in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens
            block_ids = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            prints = self.fingerprints[request_id]
            chunks.append(Chunk(request_id, prints, end - new, end, block_ids, not request.is_prefill_chunk))
        return chunks


class RealEngine:
    """One engine.

    Args:
        connector: has the hooks of the half in EngineCore.
        workers: one object per rank with the hooks of a worker.
        lags: asked at each step whether its execution waits until its result is needed; see BedExecutor.
        connector_class: by name and module. It finds `connector` and `workers` in its extra config, as "scheduler" and
            "workers", unless another `extra_config` is given.
        setting: fields of EngineSetting.

    `seen` counts what has happened to requests; `tokens` has what clients were streamed.
    """

    def __init__(
        self,
        connector: Any,
        workers: Sequence[Any],
        *,
        lags: Callable[[], bool] = lambda: False,
        connector_class: tuple[str, str] = HOOKED,
        extra_config: dict[str, Any] | None = None,
        **setting: Any,
    ) -> None:
        self.setting = EngineSetting(tp=len(workers), **setting)
        if extra_config is None:
            extra_config = {"scheduler": connector, "workers": list(workers)}
        self.core = BedCore(self.setting, connector_class, extra_config, lags)
        self.scheduler: Any = self.core.scheduler
        self.connector = self.scheduler.connector
        self.ledger = ReportLedger(self.connector)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.memories = [worker.memory for worker in self.core.model_executor.workers]
        self.given = [0] * len(self.pool.blocks)
        """How often each block has left the free list: it identifies one use of the block."""
        self.tokens: dict[str, list[int]] = {}
        self.late_aborts: list[list[str]] = []
        self._count_given()

    def _count_given(self) -> None:
        pool = self.pool
        get_new_blocks, touch = pool.get_new_blocks, pool.touch

        def counting_get(num_blocks: int) -> Any:
            blocks = get_new_blocks(num_blocks)
            for block in blocks:
                self.given[block.block_id] += 1
            return blocks

        def counting_touch(blocks: Sequence[Any]) -> None:
            for block in blocks:
                self.given[block.block_id] += block.ref_cnt == 0
            touch(blocks)

        pool.get_new_blocks, pool.touch = counting_get, counting_touch

    @property
    def requests(self) -> dict[str, Request]:
        """Those that vLLM has not forgotten: a finished one stays while the free of its blocks is delayed."""
        requests: dict[str, Request] = self.scheduler.requests
        return requests

    @property
    def answers(self) -> dict[str, tuple[RequestStatus, Any]]:
        return self.ledger.answers

    @property
    def seen(self) -> Counter[str]:
        self.ledger.seen["preempted"] = self.core.preempted
        return self.ledger.seen

    def references(self) -> list[int]:
        """Of each usable block; the null block is no one's."""
        return [block.ref_cnt for block in self.pool.blocks[1:]]

    # What clients do.

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        params: Any = None,
        *,
        stops_at: int | None = None,
        prompt_logprobs: int | None = None,
        abort_immediately: bool = False,
    ) -> Request:
        """Args: `params`: kv_transfer_params. `stops_at`: this output token, counted from 1, is a stop token."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=None if stops_at is None else [sampled_token(len(prompt) + stops_at - 1)],
            prompt_logprobs=prompt_logprobs,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        message = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            abort_immediately=abort_immediately,
        )
        request, _ = self.core.preprocess_add_request(message)
        self.core.fingerprints[request_id] = Fingerprints(prompt)
        self.tokens.pop(request_id, None)
        self.core.add_request(request)
        return request

    def abort(self, request_id: str, late: bool = False) -> None:
        """Args: `late`: it arrives while a step is executed. vLLM handles such aborts before the step's output."""
        if late:
            self.core.aborts_queue.put([request_id])
            self.late_aborts.append([request_id])
        else:
            self._note_abort(request_id)
            self.core.abort_requests([request_id])

    def hang_up(self, request_id: str, bare_id: str, params: Any) -> None:
        """The client of a decode leg disconnects. Its request is aborted, then added again under a bare id and aborted
        in one call, so that connectors learn of one that never arrived.

        Source: `AsyncLLM.notify_kv_transfer_request_rejected`, `EngineCore.add_request`.
        """
        self.abort(request_id)
        self.add_request(bare_id, [0], params=params, abort_immediately=True)

    def finish_requests(self, request_ids: Iterable[str] | None, status: RequestStatus) -> list[Request]:
        finished: list[Request] = self.scheduler.finish_requests(request_ids, status)
        return finished

    def _note_abort(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None and not request.is_finished():
            loaded = " loaded" if request_id in self.scheduler.finished_recving_kv_req_ids else ""
            self.seen[f"aborted {request.status.name}{loaded}"] += 1

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Raises RuntimeError where vLLM does: running requests are to be reset, and blocks are held by others."""
        self.seen["preempted by reset"] += len(self.scheduler.running) if reset_running_requests else 0
        return self.core.reset_prefix_cache(reset_running_requests, reset_connector)

    def pause(self, mode: str) -> None:
        """ "abort", "keep" or "wait". The pause is complete once the engine is parked, then `finish_pause` follows."""
        if mode == "abort":
            self.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)

    def finish_pause(self) -> None:
        """Resets the caches, as before sleep. Raises RuntimeError if any block is held."""
        assert self.parked()
        self.core._finish_pause(clear_cache=True)

    def resume(self) -> None:
        self.core.resume_scheduler()

    # Steps.

    def has_work(self) -> bool:
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def parked(self) -> bool:
        """Whether EngineCore waits for its next request, and calls no hook."""
        return not self.has_work()

    def step(self) -> None:
        """One turn of EngineCore's loop, if it is not parked. With async scheduling it may only fill the queue."""
        for request_ids in self.late_aborts:
            self.core.abort_requests(request_ids)
        self.late_aborts.clear()
        if self.parked():
            self.core.aborts_queue.queue.clear()
            return
        outputs, executed = self.core.step_fn()
        self._record(outputs)
        self.core.post_step(executed)
        self.seen["loaded, behind one that failed"] += self._stuck_behind_failed()

    def _stuck_behind_failed(self) -> bool:
        """Whether the first of the requests that hold blocks has none, and no room, and loaded ones wait behind it."""
        queue = self.scheduler.kv_holding_waiting
        loaded = self.scheduler.finished_recving_kv_req_ids
        if len(queue) < 2 or not loaded:
            return False
        first, *others = queue
        stuck = first.status is not RequestStatus.WAITING_FOR_REMOTE_KVS and not first.num_computed_tokens
        return stuck and any(each.request_id in loaded for each in others)

    def schedule(self) -> SchedulerOutput:
        """The first third of a step, for what is to happen between the thirds."""
        output: SchedulerOutput = self.scheduler.schedule()
        return output

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        executor = self.core.model_executor
        result = executor.execute_model(output).result()
        executed: ModelRunnerOutput = executor.sample_tokens(None) if result is None else result
        return executed

    def update_from_output(self, output: SchedulerOutput, executed: ModelRunnerOutput) -> None:
        self.core._process_aborts_queue()
        self._record(self.scheduler.update_from_output(output, executed))

    def _record(self, outputs: dict[int, EngineCoreOutputs] | None) -> None:
        for output in (outputs or {}).get(0, EngineCoreOutputs()).outputs:
            request_id = output.request_id
            streamed = self.tokens.setdefault(request_id, [])
            streamed += output.new_token_ids
            first = len(self.core.fingerprints[request_id].prompt)
            assert streamed == [sampled_token(first + n) for n in range(len(streamed))], (request_id, streamed)

    # What must hold in the end.

    def assert_at_rest(self) -> None:
        """Parked, every block is free, and neither vLLM nor its aggregator waits for anything."""
        self.ledger.assert_at_rest()
        assert self.parked(), f"it steps on, for {sorted(self.requests)}"
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not any(self.references()), self.references()
        assert self.pool.get_num_free_blocks() == self.setting.num_blocks
        left = {
            name: getattr(scheduler, name)
            for name in ("finished_recving_kv_req_ids", "failed_recving_kv_req_ids", "_inflight_prefills")
            if getattr(scheduler, name)
        }
        assert not left, left
        assert not scheduler.deferred_frees
        aggregator = self.core.model_executor.aggregator
        if aggregator is not None:
            pending = (aggregator._recv_remaining_count, aggregator._send_remaining_count)
            assert not any(pending), f"not all ranks have reported: {pending}"
            assert not aggregator._failed_recving_pending
