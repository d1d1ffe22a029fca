"""A KV connector of vLLM around the cores of `pdflow/serving`: hooks become events, effects become what hooks return.

Nothing here decides about a request. What is kept is what vLLM's side of a hook needs: which report vLLM waits for, the
generation of an allocation (vLLM's blocks have none), and one reference on the blocks of a grant, so that vLLM's own
free never makes them usable while the protocol still owns them.

Scheduler and workers are apart: what the scheduler's endpoint tells a rank goes down with the step's metadata, and what
a rank tells the scheduler comes up with the step's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdflow.protocol.effects import AnswerPrefill, Commit, Enqueue, FreeBlocks, Note, Quarantine, SendLocal
from pdflow.protocol.events import TimeReached
from pdflow.protocol.ids import KvParams
from pdflow.protocol.values import NEVER, Address, Allocation, Instant
from pdflow.serving.core import Core, Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.decode_request import DecodeStage
from pdflow.serving.effects import (
    Admit,
    Computed,
    Drop,
    EndDecode,
    EndPrefill,
    Forget,
    FreePrompt,
    Landed,
    Released,
)
from pdflow.serving.events import (
    DecodeRequested,
    EngineAdmitted,
    EngineDropped,
    EngineFinished,
    Handle,
    PrefillFailed,
    PrefillRequested,
    PromptComputed,
    RequestAborted,
)
from pdflow.serving.prefill import PrefillCore
from tests.serving.vllm_engine import BlockPool, ConnectorOutput, Request, SchedulerOutput, Status


class RemotePrefill(msgspec.Struct):
    """kv_transfer_params of a decode leg, as a connector has parsed them."""

    params: KvParams
    digest: int


class RemoteDecode(msgspec.Struct):
    """kv_transfer_params of a prefill leg."""

    xid: str
    digest: int


class Down(msgspec.Struct):
    """Connector metadata of one step: what ranks are told, and whose load is to be reported as failed."""

    local_events: list[tuple[Address, Any]] = []
    failed: list[Handle] = []


class SchedulerSide:
    """Both roles' half in EngineCore. Args: `clock` says what time it is."""

    def __init__(self, core: Any, port: Port, clock: Callable[[], Instant], generations: Callable[[], int]) -> None:
        self.core = core
        self.port = port
        self.clock = clock
        self.generations = generations
        self.down = Down()
        self.pool: BlockPool
        self.record: list[Any] = []
        """Effects that are for the record."""
        core.add(port)
        core.do.update({SendLocal: self.send_local, Note: self.note})

    def feed(self, event: Any) -> None:
        self.core.feed(self.core.role, event, self.clock())

    def note(self, _: Port, effect: Any) -> None:
        self.record.append(effect)

    def send_local(self, _: Port, effect: SendLocal) -> None:
        self.down.local_events.append((effect.to, effect.event))

    def mint(self, blocks: list[int]) -> Allocation:
        return Allocation(self.generations(), tuple(blocks))

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        self.pool = pool

    def build_connector_meta(self, output: SchedulerOutput) -> Down:
        down, self.down = self.down, Down()
        return down

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """What has come up from every rank, and then what is due (C11)."""
        for events in output.worker_meta:
            for event in events:
                self.core.feed(self.port, event, self.clock())
        endpoint: Any = self.port.endpoint
        at = endpoint.wake_at()
        if at is not None and at <= self.clock():
            self.core.feed(self.port, TimeReached(), self.clock())


