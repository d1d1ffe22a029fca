"""KV shapes and sizes: the bytes of one token, one block and one rank's tensor of a model.

This module decides which layers and heads a rank stores and how many bytes they take; where those bytes lie in memory
is `pdflow.layout.descriptors`, and which ranks copy them is `pdflow.layout.ranks`.

Multi-head and grouped-query attention keep K and V per KV head. Heads are split over tensor parallelism; with more
ranks than heads every rank keeps one full head, so the cluster stores, and a transfer moves, each head more than once
(measured: Qwen3-235B at TP8 has 4 KV heads and moves twice its 6.31 GB at 32,768 tokens). Multi-head
latent attention (MLA) keeps one compressed vector per token and layer instead, the same on every TP rank.

Sources: vLLM `QKVParallelLinear` (heads per rank), `get_pp_indices` in vllm/distributed/utils.py (layers per stage).
"""

from __future__ import annotations

from pdflow.protocol.values import Value


class LayoutError(ValueError):
    """A geometry that no engine has, or two that cannot exchange KV. The message says which figure is at fault."""


class MlaDims(Value, frozen=True, gc=False):
    """The width of MLA's one vector per token and layer: the latent part and the decoupled rotary key, in values."""

    latent_dim: int
    rope_dim: int


class KvShape(Value, frozen=True, gc=False):
    """The KV cache of one model at one block size. `head_dim` and `num_kv_heads` are not used where `mla` is given.

    `bytes_per_value` is that of the cache's dtype (2 for bf16, 1 for fp8); `block_size` is in tokens. `packed`: K and V
    of one token and head are one cell, as in the KV cache of vLLM 0.32 (vllm/v1/kv_cache_layout.py: its content axis).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int
    block_size: int
    mla: MlaDims | None = None
    packed: bool = False
    window_layers: int = 0
    """Of the layers, those of which a transfer moves the last `window_tokens` tokens only. Their memory is as that of
    all others here: what an engine allocates for windows is `pdflow.cost.capacity`."""
    window_tokens: int = 0
    index_bytes: int = 0
    """Bytes of one token in all layers, without K and V, the same on every rank: keys of the indexers of sparse
    attention."""
    index_layers: int = 0
    """Layers that have such keys, each in a tensor of its own."""
    state_bytes: int = 0
    """Bytes that a transfer moves in addition, whatever the tokens: states of linear attention, all ranks together."""
    state_tensors: int = 0
    """Tensors in which these bytes are."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "bytes_per_value", "block_size"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.mla is not None and (self.mla.latent_dim < 1 or self.mla.rope_dim < 0):
            raise LayoutError(f"MLA dimensions {self.mla.latent_dim} + {self.mla.rope_dim}: they must be positive")
        if not 0 <= self.window_layers <= self.num_layers or (self.window_layers and self.window_tokens < 1):
            raise LayoutError(
                f"{self.window_layers} of {self.num_layers} layers with a window of {self.window_tokens} tokens: at "
                "most all, and a window has at least one token"
            )
        if self.mla is not None and self.packed:
            raise LayoutError("MLA keeps no K and V that could be packed: leave out `packed` or `mla`")

    @property
    def stored_heads(self) -> int:
        """KV heads that TP may split: MLA counts as one, which every rank then replicates."""
        return 1 if self.mla else self.num_kv_heads

    @property
    def tensors_per_layer(self) -> int:
        """Tensors per layer: 2 for K and V, 1 where they are packed and for MLA's single latent."""
        return 1 if self.mla or self.packed else 2

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token in one head of one tensor of one layer: the smallest thing that is ever moved."""
        if self.mla:
            return (self.mla.latent_dim + self.mla.rope_dim) * self.bytes_per_value
        return (2 if self.packed else 1) * self.head_dim * self.bytes_per_value

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one copy of the whole model's KV for one token."""
        return self.num_layers * self.tensors_per_layer * self.stored_heads * self.cell_bytes + self.index_bytes

    def rank_bytes_per_token(self, tp: int, pp: int = 1, pp_rank: int = 0) -> int:
        """Return the bytes that one rank of this stage stores for one token; every TP rank of a stage stores the
        same."""
        layers = stage_layers(self.num_layers, pp)[pp_rank]
        own = len(layers) * self.tensors_per_layer * heads_per_rank(self.stored_heads, tp) * self.cell_bytes
        return own + self.index_bytes * len(layers) // self.num_layers

    def engine_bytes_per_token(self, tp: int) -> int:
        """Return the bytes that all ranks store for one token: `bytes_per_token` times the replication of its heads."""
        return self.bytes_per_token // self.stored_heads * heads_per_rank(self.stored_heads, tp) * tp

    def rank_block_bytes(self, tp: int, pp: int = 1, pp_rank: int = 0) -> int:
        """Return the bytes of one block on one rank, all its layers together."""
        return self.block_size * self.rank_bytes_per_token(tp, pp, pp_rank)

    def rank_tensor_shape(self, num_blocks: int, tp: int, pp: int = 1, pp_rank: int = 0) -> tuple[int, ...]:
        """Return the logical shape of a rank's cache, `[num_layers, 2, num_blocks, block_size, num_kv_heads,
        head_dim]`.

        The second axis is 1 for MLA, whose last two are 1 and latent + rope, and 1 where K and V are packed, whose last
        is 2 * head_dim. The order of the axes in memory is
        another matter: see `pdflow.layout.descriptors`.
        """
        layers = stage_layers(self.num_layers, pp)[pp_rank]
        heads = heads_per_rank(self.stored_heads, tp)
        width = self.cell_bytes // self.bytes_per_value
        return (len(layers), self.tensors_per_layer, num_blocks, self.block_size, heads, width)


def stage_layers(num_layers: int, pp: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage, as vLLM splits them by default.

    Layers that are left over go one each to the stages before the last, from the back: the last stage has the norm and
    the output head to compute, and the first one gets more only when all others but the last have (61 layers over 4
    stages are 15, 15, 16, 15).
    """
    if not 1 <= pp <= num_layers:
        raise LayoutError(f"{num_layers} layers over {pp} pipeline stages: each stage needs at least one layer")
    each, left = divmod(num_layers, pp)
    sizes = [each] * pp
    for stage in range(pp - 1 - left, pp - 1):
        sizes[stage] += 1
    stages = []
    start = 0
    for size in sizes:
        stages.append(range(start, start + size))
        start += size
    return tuple(stages)


def heads_per_rank(num_heads: int, tp: int) -> int:
    """Return how many KV heads each TP rank stores: an even share, or one full head where ranks outnumber heads."""
    if tp < 1:
        raise LayoutError(f"tensor parallelism of {tp}: it must be 1 or more")
    if max(num_heads, tp) % min(num_heads, tp):
        raise LayoutError(f"{num_heads} KV heads over TP {tp}: one of the two must divide the other")
    return max(1, num_heads // tp)


def heads_of_rank(num_heads: int, tp: int, tp_rank: int) -> range:
    """Return the KV heads that this TP rank stores; with TP above the number of heads, tp/num_heads ranks store the
    same."""
    size = heads_per_rank(num_heads, tp)
    first = tp_rank * num_heads // tp
    return range(first, first + size)
