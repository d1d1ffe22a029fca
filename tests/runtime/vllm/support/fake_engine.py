"""vLLM v1's scheduler and workers as a KV connector sees them: which hook is called when, and with whose blocks.

A model of `vllm/v1/core/sched/scheduler.py` (0.32), as far as a connector can tell: the order of hooks within a step,
preemption, delayed frees, failed loads, and the assertions that stop EngineCore. It computes nothing. Hooks are those
of the two halves of pdflow's connector (`pdflow_runtime/vllm`), which `connector.py` calls in this order. A step is
`schedule`, the workers' hooks, `update_from_output`; with `async_scheduling` the next step is scheduled before the
output of the one before is looked at. `defers_alloc`: `update_state_after_alloc` waits for the end of the step that was
in flight (0.33).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any, Protocol

from pdflow.protocol.values import NO_BLOCK, BlockTables, blocks_of


def computed() -> None:
    """All that has been launched is computed at once."""


class Status(Enum):
    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()

    @property
    def is_finished(self) -> bool:
        return self.name.startswith("FINISHED")


class Request:
    """Args: `params`: its kv_transfer_params; `cached_tokens` of its prompt are in the engine's prefix cache; `first`
    token id of its prompt, which is that of no other content."""

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        max_tokens: int,
        params: Any = None,
        cached_tokens: int = 0,
        first: int = 0,
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.prompt_token_ids = list(range(first, first + num_prompt_tokens))
        self.max_tokens = max_tokens
        self.kv_transfer_params = params
        self.cached_tokens = cached_tokens
        self.skip_reading_prefix_cache = False
        self.status = Status.WAITING
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.tables: list[list[int]] = []
        """Its block table in each KV cache group."""

    @property
    def block_ids(self) -> list[int]:
        return list(blocks_of(self.tables))

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class BlockPool:
    """Blocks with counted references. `given[block]` names the last time that it left the free list."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = list(range(num_blocks))
        """A block's number stands for vLLM's object."""
        self.references = [0] * num_blocks
        self.given = [0] * num_blocks
        self.free = deque(range(num_blocks))

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        blocks = [self.free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self.given[block] += 1
            self.references[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self.references[block] > 0, f"block {block} is free"
            self.references[block] += 1

    def free_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self.references[block] > 0, f"block {block} is freed twice"
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)


class SchedulerOutput:
    def __init__(self) -> None:
        self.num_scheduled_tokens: dict[str, int] = {}
        self.preempted_req_ids: list[str] = []
        self.finished_req_ids: tuple[str, ...] = ()
        self.payload: bytes | None = None
        """What the scheduler's half sends to its workers."""
        self.failed: tuple[str, ...] = ()


class ConnectorOutput:
    """KVConnectorOutput, of all workers. A load has ended when every worker has reported it."""

    def __init__(self) -> None:
        self.finished_recving: set[str] = set()
        self.failed_recving: set[str] = set()
        self.payloads: list[bytes] = []


class SchedulerHooks(Protocol):
    """The half of a connector in EngineCore."""

    def on_new_request(self, request: Request) -> None: ...
    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]: ...
    def update_state_after_alloc(self, request: Request, tables: BlockTables, external: int) -> None: ...
    def take_down(self, scheduled: Mapping[str, int]) -> bytes | None: ...
    def take_failed(self) -> tuple[str, ...]: ...
    def update_output(self, output: ConnectorOutput, payloads: list[bytes] | None) -> None: ...
    def request_finished(self, request: Request, tables: BlockTables) -> Any: ...
    def has_pending_work(self) -> bool: ...


class WorkerHooks(Protocol):
    """The half of a connector in one worker."""

    def bind_metadata(self, payload: bytes | None, failed: tuple[str, ...]) -> None: ...
    def layer_computed(self, layer: str, mark: Any) -> None: ...
    def step_computed(self, mark: Any) -> None: ...
    def take_failed(self) -> set[str]: ...
    def take_up(self) -> bytes | None: ...


