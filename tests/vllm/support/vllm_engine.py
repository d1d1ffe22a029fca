"""One engine of the installed vLLM as far as KV transfer goes: its connector's scheduler and workers, real classes all,
over a NIXL that moves nothing, with a clock, a handshake and a writer thread that move when they are told to.

What is stubbed: NixlWrapper, `time`, the socket of the side channel, the executor of handshakes, the attention
backends' lookup and the compatibility hash (both need a model), and the waits of the push writer's loop, whose body is
run one pass at a time. Nothing of the matching, the leases, the counting or the bookkeeping is.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    base_scheduler,
    base_worker,
    pull_scheduler,
    pull_worker,
    push_scheduler,
    push_worker,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput

from pdflow.protocol.ids import rank_address
from pdflow.protocol.values import Address
from tests.vllm.support.nixl_stub import NixlStub, Wire

BLOCK = 32
NUM_BLOCKS = 64
HEADS = 4
HEAD_DIM = 8
MODULES = (base_scheduler, base_worker, pull_scheduler, pull_worker, push_scheduler, push_worker)


class Clock:
    """`time` of the connector's modules."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def perf_counter(self) -> float:
        return self.now_s


class OnePass:
    """In place of the writer's stop event: its loop runs once, and waits for nothing."""

    def __init__(self) -> None:
        self.asked = 0

    def is_set(self) -> bool:
        self.asked += 1
        return self.asked % 2 == 0

    def wait(self, timeout: float | None = None) -> None:
        del timeout

    def set(self) -> None:
        pass

    def clear(self) -> None:
        pass


class Handshakes:
    """In place of the executor: what is submitted waits for `end`."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        self.ask = ask
        self.waiting: dict[str, tuple[Any, tuple[Any, ...], Future[Any]]] = {}

    def submit(self, function: Any, *args: Any) -> Future[Any]:
        engine = args[3]
        future: Future[Any] = Future()
        self.waiting[engine] = (function, args, future)
        self.ask(engine)
        return future

    def end(self, engine: str, ok: bool) -> None:
        function, args, future = self.waiting.pop(engine)
        if not ok:
            future.set_exception(RuntimeError("the schedule lets this handshake fail"))
            return
        future.set_result(function(*args))

    def shutdown(self, **_: Any) -> None:
        pass


class World:
    """What the engines share."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.clock = Clock()
        self.engines: dict[int, VllmEngine] = {}
        self.handshakes: list[tuple[Address, str]] = []
        """(rank, engine): begun since somebody last looked."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The stubs in place of what they stand for."""
        with contextlib.ExitStack() as stack:
            for module in MODULES:
                if hasattr(module, "time"):
                    stack.enter_context(mock.patch.object(module, "time", self.clock))
            NixlStub.wire = self.wire
            for name, stub in (
                ("NixlWrapper", NixlStub),
                ("zmq_ctx", self._socket),
                ("get_current_attn_backends", lambda _: [CPUAttentionBackend]),
                ("compute_nixl_compatibility_hash", lambda *_, **__: "same"),
            ):
                stack.enter_context(mock.patch.object(base_worker, name, stub))
            stack.enter_context(mock.patch.object(base_worker.current_platform, "discover_numa_topology", list))
            yield

    @contextlib.contextmanager
    def _socket(self, _: Any, path: str) -> Iterator[Any]:
        """A REQ socket to the listener of whoever has that port."""
        payloads = self.engines[int(path.rsplit(":", 1)[1])].payloads
        asked: list[bytes] = []

        def answer() -> list[bytes]:
            _, pp_rank, tp_rank = msgspec.msgpack.decode(asked.pop())
            return [payloads[pp_rank, tp_rank], msgspec.msgpack.encode(self.clock.now_s)]

        yield SimpleNamespace(setsockopt=lambda *_: None, send=asked.append, recv_multipart=answer)


def config(role: str, engine: str, tp: int) -> Any:
    """As much of a VllmConfig as the connector reads."""
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector", kv_role=role, engine_id=engine, kv_buffer_device="cpu"
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_index=0,
        ),
        cache_config=SimpleNamespace(
            block_size=BLOCK, cache_dtype="auto", get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        model_config=SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: HEADS),
        compilation_config=SimpleNamespace(static_forward_context={}),
        num_prefill_lookahead_tokens=0,
    )


