"""What the connector takes from vLLM besides the base class of connectors, and the hooks that it uses, by version.

vLLM moves these between releases. Served is 0.32.0.

| hook or name | 0.32.0 | 0.33.0 |
| --- | --- | --- |
| base class, SupportsHMA, the hooks of `connector.py` | as used | the same |
| `get_current_attn_backends` | distributed.kv_transfer.kv_connector.utils | the same |
| `get_tensor_model_parallel_rank`, `get_tp_group` | distributed.parallel_state | the same |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group

from pdflow_runtime.vllm.options import UnsupportedError

SERVED: Final = ("0.32.0",)


def attention_of(vllm_config: Any) -> tuple[str, str]:
    """Return the name of the attention backend of all layers, and a name for what the interior of a block depends on
    besides. UnsupportedError if layers have several."""
    names = sorted({backend.get_name() for backend in get_current_attn_backends(vllm_config)})
    if len(names) != 1:
        raise UnsupportedError(f"models with several attention backends ({', '.join(names)}) are not served")
    return names[0], _cpu_packing(vllm_config) if names[0] == "CPU_ATTN" else ""


def _cpu_packing(vllm_config: Any) -> str:
    """Return the instructions by which the CPU's attention packs a head of a block."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = vllm_config.model_config, vllm_config.cache_config
    isa: str = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return isa


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
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait
