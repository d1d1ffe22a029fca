"""How many tokens of KV an engine holds, and whether its model fits at all.

It is an estimate: vLLM's log line "GPU KV cache size" is better,
and scenarios take it as `kv_tokens`.
"""

from __future__ import annotations

from fractions import Fraction

import attrs

from pdflow.cost.specs import GpuSpec, ModelSpec

RESERVE_BYTES = 1_240_000_000
"""Memory that vLLM keeps beside weights and KV: measured on an RTX 4090 with an 8B model, a token budget of 2048 and
utilization 0.9. Judged 2 to 4 GB at a budget of 8192 or a large tp."""


@attrs.frozen(kw_only=True)
class ExtraBlocks:
    """The blocks that a sequence takes in addition to those of its whole context, which hold the layers that keep it:
    blocks of the layers that keep a window, and of those that keep a state.

    As vLLM's, they come from the same pool, and are of the same size. A sequence takes them when it is admitted, as
    many as it will ever need; vLLM takes those of answers as it decodes, and while it computes a prompt's chunk also
    some for its tokens, which are not counted here.
    """

    window_blocks: int
    """Blocks of one layer that a window is in at most."""
    layers: int
    """Layers that keep a window, as the pool counts them, against `block_layers` in a block."""
    block_layers: int
    state_blocks: int = 0
    """Blocks of the states of linear attention."""

    def of(self, blocks: int) -> int:
        """Return their number for a sequence whose whole context, at its end, takes `blocks` blocks."""
        return -(-min(blocks, self.window_blocks) * self.layers // self.block_layers) + self.state_blocks


def extra_blocks(model: ModelSpec, block_size: int, tp: int) -> ExtraBlocks | None:
    """Return the blocks that a sequence of this model takes in addition to its context's; None if it takes none."""
    window, linear = model.window, model.linear_attention
    dropping = window is not None and model.dropping_layers > 0
    if not dropping and linear is None:
        return None
    states = 0
    if linear is not None:
        block_bytes = model.kv_bytes_per_token_per_rank(tp) * block_size
        states = -(-model.state_block_layers * linear.state_bytes // (tp * block_bytes))
    return ExtraBlocks(
        window_blocks=-(-window.tokens // block_size) + 1 if window is not None and dropping else 0,
        layers=model.window_block_layers,
        block_layers=model.block_layers,
        state_blocks=states,
    )


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
    """Tokens that fit in the KV pool of one engine of tp x pp GPUs, in layers that keep whole contexts: a whole number
    of blocks. With `dp` replicas of attention, those of one of them; each GPU then has a share of the experts of all,
    with `ep` a whole number.

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