class VllmEngine:
    """A scheduler and its workers. A step makes one metadata object for each worker; each worker takes it in when the
    schedule says so; when all have, what they report goes to the scheduler, through vLLM's own aggregator."""

    def __init__(self, world: World, engine: str, producer: bool, tp: int, pulls: bool, port: int) -> None:
        self.world = world
        self.engine = engine
        self.pulls = pulls
        self.port = port
        role = "kv_producer" if producer else "kv_consumer"
        vllm_config = config(role, engine, tp)
        heads = HEADS // tp
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=HEAD_DIM, dtype=torch.float32)
        kv_config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layers.0"], spec)])
        scheduler_class = (
            pull_scheduler.NixlPullConnectorScheduler if pulls else push_scheduler.NixlPushConnectorScheduler
        )
        worker_class = pull_worker.NixlPullConnectorWorker if pulls else push_worker.NixlPushConnectorWorker
        self.scheduler = scheduler_class(vllm_config, engine, kv_config)
        self.scheduler.side_channel_port = port
        self.workers: list[Any] = []
        self.payloads: dict[tuple[int, int], bytes] = {}
        for rank in range(tp):
            address = rank_address(engine, rank)
            with (
                mock.patch.object(base_worker, "get_tensor_model_parallel_rank", return_value=rank),
                mock.patch.object(base_worker, "get_tensor_model_parallel_world_size", return_value=tp),
            ):
                worker = worker_class(vllm_config, engine, kv_config)
            world.wire.join(worker.nixl_wrapper, address)
            worker._handshake_initiation_executor.shutdown(wait=False)
            worker._handshake_initiation_executor = Handshakes(
                lambda other, address=address: world.handshakes.append((address, other))
            )
            if not pulls:
                worker._push_writer_thread = "run by hand"
                worker._push_writer_stop = worker._push_writer_wake = OnePass()
            cache = torch.zeros(NUM_BLOCKS, heads, BLOCK, 2 * HEAD_DIM)
            worker.register_kv_caches({"layers.0": cache})
            self.payloads[0, rank] = msgspec.msgpack.encode(worker.xfer_handshake_metadata)
            self.workers.append(worker)
        world.engines[port] = self
        self.aggregator = KVOutputAggregator(tp)
        self.mail: list[deque[Any]] = [deque() for _ in range(tp)]
        self.reports: list[deque[KVConnectorOutput]] = [deque() for _ in range(tp)]
        self.sent: list[str] = []
        self.received: list[tuple[str, bool]] = []
        """(request, failed): aggregated since somebody last looked."""

    def shaken_with(self, rank: int, other: str) -> bool:
        return other in self.workers[rank]._remote_agents

    def step(self, heartbeat: bool) -> None:
        self.scheduler._last_heartbeat_time = 0.0 if heartbeat else self.world.clock.now_s
        metadata = self.scheduler.build_connector_meta(None)
        for box in self.mail:
            box.append(copy.deepcopy(metadata))

    def work(self, rank: int) -> None:
        """One step of one worker: `start_load_kv`, the writer, the results, the writer."""
        worker = self.workers[rank]
        worker.start_load_kv(self.mail[rank].popleft())
        self.write(rank)
        results = worker.get_transfer_results()
        self.write(rank)
        self.reports[rank].append(
            KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
            )
        )
        while all(self.reports):
            outputs = [SimpleNamespace(kv_connector_output=reports.popleft()) for reports in self.reports]
            output = self.aggregator.aggregate(outputs).kv_connector_output
            self.scheduler.update_connector_output(output)
            self.sent += output.finished_sending or ()
            self.received += [(name, name in (output.failed_recving or ())) for name in output.finished_recving or ()]

    def write(self, rank: int) -> None:
        """One pass of the push writer's loop."""
        if not self.pulls:
            self.workers[rank]._push_writer_loop()

    def end_handshake(self, rank: int, other: str, ok: bool) -> None:
        self.workers[rank]._handshake_initiation_executor.end(other, ok)
        self.write(rank)