class VllmEngine:
    """Args: `windows`: the tokens that each KV cache group keeps, None for all; `recompute`: a prompt whose load has
    failed is computed here (kv_load_failure_policy), otherwise it fails.

    `answers` has what became of each request that is over: its status, and the kv_transfer_params for its client.
    """

    def __init__(
        self,
        connector: SchedulerHooks,
        workers: list[Any],
        num_blocks: int = 64,
        block_size: int = 16,
        max_num_batched_tokens: int = 64,
        recompute: bool = True,
        async_scheduling: bool = False,
        defers_alloc: bool = False,
        layers: tuple[str, ...] = (),
        windows: tuple[int | None, ...] = (None,),
        compute: Callable[[Any, str], None] = lambda worker, layer: None,
    ) -> None:
        self.layers = layers
        self.windows = windows
        self.compute = compute
        """Called with each worker and layer of a step that computes anything."""
        self.connector = connector
        self.workers: list[WorkerHooks] = workers
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.recompute = recompute
        self.async_scheduling = async_scheduling
        self.defers_alloc = defers_alloc
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished_recving: set[str] = set()
        self.failed_recving: set[str] = set()
        self.finished_req_ids: list[str] = []
        self.in_flight: deque[tuple[SchedulerOutput, ConnectorOutput]] = deque()
        self.deferred: list[tuple[Request, int]] = []
        self.answers: dict[str, tuple[Status, Any]] = {}

    # What the API server asks.

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)

    def abort(self, request_id: str) -> None:
        self.finish_requests([request_id], Status.FINISHED_ABORTED)

    def finish_requests(self, request_ids: list[str], status: Status) -> None:
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None or request.status.is_finished:
                continue
            if request in self.running:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            delay = False
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                unknown = any(other is request for other, _ in self.deferred)
                delay = request_id not in self.finished_recving and not unknown
                self.finished_recving.discard(request_id)
                self.failed_recving.discard(request_id)
            request.status = status
            self._free_request(request, delay)

    # A step.

    def has_work(self) -> bool:
        return bool(self.requests or self.finished_req_ids or self.connector.has_pending_work())

    def parked(self) -> bool:
        """Whether EngineCore waits for its next request, and calls no hook."""
        return not self.has_work() and not self.in_flight

    def step(self) -> None:
        works = self.has_work()
        if works:
            output = self.schedule()
            self.in_flight.append((output, self.execute(output)))
        if len(self.in_flight) > (self.async_scheduling and works):
            self.update_from_output(*self.in_flight.popleft())

    def schedule(self) -> SchedulerOutput:
        deferred, self.deferred = self.deferred, []
        for request, external in deferred:
            if not request.status.is_finished:
                self.connector.update_state_after_alloc(request, copied(request.tables), external)
        output = SchedulerOutput()
        budget = self.max_num_batched_tokens
        for request in tuple(self.running):
            if request not in self.running:
                break
            new = min(request.num_tokens - request.num_computed_tokens, budget)
            if new <= 0:
                continue
            while not self._allocate(request, self._processed(request), request.num_computed_tokens + new):
                victim = self.running.pop()
                self._preempt(victim)
                output.preempted_req_ids.append(victim.request_id)
                if victim is request:
                    break
            if request not in self.running:
                break
            output.num_scheduled_tokens[request.request_id] = new
            budget -= new
        if not output.preempted_req_ids:
            self._schedule_waiting(output, budget)
        output.finished_req_ids, self.finished_req_ids = tuple(self.finished_req_ids), []
        scheduled = output.num_scheduled_tokens
        output.payload, output.failed = self.connector.take_down(scheduled), self.connector.take_failed()
        for request_id, new in scheduled.items():
            self.requests[request_id].num_computed_tokens += new
        return output

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        skipped: list[Request] = []
        while self.waiting and budget > 0:
            request = self.waiting[0]
            if request.status is Status.WAITING_FOR_REMOTE_KVS and not self._is_ready(request):
                skipped.append(self.waiting.popleft())
                continue
            external, loads = 0, False
            computed = request.num_computed_tokens
            if not computed:
                matched, loads = self.connector.get_num_new_matched_tokens(request, request.cached_tokens)
                if request.skip_reading_prefix_cache:
                    matched, loads = 0, False
                if matched is None:
                    skipped.append(self.waiting.popleft())
                    continue
                external = matched
                computed = request.cached_tokens + external
            assert not loads or external > 0
            new = 0 if loads else min(request.num_tokens - computed, budget)
            assert loads or new > 0
            if not self._allocate(request, computed, computed + new):
                break
            if loads and self.defers_alloc:
                self.deferred.append((request, external))
            else:
                self.connector.update_state_after_alloc(request, copied(request.tables), external)
            self.waiting.popleft()
            if loads:
                request.status = Status.WAITING_FOR_REMOTE_KVS
                skipped.append(request)
                continue
            request.status = Status.RUNNING
            request.num_computed_tokens = computed
            self.running.append(request)
            output.num_scheduled_tokens[request.request_id] = new
            budget -= new
        self.waiting.extendleft(reversed(skipped))

    def _is_ready(self, request: Request) -> bool:
        """_update_waiting_for_remote_kv, and what becomes of a request that is."""
        request_id = request.request_id
        if request_id not in self.finished_recving:
            return False
        self.finished_recving.remove(request_id)
        if request_id in self.failed_recving:
            self.failed_recving.remove(request_id)
            self._free_blocks_of(request)
        else:
            full = len(request.tables[0]) * self.block_size
            request.num_computed_tokens = min(full, request.num_tokens - 1)
            for table, window in zip(request.tables, self.windows, strict=True):
                attended = 0 if window is None else max(0, request.num_computed_tokens - window + 1)
                assert NO_BLOCK not in table[attended // self.block_size :], f"{request_id} attends to what is not kept"
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        return True

    def _allocate(self, request: Request, computed: int, num_tokens: int) -> bool:
        """Give a request blocks for so many tokens, of which the first `computed` ones are there or will be loaded: of
        these, a sliding window keeps only what the next token attends to."""
        request.tables = request.tables or [[] for _ in self.windows]
        self._remove_skipped(request, computed)
        whole, missing = -(-num_tokens // self.block_size), []
        for table, skipped in zip(request.tables, self._skipped(computed), strict=True):
            missing.append((min(whole, max(0, skipped - len(table))), max(0, whole - max(skipped, len(table)))))
        if sum(new for _, new in missing) > len(self.pool.free):
            return False
        for table, (holes, new) in zip(request.tables, missing, strict=True):
            table += [NO_BLOCK] * holes + self.pool.get_new_blocks(new)
        return True

    def _processed(self, request: Request) -> int:
        """Tokens of which no step is in flight any more: at least these."""
        return request.num_computed_tokens - (self.max_num_batched_tokens if self.async_scheduling else 0)

    def _skipped(self, computed: int) -> list[int]:
        """The first blocks that the token behind the computed ones does not attend to, for each group."""
        return [0 if window is None else max(0, computed - window + 1) // self.block_size for window in self.windows]

    def _remove_skipped(self, request: Request, computed: int) -> None:
        for table, skipped in zip(request.tables, self._skipped(computed), strict=True):
            for index in reversed(range(min(skipped, len(table)))):
                if table[index] != NO_BLOCK:
                    self.pool.free_blocks([table[index]])
                    table[index] = NO_BLOCK

    def _preempt(self, request: Request) -> None:
        assert request.status is Status.RUNNING
        self._free_blocks_of(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def execute(self, output: SchedulerOutput) -> ConnectorOutput:
        result = ConnectorOutput()
        recving = []
        for worker in self.workers:
            worker.bind_metadata(output.payload, output.failed)
            for layer in self.layers if output.num_scheduled_tokens else ():
                self.compute(worker, layer)
                worker.layer_computed(layer, computed)
            worker.step_computed(computed)
            failed = worker.take_failed()
            recving.append(set(failed))
            result.failed_recving |= failed
            if (payload := worker.take_up()) is not None:
                result.payloads.append(payload)
        result.finished_recving = set.intersection(*recving)
        return result

    def update_from_output(self, output: SchedulerOutput, result: ConnectorOutput) -> None:
        failed = [r for r in sorted(result.failed_recving) if self._awaits_kv(r)]
        if self.recompute:
            self.failed_recving.update(failed)
        for request_id in output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.status is not Status.RUNNING:
                continue  # Finished or preempted while this step was in flight.
            if request.num_computed_tokens < request.num_tokens:
                continue
            request.num_output_tokens += 1
            if request.num_output_tokens == request.max_tokens:
                request.status = Status.FINISHED_LENGTH_CAPPED
                self.running.remove(request)
                self._free_request(request)
        if not self.recompute:
            self.finish_requests(failed, Status.FINISHED_ERROR)
        self._update_from_kv_xfer_finished(result)

    def _awaits_kv(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.status is Status.WAITING_FOR_REMOTE_KVS

    def _update_from_kv_xfer_finished(self, result: ConnectorOutput) -> None:
        self.connector.update_output(result, result.payloads or None)
        for request_id in sorted(result.finished_recving):
            request = self.requests[request_id]  # vLLM asserts that it is there, and EngineCore dies if it is not.
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self.finished_recving.add(request_id)
            else:
                assert request.status.is_finished
                self._free_blocks(request)

    def _free_request(self, request: Request, delay: bool = False) -> None:
        if request.tables:
            self._remove_skipped(request, self._processed(request))
        params = self.connector.request_finished(request, copied(request.tables))
        self.finished_req_ids.append(request.request_id)
        self.answers[request.request_id] = (request.status, params)
        if not delay:
            self._free_blocks(request)

    def _free_blocks(self, request: Request) -> None:
        assert request.status.is_finished
        self._free_blocks_of(request)
        del self.requests[request.request_id]

    def _free_blocks_of(self, request: Request) -> None:
        self.pool.free_blocks(request.block_ids)
        request.tables = []


def copied(tables: BlockTables) -> list[list[int]]:
    return [list(table) for table in tables]
