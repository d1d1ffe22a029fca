"""Specs of models and GPUs, as far as the duration of a step and the size of a KV cache depend on them.

Decides the derived sizes: parameters, weight bytes, KV bytes per token, whole and per tensor-parallel rank (a KV head
that is replicated because `tp` exceeds the KV heads counts on every rank that holds it). Does not decide durations
(`roofline.py`) or what fits (`capacity.py`), and holds no preset: those are TOML data elsewhere.

Rates are per second and per GPU, links per direction; sizes are bytes. Sources: the
vendors' data sheets for rates; docs/costs.md for the factors.
"""

from __future__ import annotations

from math import ceil
from typing import Literal

import attrs
from attrs import validators

from pdflow.cost.layers import LinearAttentionSpec, SparseAttentionSpec, WindowSpec, padded_layers

_COUNT = validators.ge(1)
_RATE = validators.gt(0.0)
_HOST_S = [validators.ge(0.0), validators.le(1e3)]


@attrs.frozen(kw_only=True)
class MlaSpec:
    """Multi-head latent attention: one compressed KV vector per token and layer, the same on every rank."""

    kv_lora_rank: int = attrs.field(validator=_COUNT)
    qk_nope_head_dim: int = attrs.field(validator=_COUNT)
    qk_rope_head_dim: int = attrs.field(validator=_COUNT)
    v_head_dim: int = attrs.field(validator=_COUNT)
    q_lora_rank: int = attrs.field(default=0, validator=validators.ge(0))
    """Rank of the compressed queries; 0: queries are projected directly."""


def attention_projections(
    hidden: int, heads: int, kv_heads: int, head_dim: int, mla: MlaSpec | None, gated: bool = False
) -> dict[str, int]:
    """Return the parameters of each projection of a layer's attention, by its usual name. `gated`: that of queries also
    yields the gate of the output."""
    if mla is None:
        outer, inner = hidden * heads * head_dim, hidden * kv_heads * head_dim
        return {"q_proj": outer * (2 if gated else 1), "k_proj": inner, "v_proj": inner, "o_proj": outer}
    width = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank:
        queries = {"q_a_proj": hidden * mla.q_lora_rank, "q_b_proj": mla.q_lora_rank * width}
    else:
        queries = {"q_proj": hidden * width}
    return {
        **queries,
        "kv_a_proj_with_mqa": hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim),
        "kv_b_proj": mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim),
        "o_proj": heads * mla.v_head_dim * hidden,
    }


@attrs.frozen(kw_only=True)
class MoeDims:
    """A mixture of experts in place of the MLP: a router picks some of many small gated MLPs for each token."""

    num_experts: int = attrs.field(validator=_COUNT)
    """Number of routed experts."""
    experts_per_token: int = attrs.field(validator=_COUNT)
    expert_intermediate_size: int = attrs.field(validator=_COUNT)
    shared_intermediate_size: int = attrs.field(default=0, validator=validators.ge(0))
    """Width of the shared expert that every token passes; 0: no shared expert."""
    dense_layers: int = attrs.field(default=0, validator=validators.ge(0))
    """Number of layers with an ordinary MLP."""

    def __attrs_post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is more than num_experts {self.num_experts}")


