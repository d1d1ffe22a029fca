"""A vLLM connector that forwards its hooks to other objects. vLLM's factory constructs it as it does any other.

`kv_connector_extra_config` has the objects: "scheduler" for the half in EngineCore, "workers" by rank. A hook that an
object lacks is the base class's. `request_finished_all_groups` is `request_finished` where an object has only that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

SCHEDULER_HOOKS = (
    *("bind_kv_cache_manager", "bind_gpu_block_pool", "get_loaded_kv_cache_group_ids", "get_num_new_matched_tokens"),
    *("get_external_cache_hit_sources", "update_state_after_alloc", "build_connector_meta", "on_new_request"),
    *("update_connector_output", "take_events", "has_pending_block_frees", "has_pending_push_work"),
    *("get_finished_count", "set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware", "reset_cache"),
)
WORKER_HOOKS = (
    *("get_mem_pool_context", "bind_connector_metadata", "clear_connector_metadata", "register_kv_caches"),
    *("set_host_xfer_buffer_ops", "finish_forward", "handle_preemptions", "start_load_kv", "wait_for_layer_load"),
    *("save_kv_layer", "wait_for_save", "get_finished", "get_transfer_results", "get_block_ids_with_load_errors"),
    *("get_kv_connector_kv_cache_events", "get_handshake_metadata", "build_connector_worker_meta"),
)
COMMON_HOOKS = ("get_kv_connector_stats", "shutdown")


class EmptyMetadata(KVConnectorMetadata):
    """Metadata of a scheduler side that has none."""


class _Defaults(KVConnectorBase_V1, SupportsHMA):
    """The base class, with what it leaves abstract."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return EmptyMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class HookedConnector(_Defaults):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra_config = self._kv_transfer_config.kv_connector_extra_config
        if role is KVConnectorRole.SCHEDULER:
            self.hooks = extra_config["scheduler"]
        else:
            self.hooks = extra_config["workers"][vllm_config.parallel_config.rank]

    @property
    def requires_kv_delivery(self) -> bool:
        required: bool | None = getattr(self.hooks, "requires_kv_delivery", None)
        return super().requires_kv_delivery if required is None else required

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        result: tuple[bool, dict[str, Any] | None] = (False, None)
        if hasattr(self.hooks, "request_finished_all_groups"):
            result = self.hooks.request_finished_all_groups(request, block_ids)
        elif hasattr(self.hooks, "request_finished"):
            result = self.hooks.request_finished(request, *block_ids)
        return result


def _forwarding(name: str) -> Callable[..., Any]:
    """Looked up at each call: a test may wrap an object's hook after the engine has started."""
    default = getattr(_Defaults, name)

    def forward(self: HookedConnector, *args: Any, **kwargs: Any) -> Any:
        hook = getattr(self.hooks, name, None)
        return default(self, *args, **kwargs) if hook is None else hook(*args, **kwargs)

    forward.__name__ = name
    return forward


for _name in (*SCHEDULER_HOOKS, *WORKER_HOOKS, *COMMON_HOOKS):
    setattr(HookedConnector, _name, _forwarding(_name))
