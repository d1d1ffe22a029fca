"""How many tokens of KV an engine holds, and whether its model fits at all.

It is an estimate: vLLM's log line "GPU KV cache size" is better,
and scenarios take it as `kv_tokens`.
"""

from __future__ import annotations

from fractions import Fraction

from pdflow.cost.specs import GpuSpec, ModelSpec

RESERVE_BYTES = 1_240_000_000
"""Memory that vLLM keeps beside weights and KV: measured on an RTX 4090 with an 8B model, a token budget of 2048 and
utilization 0.9. Judged 2 to 4 GB at a budget of 8192 or a large tp."""


def kv_capacity_tokens(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int = 1,
    pp: int = 1,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
    reserve_bytes: int = RESERVE_BYTES,
    *,
    dp: int = 1,
    ep: int = 1,
) -> int:
    """Tokens that fit in the KV pool of one engine of tp x pp GPUs, a whole number of blocks. With `dp` replicas of
    attention, those of one of them; each GPU then has a share of the experts of all, with `ep` a whole number.

    Raises ValueError, naming the sizes, if the weights leave no room for one block.
    """
    per_token = model.kv_bytes_per_token_per_rank(tp, pp)
    usable = int(Fraction(gpu_memory_utilization) * gpu.device_bytes)
    weights = model.weight_bytes_per_gpu(tp, pp, dp, ep)
    room = usable - weights - reserve_bytes
    blocks = room // (per_token * block_size)
    if blocks < 1:
        raise ValueError(
            f"{model.name} does not fit on {tp * pp * dp} x {gpu.name} (tp {tp}, pp {pp}"
            f"{f', dp_attention {dp}' if dp > 1 else ''}): each GPU offers "
            f"{usable / 1e9:.1f} GB (gpu_memory_utilization {gpu_memory_utilization:g} of {gpu.device_bytes / 1e9:.1f} "
            f"GB), of which weights need {weights / 1e9:.1f} GB and the engine {reserve_bytes / 1e9:.2f} GB; "
            f"raise tp{', or dp_attention and ep' if dp > 1 else ''}, or gpu_memory_utilization, or take a larger GPU"
        )
    return blocks * block_size