@attrs.frozen(kw_only=True)
class ModelSpec:
    """A decoder with grouped-query or latent attention and an MLP or a mixture of experts. Biases and positional
    embeddings are left out: they are small."""

    name: str
    num_layers: int = attrs.field(validator=_COUNT)
    hidden_size: int = attrs.field(validator=_COUNT)
    intermediate_size: int = attrs.field(validator=_COUNT)
    num_heads: int = attrs.field(validator=_COUNT)
    num_kv_heads: int = attrs.field(validator=_COUNT)
    head_dim: int = attrs.field(validator=_COUNT)
    vocab_size: int = attrs.field(validator=_COUNT)
    tie_embeddings: bool = False
    weight_bytes_per_param: float = attrs.field(default=2.0, validator=[_RATE, validators.le(8.0)])
    """2 for bf16, 1 for fp8, 0.52 for 4-bit weights with a scale for every 128."""
    expert_bytes_per_param: float | None = attrs.field(
        default=None, validator=validators.optional([_RATE, validators.le(8.0)])
    )
    """Bytes per parameter of routed experts, where checkpoints quantise only these. None: as all others."""
    embedding_bytes_per_param: float = attrs.field(default=2.0, validator=[_RATE, validators.le(8.0)])
    """Bytes per parameter of the embedding and the LM head, which quantised checkpoints do not quantise."""
    kv_bytes_per_value: int = attrs.field(default=2, validator=_COUNT)
    kv_dtype: Literal["fp64", "fp32", "bf16", "fp16", "fp8", "int8"] | None = None
    """Alternative to kv_bytes_per_value; torch engines compute in it. If neither is given, it is the dtype in the
    config.json of serve.model, else of hf_config."""
    activation_dtype: Literal["bf16", "fp16", "fp8", "int8", "fp4"] = "bf16"
    """The dtype of matrix products: 8-bit ones run at the GPU's 8-bit rate, 4-bit ones at its 4-bit rate, or in 16 bits
    if it has none."""
    expert_activation_dtype: Literal["bf16", "fp16", "fp8", "int8", "fp4"] | None = None
    """The dtype of products of routed experts, where checkpoints quantise these otherwise. None: as all others."""
    gated_mlp: bool = True
    """Whether an MLP has three matrices (gate, up, down) or two (up, down)."""
    mla: MlaSpec | None = None
    moe: MoeDims | None = None
    gated_attention: bool = False
    """Whether the output of attention has a gate, as wide as the queries."""
    window: WindowSpec | None = None
    linear_attention: LinearAttentionSpec | None = None
    sparse_attention: SparseAttentionSpec | None = None
    source: str = ""

    def __attrs_post_init__(self) -> None:
        self._check_layers()
        if self.moe is not None and self.moe.dense_layers >= self.num_layers:
            raise ValueError(
                f"model {self.name!r}: dense_layers {self.moe.dense_layers} must be fewer than its {self.num_layers} "
                "layers"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model {self.name!r}: num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}"
            )

    def _check_layers(self) -> None:
        linear, sparse = self.linear_attention, self.sparse_attention
        if linear is not None and linear.layers >= self.num_layers:
            raise ValueError(
                f"model {self.name!r}: {linear.layers} layers of linear attention must be fewer than its "
                f"{self.num_layers} layers"
            )
        if self.window_layers > self.attention_layers:
            raise ValueError(
                f"model {self.name!r}: {self.window_layers} layers with a window are more than its "
                f"{self.attention_layers} layers"
            )
        if sparse is not None and (self.mla is None or not self.mla.q_lora_rank or self.window or linear):
            raise ValueError(
                f"model {self.name!r}: sparse_attention needs mla with q_lora_rank, and no other kind of layers"
            )
        if sparse is not None and sparse.layers > self.num_layers:
            raise ValueError(
                f"model {self.name!r}: {sparse.layers} layers with an indexer are more than its {self.num_layers} "
                "layers"
            )

    @property
    def attention_parameters_per_layer(self) -> int:
        """Parameters of a layer's attention, without an indexer's; of a layer whose attention is not linear."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return sum(attention_projections(self.hidden_size, *heads, self.mla, self.gated_attention).values())

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of all layers, of whichever kind."""
        found = self.attention_layers * self.attention_parameters_per_layer
        if self.linear_attention is not None:
            found += self.linear_attention.layers * self.linear_attention.parameters(self.hidden_size)
        if self.sparse_attention is not None and self.mla is not None:
            indexer = self.sparse_attention.parameters(self.hidden_size, self.mla.q_lora_rank)
            found += self.sparse_attention.layers * indexer
        return found

    @property
    def mlp_parameters_per_layer(self) -> int:
        """Parameters of the MLP of a layer without experts."""
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer; 0 without experts."""
        return 0 if self.moe is None else 3 * self.hidden_size * self.moe.expert_intermediate_size

    @property
    def expert_layers(self) -> int:
        """Layers that have experts."""
        return 0 if self.moe is None else self.num_layers - self.moe.dense_layers

    @property
    def shared_parameters(self) -> int:
        """Weights that multiply every token of a step, whichever experts it is sent to: no embedding, no LM head, no
        norms."""
        attention = self.attention_parameters
        moe = self.moe
        if moe is None:
            return attention + self.num_layers * self.mlp_parameters_per_layer
        router_and_shared = self.hidden_size * (moe.num_experts + 3 * moe.shared_intermediate_size)
        return attention + moe.dense_layers * self.mlp_parameters_per_layer + self.expert_layers * router_and_shared

    @property
    def linear_parameters(self) -> int:
        """Weights that multiply one token: with experts, those of its own experts."""
        own = 0 if self.moe is None else self.expert_layers * self.moe.experts_per_token * self.expert_parameters
        return self.shared_parameters + own

    @property
    def head_parameters(self) -> int:
        """The LM head: read once per step (it is the embedding when `tie_embeddings`)."""
        return self.vocab_size * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """The embedding and the LM head."""
        return self.head_parameters * (1 if self.tie_embeddings else 2)

    @property
    def expert_products(self) -> str:
        """The dtype of products of routed experts."""
        return self.expert_activation_dtype or self.activation_dtype

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts of all layers."""
        return 0 if self.moe is None else self.expert_layers * self.moe.num_experts * self.expert_parameters

    @property
    def parameters(self) -> int:
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.shared_parameters + self.routed_parameters + self.embedding_parameters + norms

    @property
    def bytes_per_expert_param(self) -> float:
        """Bytes per parameter of routed experts."""
        return self.weight_bytes_per_param if self.expert_bytes_per_param is None else self.expert_bytes_per_param

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, of which each tensor- and pipeline-parallel rank holds its share."""
        embeddings, experts = self.embedding_parameters, self.routed_parameters
        others = (self.parameters - embeddings - experts) * self.weight_bytes_per_param
        return round(others + experts * self.bytes_per_expert_param + embeddings * self.embedding_bytes_per_param)

    def weight_bytes_per_gpu(self, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1) -> int:
        """Return the bytes of weights on each GPU of an engine: a share of all layers, or, with `dp` replicas of
        attention, all that is no routed expert on each `tp` GPUs, and of the experts a share, with `ep` a whole number.
        """
        if dp == 1 and ep == 1:
            return -(-self.weight_bytes // (tp * pp))
        assert self.moe is not None
        experts = self.routed_parameters * self.bytes_per_expert_param
        own = experts / (tp * dp) if ep == 1 else experts / self.moe.num_experts * -(-self.moe.num_experts // ep)
        return ceil(((self.weight_bytes - experts) / tp + own) / pp)

    @property
    def attention_layers(self) -> int:
        """Layers that keep KV: those whose attention is not linear."""
        return self.num_layers - (0 if self.linear_attention is None else self.linear_attention.layers)

    @property
    def window_layers(self) -> int:
        """Layers that attend to a window."""
        return 0 if self.window is None else self.window.layers

    @property
    def dropping_layers(self) -> int:
        """Layers that keep the KV of a window only. Where all layers have one, engines are taken to keep all KV."""
        kept = self.window is None or self.window.whole_kv or self.window.layers == self.attention_layers
        return 0 if kept else self.window_layers

    @property
    def keeping_layers(self) -> int:
        """Layers that keep the KV of whole contexts."""
        return self.attention_layers - self.dropping_layers

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token keeps in the cache in layers that keep whole contexts, every KV head once."""
        return self.keeping_layers * self.kv_bytes_per_layer + self.index_bytes_per_token

    @property
    def index_bytes_per_token(self) -> int:
        """Bytes that the indexers of sparse attention keep of a token, all of them on every rank."""
        sparse = self.sparse_attention
        return 0 if sparse is None else sparse.layers * sparse.key_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that layers of linear attention keep of a sequence."""
        linear = self.linear_attention
        return 0 if linear is None else linear.layers * linear.state_bytes

    @property
    def kv_bytes_per_layer(self) -> int:
        """Bytes that one token keeps in the cache in one layer, every KV head once."""
        return self._kv_values_per_layer(1) * self.kv_bytes_per_value

    def kv_bytes_of(self, tokens: int) -> int:
        """Return the bytes that a context of so many tokens keeps, every KV head once."""
        kept = self.kv_bytes_per_token * tokens + self.state_bytes
        if self.window is not None and self.dropping_layers:
            kept += self.dropping_layers * self.kv_bytes_per_layer * min(tokens, self.window.tokens)
        return kept

    def kv_bytes_per_token_per_rank(self, tp: int, pp: int = 1) -> int:
        """Bytes of one token on one rank in layers that keep whole contexts: its share of the heads, or one whole head
        where heads are replicated.

        With pipeline stages of unequal depth it is the deepest stage that counts. Raises ValueError where vLLM does.
        """
        self.check_parallel(tp, pp)
        indexers = -(-self.index_bytes_per_token // pp)
        return -(-self.block_layers // pp) * self.kv_bytes_per_layer_per_rank(tp) + indexers

    def kv_bytes_per_layer_per_rank(self, tp: int) -> int:
        """Return the bytes of one token in one layer on one rank."""
        return self._kv_values_per_layer(tp) * self.kv_bytes_per_value

    @property
    def block_layers(self) -> int:
        """Layers that a KV block of a whole context holds, with those that only pad it."""
        return padded_layers(self.keeping_layers, self._kinds)

    @property
    def window_block_layers(self) -> int:
        """Layers for which an engine allocates blocks of windows, with those that only pad them."""
        return padded_layers(self.dropping_layers, self._kinds)

    @property
    def state_block_layers(self) -> int:
        """Layers for which an engine allocates blocks of states, with those that only pad them."""
        return padded_layers(self.num_layers - self.attention_layers, self._kinds)

    @property
    def _kinds(self) -> tuple[int, int, int]:
        return self.keeping_layers, self.dropping_layers, self.num_layers - self.attention_layers

    def check_parallel(self, tp: int, pp: int = 1) -> None:
        if tp < 1 or pp < 1:
            raise ValueError(f"model {self.name!r}: tp {tp} and pp {pp} must be at least 1")
        if self.num_heads % tp:
            raise ValueError(f"model {self.name!r}: tp {tp} does not divide its {self.num_heads} attention heads")
        larger, smaller = max(tp, self.num_kv_heads), min(tp, self.num_kv_heads)
        if self.mla is None and larger % smaller:
            raise ValueError(
                f"model {self.name!r}: tp {tp} neither divides nor is a multiple of its {self.num_kv_heads} KV heads"
            )
        if self.linear_attention is not None and self.linear_attention.key_heads % tp:
            raise ValueError(
                f"model {self.name!r}: tp {tp} does not divide its {self.linear_attention.key_heads} key heads of "
                "linear attention"
            )
        if pp > self.attention_layers:
            kept = "" if self.linear_attention is None else " with KV"
            raise ValueError(f"model {self.name!r}: pp {pp} is more than its {self.attention_layers} layers{kept}")

    def _kv_values_per_layer(self, tp: int) -> int:
        if self.mla is not None:
            return self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        return 2 * max(1, self.num_kv_heads // tp) * self.head_dim


@attrs.frozen(kw_only=True)
class GpuSpec:
    """The data sheet of one GPU, the factors by which real kernels miss it, and the host time around each step."""

    name: str
    bf16_flops: float = attrs.field(validator=_RATE)
    """Dense FLOP/s, without sparsity."""
    fp8_flops: float | None = attrs.field(default=None, validator=validators.optional(_RATE))
    fp4_flops: float | None = attrs.field(default=None, validator=validators.optional(_RATE))
    """Absent (None) if the GPU has no 4-bit products: 4-bit weights are then read as such and computed in 16 bits."""
    hbm_bytes_per_s: float = attrs.field(validator=_RATE)
    device_bytes: int = attrs.field(validator=_COUNT)
    nvlink_bytes_per_s: float | None = attrs.field(default=None, validator=validators.optional(_RATE))
    """NVLink bandwidth per direction; absent (None) if the GPUs are connected by PCIe only."""
    pcie_bytes_per_s: float = attrs.field(default=25e9, validator=_RATE)
    """Rate of copies between pinned host memory and the GPU, per direction."""
    copy_latency_s: float = attrs.field(default=10e-6, validator=_HOST_S)
    """Time from issuing a copy to its first byte: p2p_latency of NVIDIA aiconfigurator's system files."""
    nic_bytes_per_s: float = attrs.field(default=50e9, validator=_RATE)
    ec: float = attrs.field(default=0.65, validator=[_RATE, validators.le(1.0)])
    """Share of the FLOP/s that large matrix products reach."""
    ec_fp8: float | None = attrs.field(default=None, validator=validators.optional([_RATE, validators.le(1.0)]))
    """The same of 8-bit products; None: as ec. Activations are quantised for them in each step."""
    em: float = attrs.field(default=0.80, validator=[_RATE, validators.le(1.0)])
    """Share of the memory bandwidth that reading weights and KV reaches."""
    allreduce_bytes_per_s: float = attrs.field(default=20e9, validator=_RATE)
    """Effective rate of `roofline`'s all-reduce formula, not a link's speed."""
    allreduce_latency_s: float = attrs.field(default=50e-6, validator=_HOST_S)
    """Latency of a small all-reduce between two GPUs; with tp GPUs it is log2(tp) times as long."""
    host_step_s: float = attrs.field(default=1e-3, validator=_HOST_S)
    """Time per step for which the GPU waits for the engine's host code."""
    host_seq_s: float = attrs.field(default=10e-6, validator=_HOST_S)
    """Additional such time for each decoding sequence in the step."""
    source: str = ""
