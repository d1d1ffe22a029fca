"""The KV connector that vLLM loads: its hooks, passed on to the half of the connector that this process has.

`--kv-transfer-config '{"kv_connector": "PdflowConnector", "kv_role": "kv_producer"}'` finds it by the plugin
(`plugin.py`), or by `"kv_connector_module_path": "pdflow_runtime.vllm.connector"`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import attrs
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pdflow.protocol.values import NO_BLOCK
from pdflow_runtime.transports.at_host import AtHost
from pdflow_runtime.transports.base import TransportError
from pdflow_runtime.transports.named import transport_named
from pdflow_runtime.vllm.instance import Instance, instance_of
from pdflow_runtime.vllm.interior import interior_digest
from pdflow_runtime.vllm.options import UnsupportedError
from pdflow_runtime.vllm.plugin import register
from pdflow_runtime.vllm.scheduler.decode_side import DecodeSide
from pdflow_runtime.vllm.scheduler.engine_clock import EngineClock
from pdflow_runtime.vllm.scheduler.guard import GuardedSide
from pdflow_runtime.vllm.scheduler.prefill_side import PrefillSide
from pdflow_runtime.vllm.seams import (
    attention_layer,
    attention_of,
    broadcast_from_first,
    computed_by_now,
    log_as_vllm,
    tensor_parallel_rank,
)
from pdflow_runtime.vllm.security import shared_tls
from pdflow_runtime.vllm.weights import weights_of
from pdflow_runtime.vllm.worker.kv_memory import adopted_memory, in_model_order, layer_groups
from pdflow_runtime.vllm.worker.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

stats: Any
try:
    stats = import_module("pdflow_runtime.vllm.stats")
except Exception as error:  # Whatever the import of NIXL raises, which vLLM's metrics of transfers bring along.
    log.warning("pdflow: metrics of transfers are unavailable: %s: %s", type(error).__name__, error)
    stats = None


@dataclass
class RankAddress(KVConnectorHandshakeMetadata):
    """What a worker's half tells the scheduler's at the start: where its rank listens, and its incarnation."""

    host: str
    port: int
    incarnation: int


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What goes to all workers with a step."""

    payload: bytes | None = None
    """A DownMessage."""
    failed: tuple[str, ...] = ()
    """Loads that are to be reported as failed."""


@dataclass
class StepAnswer(KVConnectorWorkerMetadata):
    """What goes to the scheduler with the output of a step: an UpMessage of each worker."""

    payloads: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepAnswer)
        return StepAnswer([*self.payloads, *other.payloads])


class PdflowConnector(KVConnectorBase_V1, SupportsHMA):
    """pdflow's endpoints inside a vLLM instance: strict push or pull between pdflow peers."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        self._instance: Instance = instance_of(vllm_config, kv_cache_config)
        self._guarded: GuardedSide | None = None
        self._worker: WorkerSide | None = None
        self._sample: torch.Tensor
        """One of the KV tensors."""
        self._measured: Any = None
        """Takes the stats of this half, from `stats.py`; None where that is missing."""
        self._weights = 0
        if role == KVConnectorRole.SCHEDULER:
            self._weights = weights_of(vllm_config, self._instance.options)
        else:
            incarnation = broadcast_from_first(secrets.randbits(63) | 1)
            self._worker = WorkerSide(self._instance, tensor_parallel_rank(), incarnation)
            self._measured = stats and stats.WorkerStats(self._worker.samples)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """CUDA graphs of a whole step would not call `save_kv_layer`."""
        return bool(extra_config.get("progressive", False))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """From 0.33 on. `instance_of` refuses it too."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads lie apart in blocks, so that a slice of heads of a block is one piece. MLA has one."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return stats and stats.PdflowStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return stats and stats.PdflowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._measured and self._measured.take()

    # The scheduler's half.

    @property
    def _scheduler(self) -> GuardedSide:
        assert self._guarded is not None, "vLLM sent a request before the workers reported their addresses"
        return self._guarded

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Begin, now that all ranks listen."""
        ranks = [each for _, each in sorted(metadata.items()) if isinstance(each, RankAddress)]
        if metadata and not ranks:
            raise UnsupportedError(
                "another connector of the MultiConnector reports rank addresses: list PdflowConnector first"
            )
        if len(ranks) != self._instance.info.shards.ranks:
            raise UnsupportedError(
                f"{len(ranks)} of {self._instance.info.shards.ranks} ranks have reported their addresses"
            )
        incarnation, clock = ranks[0].incarnation, EngineClock().now
        side: PrefillSide | DecodeSide
        if self._instance.role == "prefill":
            addresses = tuple((rank.host, rank.port) for rank in ranks)
            side = PrefillSide(self._instance, incarnation, self._weights, addresses, clock)
        else:
            side = DecodeSide(self._instance, incarnation, self._weights, clock)
        assert self._kv_cache_manager is not None
        side.bind(self._kv_cache_manager.block_pool, self._block_tables)
        self._guarded = GuardedSide(side)
        self._measured = stats and stats.GuardedStats(self._guarded)

    def _block_tables(self, request_id: str) -> list[list[int]]:
        assert self._kv_cache_manager is not None
        return self._tables(self._kv_cache_manager.get_block_ids(request_id))

    def _tables(self, block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return vLLM's block tables, in which its null block stands for what is not kept, as pdflow's."""
        assert self._kv_cache_manager is not None
        null = self._kv_cache_manager.block_pool.null_block.block_id
        return [[NO_BLOCK if block == null else block for block in table] for table in block_ids]

    @property
    def requires_kv_delivery(self) -> bool:
        """A preempted prompt may finish with the output of a step under way: a prompt that is computed keeps its
        blocks by references of its own."""
        return False

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        tables = self._tables(blocks.get_block_ids()) if num_external_tokens else []
        self._scheduler.update_state_after_alloc(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        scheduled = scheduler_output.num_scheduled_tokens
        return StepMetadata(self._scheduler.take_down(scheduled), self._scheduler.take_failed())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        answer = connector_output.kv_connector_worker_meta
        payloads = answer.payloads if isinstance(answer, StepAnswer) else None
        self._scheduler.update_output(connector_output, payloads)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.request_finished(request, self._tables(block_ids))

    def reset_cache(self) -> bool | None:
        self._scheduler.reset()
        return True

    def has_pending_push_work(self) -> bool:
        return self._guarded is not None and self._guarded.has_pending_work()

    # The worker's half.

    @property
    def _rank(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        instance, options = self._instance, self._instance.options
        kv_caches = in_model_order(kv_caches)
        self._sample = next(iter(kv_caches.values()))
        backend, packing = attention_of(self._vllm_config)
        shape, tp = instance.shape, instance.info.shards.tp
        groups = layer_groups(kv_caches, instance.groups)
        memory = adopted_memory(kv_caches, shape, tp, backend, packing, instance.num_blocks, groups)
        layer = attention_layer(self._vllm_config, next(iter(kv_caches)))
        dtype = self._vllm_config.model_config.dtype
        digest = interior_digest(layer, list(kv_caches.values()), memory.memory, dtype)
        memory = attrs.evolve(memory, interior_digest=digest)
        try:
            transport, tls = transport_named(options.transport), shared_tls(options)
            at_host = transport if options.transport == "shm" else AtHost(transport, options.host, tls)
            self._rank.start(memory, at_host, tuple(kv_caches), tls)
        except TransportError as error:
            raise UnsupportedError(str(error)) from None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self._rank.address is not None
        return RankAddress(*self._rank.address, self._rank.incarnation)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The first hook of a step: `start_load_kv` may come after the forward."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._rank.bind_metadata(connector_metadata.payload, connector_metadata.failed)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        self._rank.layer_computed(layer_name, partial(computed_by_now, kv_layer))

    def wait_for_save(self) -> None:
        self._rank.step_computed(partial(computed_by_now, self._sample))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        failed = self._rank.take_failed()
        return KVConnectorTransferResults(finished_recving=set(failed), failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        payload = self._rank.take_up()
        return None if payload is None else StepAnswer([payload])

    def shutdown(self) -> None:
        if self._guarded is not None:
            self._guarded.side.close()
        if self._worker is not None:
            self._worker.stop()


register()  # MultiConnector asks for a child by its name, also for one that was given by its module
