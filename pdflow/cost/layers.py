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


def padded_layers(layers: int, kinds: Sequence[int]) -> int:
    """Return the layers for which vLLM allocates blocks, of `layers` that are of one kind. `kinds`: the number of
    layers of each kind.

    A KV block holds the same number of layers of whichever kind, the smallest number of them (or the largest, if it is
    less than half more); the last block of a kind is padded.
    """
    kinds = [count for count in kinds if count]
    group = min(kinds)
    if 2 * max(kinds) < 3 * group:
        group = max(kinds)
    return -(-layers // group) * group
