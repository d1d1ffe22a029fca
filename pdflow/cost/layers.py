"""Kinds of layers whose attention does not read whole contexts.

Decides the sizes that follow from one kind's own dimensions. How they add up in a model is `specs.py`.

Source of the grouping: vLLM's hybrid KV cache manager (docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager, and
`_get_kv_cache_groups_uniform_page_size` in vllm/v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from attrs import validators

_COUNT = validators.ge(1)


@attrs.frozen(kw_only=True)
class WindowSpec:
    """Layers that attend to the latest tokens only: a sliding window, or the chunk that a token is in."""

    tokens: int = attrs.field(validator=_COUNT)
    """Tokens of the window, the token's own included. In chunks a token reads fewer: half as many in the mean."""
    layers: int = attrs.field(validator=_COUNT)
    """Number of such layers."""
    whole_kv: bool = False
    """Whether engines keep, and transfers move, the KV of whole contexts in these layers all the same, as vLLM does
    without its hybrid KV cache manager."""


@attrs.frozen(kw_only=True)
class LinearAttentionSpec:
    """Layers with a gated delta rule instead of attention (Qwen3-Next, Qwen3.5): a state of fixed size per sequence."""

    layers: int = attrs.field(validator=_COUNT)
    """Number of such layers."""
    key_heads: int = attrs.field(validator=_COUNT)
    """Heads of queries and keys; tp must divide them."""
    value_heads: int = attrs.field(validator=_COUNT)
    """Heads of values, each of which has a state."""
    key_head_dim: int = attrs.field(validator=_COUNT)
    """Width of a query or key."""
    value_head_dim: int = attrs.field(validator=_COUNT)
    """Width of a value."""
    conv_kernel: int = attrs.field(default=4, validator=_COUNT)
    """Tokens that the convolution before it reads."""
    state_bytes_per_value: int = attrs.field(default=4, validator=_COUNT)
    """4 for float32, 2 for bf16; of the convolution it is 2."""

    @property
    def _convolved(self) -> int:
        return 2 * self.key_heads * self.key_head_dim + self.value_heads * self.value_head_dim

    def parameters(self, hidden: int) -> int:
        """Return the parameters of one layer: queries, keys, values, gates, the convolution and the output."""
        values = self.value_heads * self.value_head_dim
        projected = self._convolved + values + 2 * self.value_heads
        return hidden * (projected + values) + self._convolved * self.conv_kernel

    @property
    def state_values(self) -> int:
        """Values of the recurrent state of one layer."""
        return self.value_heads * self.key_head_dim * self.value_head_dim

    @property
    def state_bytes(self) -> int:
        """Bytes that one layer keeps of a sequence."""
        return self.state_values * self.state_bytes_per_value + self._convolved * (self.conv_kernel - 1) * 2


@attrs.frozen(kw_only=True)
class SparseAttentionSpec:
    """DeepSeek sparse attention (DSA): an indexer scores all positions, and latent attention reads the best of them."""

    topk: int = attrs.field(validator=_COUNT)
    """Positions that a token attends to at most."""
    heads: int = attrs.field(validator=_COUNT)
    """Heads of the indexer."""
    head_dim: int = attrs.field(validator=_COUNT)
    """Width of the indexer's queries and key."""
    layers: int = attrs.field(validator=_COUNT)
    """Layers that have an indexer; the others take the positions of the layer before."""

    def parameters(self, hidden: int, q_lora_rank: int) -> int:
        """Return the parameters of one indexer: its queries, its key, and the weights of its heads."""
        return q_lora_rank * self.heads * self.head_dim + hidden * (self.head_dim + self.heads)

    @property
    def key_bytes(self) -> int:
        """Bytes that an indexer keeps of a token: its key in 8 bits, with a scale of 4 bytes for every 128 values."""
        return self.head_dim + 4 * -(-self.head_dim // 128)


def padded_layers(layers: int, kinds: Sequence[int]) -> int:
    """Return the layers for which vLLM allocates blocks, of `layers` that are of one kind. `kinds`: the number of
    layers of each kind.

    The last block of a kind is padded.
    """
    group = layers_per_block(kinds)
    return -(-layers // group) * group


def layers_per_block(kinds: Sequence[int]) -> int:
    """Return the layers that a KV block holds, of whichever kind: the smallest number of layers of a kind, or the
    largest if it is less than half more."""
    kinds = [count for count in kinds if count]
    group = min(kinds)
    return max(kinds) if 2 * max(kinds) < 3 * group else group