class DecodeSide(SchedulerSide):
    """D's half in EngineCore."""

    core: DecodeCore

    def __init__(self, core: DecodeCore, port: Port, clock: Callable[[], Instant], generations: Any) -> None:
        super().__init__(core, port, clock, generations)
        self.requests: dict[Handle, Request] = {}
        self.queued: set[Handle] = set()
        """May be given blocks."""
        self.loading: set[Handle] = set()
        """vLLM waits for a report of the end of its load."""
        self.allocations: dict[Handle, Allocation] = {}
        self.references: dict[int, tuple[int, ...]] = {}
        """Blocks that we hold a reference on, by generation."""
        self.received: set[Handle] = set()
        """Loads whose end is to be reported."""
        core.do.update({Enqueue: self.enqueue, FreeBlocks: self.free, Quarantine: self.note})
        core.perform.update(dict.fromkeys((Admit, Landed, EndDecode), self.note))
        core.perform.update({Commit: self.commit, Drop: self.drop, FreeBlocks: self.free})
        core.begin(port)

    # Effects.

    def enqueue(self, _: Port, effect: Enqueue) -> None:
        self.queued.add(effect.request_id)

    def commit(self, _: Port, effect: Commit) -> None:
        handle = effect.request_id
        self.release(self.allocations.pop(handle))
        self.loading.remove(handle)
        self.received.add(handle)

    def drop(self, _: Port, effect: Drop) -> None:
        """A load that has failed, if vLLM waits for one; otherwise it has nothing to give up, or has given it up."""
        handle = effect.handle
        waits = self.requests[handle].status is Status.WAITING_FOR_REMOTE_KVS
        if handle in self.loading or (handle in self.queued and waits):
            self.down.failed.append(handle)
        else:
            self.dropped(handle)

    def dropped(self, handle: Handle) -> None:
        self.queued.discard(handle)
        self.loading.discard(handle)
        self.feed(EngineDropped(handle, self.allocations.pop(handle, None)))

    def free(self, _: Port, effect: FreeBlocks) -> None:
        self.release(effect.allocation)

    def release(self, allocation: Allocation) -> None:
        self.pool.free_blocks(self.references.pop(allocation.generation))

    # Hooks.

    def on_new_request(self, request: Request) -> None:
        remote = request.kv_transfer_params
        if isinstance(remote, RemotePrefill):
            handle, tokens = request.request_id, request.num_prompt_tokens
            endpoint: Any = self.port.endpoint
            blocks = -(-tokens // endpoint.engine.shards.block_size)
            self.requests[handle] = request
            self.feed(DecodeRequested(handle, remote.params, blocks, tokens, remote.digest))

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        if self.core.stage_of(request.request_id) is not DecodeStage.PENDING:
            return 0, False
        if request.request_id not in self.queued:
            return None, False
        return request.num_prompt_tokens - computed, True

    def update_state_after_alloc(self, request: Request, blocks: list[int], external: int) -> None:
        if not external:
            return
        handle = request.request_id
        endpoint: Any = self.port.endpoint
        here = request.num_prompt_tokens - external
        allocation = self.mint(blocks[here // endpoint.engine.shards.block_size :])
        self.pool.touch(allocation.blocks)
        self.references[allocation.generation] = allocation.blocks
        self.allocations[handle] = allocation
        self.queued.discard(handle)
        self.loading.add(handle)
        self.feed(EngineAdmitted(handle, allocation, here))

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for handle in sorted(output.failed_recving):
            if handle not in self.loading:
                # Aborted before vLLM had told us of its blocks: it waits for no report, and one too many stops it.
                output.finished_recving.discard(handle)
            self.dropped(handle)
        super().update_connector_output(output)
        output.finished_recving |= self.received
        self.received.clear()

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, Any]:
        handle = request.request_id
        if self.core.stage_of(handle) is not None:
            finished = request.status is Status.FINISHED_LENGTH_CAPPED
            self.feed(EngineFinished(handle) if finished else RequestAborted(handle))
        self.requests.pop(handle, None)
        return False, None

    def has_pending_push_work(self) -> bool:
        endpoint: Any = self.port.endpoint
        return bool(self.down.local_events or self.down.failed or endpoint.cells)


class PrefillSide(SchedulerSide):
    """P's half in EngineCore."""

    core: PrefillCore

    def __init__(self, core: PrefillCore, port: Port, clock: Callable[[], Instant], generations: Any) -> None:
        super().__init__(core, port, clock, generations)
        self.names: dict[Handle, str] = {}
        """What vLLM calls a prompt."""
        self.finishing: Handle | None = None
        """The prompt of whose end vLLM is telling us."""
        self.answer: KvParams | None = None
        self.sent: set[str] = set()
        """Prompts whose blocks vLLM may free."""
        core.perform.update(dict.fromkeys((Enqueue, Computed, Released, EndPrefill), self.note))
        core.perform.update({AnswerPrefill: self.answered, FreePrompt: self.free})
        core.perform.update({Drop: self.drop, Forget: self.forget})
        core.begin(port)

    # Effects.

    def drop(self, _: Port, effect: Drop) -> None:
        """vLLM has dropped it when we learn of the abort."""
        self.feed(EngineDropped(effect.handle))

    def answered(self, _: Port, effect: AnswerPrefill) -> None:
        self.answer = effect.params

    def free(self, _: Port, effect: FreePrompt) -> None:
        """What vLLM is still holding because we said so; in the hook, it has not asked yet."""
        if effect.handle == self.finishing:
            self.finishing = None
        else:
            self.sent.add(self.names[effect.handle])

    def forget(self, _: Port, effect: Forget) -> None:
        del self.names[effect.handle]

    # Hooks.

    def on_new_request(self, request: Request) -> None:
        remote = request.kv_transfer_params
        if isinstance(remote, RemoteDecode):
            self.names[remote.xid] = request.request_id
            self.feed(PrefillRequested(remote.xid, request.request_id, request.num_prompt_tokens, remote.digest))

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: list[int], external: int) -> None:
        pass

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, Any]:
        remote = request.kv_transfer_params
        if not isinstance(remote, RemoteDecode) or not self.core.knows(remote.xid):
            return False, None
        handle = self.finishing = remote.xid
        if request.status is Status.FINISHED_LENGTH_CAPPED:
            endpoint: Any = self.port.endpoint
            own = blocks[: -(-request.num_prompt_tokens // endpoint.engine.shards.block_size)]
            self.feed(PromptComputed(handle, self.mint(own)))
        else:
            if request.status is Status.FINISHED_ABORTED:
                self.feed(RequestAborted(handle))
            self.feed(PrefillFailed(handle))
        answer, self.answer = self.answer, None
        delay = self.finishing is not None and self.core.knows(handle)
        self.finishing = None
        return delay, answer

    def update_connector_output(self, output: ConnectorOutput) -> None:
        super().update_connector_output(output)
        output.finished_sending |= self.sent
        self.sent.clear()

    def has_pending_push_work(self) -> bool:
        endpoint: Any = self.port.endpoint
        return bool(self.down.local_events or endpoint.products)


class WorkerSide:
    """One rank's half in its worker. Its own thread goes on between steps: `port` is fed whenever something arrives.

    Args: `do`: carries out what the rank's endpoint wants, by (address, effect).
    """

    def __init__(self, port: Port, do: Callable[[Address, Any], None], clock: Callable[[], Instant]) -> None:
        self.core = Core()
        self.port = port
        self.clock = clock
        self.up: list[Any] = []
        self.failed: set[Handle] = set()
        self.core.add(port)
        self.carry_out = do

    def does(self, kinds: tuple[type, ...]) -> None:
        """Effects of these kinds are carried out by this worker's transport."""
        self.core.do.update(dict.fromkeys(kinds, self.do))
        self.core.do[SendLocal] = self.send_local

    def do(self, port: Port, effect: Any) -> None:
        self.carry_out(port.address, effect)

    def send_local(self, _: Port, effect: SendLocal) -> None:
        self.up.append(effect.event)

    def feed(self, event: Any) -> None:
        self.core.feed(self.port, event, self.clock())

    def wake_at(self) -> Instant:
        endpoint: Any = self.port.endpoint
        at: Instant | None = endpoint.wake_at()
        return NEVER if at is None else at

    # Hooks, in the order of a step.

    def handle_preemptions(self, preempted: list[str]) -> None:
        pass

    def bind_connector_metadata(self, metadata: Down) -> None:
        self.failed.update(metadata.failed)
        for to, event in metadata.local_events:
            if to == self.port.address:
                self.feed(event)

    def wait_for_layer_load(self, layer: str) -> None:
        pass

    def save_kv_layer(self, layer: str) -> None:
        pass

    def start_load_kv(self) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished: tuple[str, ...]) -> tuple[set[str], set[str], set[str]]:
        """Sent, received, failed. All but failures is reported by the scheduler's half."""
        failed, self.failed = self.failed, set()
        return set(), set(failed), failed

    def build_connector_worker_meta(self) -> list[Any]:
        up, self.up = self.up, []
        return up

    def clear_connector_metadata(self) -> None:
        pass
